"""Each script in examples/ runs and does what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from compressive_transformer.checkpoint import load
from compressive_transformer.compression import COMPRESSIONS
from compressive_transformer.errors import CompressiveError

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.usefixtures("cpu")


def test_a_function_of_ones_own_is_trained_saved_loaded_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMPRESSIONS, "median", COMPRESSIONS["mean"])  # set back afterwards
    example = runpy.run_path(str(EXAMPLES / "own_compression.py"))
    source = (EXAMPLES / "own_compression.py").read_text(encoding="utf-8")
    written = source[source.index("class MedianPool") : source.index("def main")]
    assert len([line for line in written.splitlines() if line]) <= 10
    example["main"](tmp_path)
    assert "bits per byte" in capsys.readouterr().out
    assert type(load(tmp_path / "run")[0].blocks[0].compression).__name__ == "MedianPool"
    monkeypatch.delitem(COMPRESSIONS, "median")
    with pytest.raises(CompressiveError, match=r"run/config.json: compression \('median'\) is not a registered"):
        load(tmp_path / "run")
