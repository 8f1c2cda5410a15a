"""Each script in examples/ runs and does what it says."""

from __future__ import annotations

import json
import math
import runpy
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from compressive_transformer.checkpoint import load
from compressive_transformer.compression import COMPRESSIONS
from compressive_transformer.data import open_corpus
from compressive_transformer.errors import CompressiveError

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.usefixtures("cpu")


def test_own_compression_is_trained_saved_loaded_and_evaluated(
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


# Sizes that take a minute, and what runs in their place.
SMALLER = {
    "d_model=64": "d_model=16",
    "steps=600": "steps=4, log_every=1",
    "batch_size=16": "batch_size=2",
    "warmup_steps=60": "warmup_steps=1",
    "validate_every=200": "validate_every=2",
    "validation_tokens=5_000": "validation_tokens=300",
    "tokenizer, 3_000": "tokenizer, 300",
    "stream.write(100": "stream.write(5",
    "compressed_lengths=(0, 8, 32, 64)": "compressed_lengths=(0, 8)",
}


def test_the_notebook_runs_and_holds_no_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="its pictures need the extra `plot`")
    matplotlib.use("agg")
    notebook = json.loads((EXAMPLES / "memory.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    replaced = dict.fromkeys(SMALLER, False)
    namespace: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        code = "".join(cell["source"])
        assert len(code.splitlines()) <= 25
        for sizes, smaller in SMALLER.items():
            replaced[sizes] |= sizes in code
            code = code.replace(sizes, smaller)
        exec(compile(code, f"cell {number}", "exec"), namespace)
    assert all(replaced.values())
    printed = capsys.readouterr().out
    assert "temporal range: 320 tokens" in printed
    assert "compressed slot 31: " in printed
    shown = namespace["plt"].get_fignums()
    assert len(shown) == 4
    namespace["plt"].close("all")
    # What lies beyond the temporal range and two segments has left no trace.
    assert namespace["divergence"][-1] < 1e-10 < namespace["divergence"][0]


def test_a_plain_loop_learns_and_saves_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "plain_loop.py"))["main"](tmp_path)
    printed = capsys.readouterr().out
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 3
    assert losses[2] < losses[0] < math.log(257) + 0.5
    assert "bits per byte" in printed
    assert load(tmp_path / "run")[0].config.segment_length == 32


@pytest.mark.filterwarnings("ignore")  # of Lightning and what it stands on
def test_a_run_with_lightning_resumes_exactly(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    example = runpy.run_path(str(EXAMPLES / "lightning_loop.py"))
    resumed = example["main"](tmp_path)
    corpus, config = open_corpus(tmp_path / "data"), resumed.model.config
    torch.manual_seed(0)
    whole = example["Training"](corpus, config)
    lightning.Trainer(max_epochs=2, **example["QUIET"]).fit(whole)
    assert int(whole.memory.seen.max()) == 2 * example["STEPS"] * config.segment_length
    for one, other in (
        (resumed.model.state_dict(), whole.model.state_dict()),
        (resumed.memory.state_dict(), whole.memory.state_dict()),
    ):
        assert all(torch.equal(one[name], value) for name, value in other.items())
    assert resumed.lanes.state_dict() == whole.lanes.state_dict()


@pytest.mark.slow  # trains on half a book
def test_foreign_lines_are_more_surprising_than_genuine_ones(tmp_path: Path) -> None:
    """Lines of a book are own, lines of this project foreign. On logs: results/logs.json."""
    example = runpy.run_path(str(EXAMPLES / "foreign_lines.py"))
    book = example["lines_of"](Path(str(files("compressive_transformer.apps.demo") / "sample/train/11.txt")))
    foreign = example["lines_of"](EXAMPLES / "foreign_lines.py")
    run = example["train_on"](book[:1500], tmp_path, steps=60, seed=0)
    assert example["foreign_score"](run, book[1400:1500], book[1500:1800], foreign) > 0.85


def test_the_area_under_the_curve_counts_ordered_pairs() -> None:
    area = runpy.run_path(str(EXAMPLES / "foreign_lines.py"))["area_under_curve"]
    assert area([1.0, 2.0], [3.0, 4.0]) == 1
    assert area([3.0, 4.0], [1.0, 2.0]) == 0
    assert area([1.0, 2.0, 3.0], [2.0]) == 0.5
    assert area([1.0, 2.0], [2.0, 3.0]) == (1 + 0.5 + 1 + 1) / 4
