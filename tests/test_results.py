"""The page of results says what the files in results/ say, all of them, and nothing else."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from compressive_transformer.apps.experiment.plan import read_plan
from compressive_transformer.apps.experiment.report import Results, summarize
from compressive_transformer.apps.experiment.running import finish
from compressive_transformer.data import Corpus
from compressive_transformer.errors import CompressiveError
from runs import MODEL, TRAINING

ROOT = Path(__file__).parents[1]
PAGE = "# Title\n\nBy hand.\n\n<!-- results of tiny -->\nold\n<!-- end of results -->\n\nAlso by hand.\n"
SCRIPT: Any = runpy.run_path(str(ROOT / "docs" / "write_results.py"))
TRANSFER: dict[str, Any] = {
    "command": "python examples/transfer.py a b data",
    "format": 1,
    "transfer": [
        {
            "compression": "own f_c",
            "bits_per_byte": [2.0, 2.2],
            "difference": None,
            "difference_over_runs": None,
            "difference_over_documents": None,
        },
        {
            "compression": "f_c of the other corpus",
            "bits_per_byte": [2.1, 2.3],
            "difference": 0.1,
            "difference_over_runs": [0.05, 0.15],
            "difference_over_documents": None,
        },
    ],
    "donors": "a",
    "networks": "b",
    "compression": "conv",
    "seeds": [0, 1],
    "evaluate": {"split": "test", "tokens": 3000},
    "tokens": 123456,
    "corpus": "abc",
    "commits": ["0123"],
}
pytestmark = pytest.mark.usefixtures("cpu")


@pytest.fixture(scope="module")
def content(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a real experiment of two settings and one seed."""
    out = tmp_path_factory.mktemp("experiment")
    plan = {
        "seeds": [0],
        "baseline": "xl",
        "model": MODEL,
        "train": {**TRAINING, "steps": 2, "validate_every": 0, "sample_every": 0},
        "evaluate": {"split": "test", "tokens": 200},
        "settings": {"xl": {"model": {"compressed_length": 0}}, "conv": {}},
    }
    checked = read_plan(plan, corpus)
    for run in checked.runs():
        finish(run, corpus, out)
    return summarize(checked, corpus, out, processes=1, failed={}).to_dict()


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "tiny.json").write_text(text, encoding="utf-8")
    return folder


def test_the_page_is_what_its_script_writes_now() -> None:
    results = SCRIPT["read_results"](ROOT / "results")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert SCRIPT["fill"](page, results) == page


@pytest.mark.slow
def test_the_pictures_are_those_that_the_script_draws_now(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    SCRIPT["draw"](SCRIPT["read_results"](ROOT / "results"), tmp_path)
    shipped = sorted((ROOT / "docs").glob("results-*.svg"))
    assert [path.name for path in sorted(tmp_path.glob("*.svg"))] == [path.name for path in shipped]
    for path in shipped:  # Matplotlib writes each label as a comment; releases may differ in how they draw it.
        labels = [
            re.findall(r"<!-- (.*?) -->", file.read_text(encoding="utf-8"), flags=re.DOTALL)
            for file in (path, tmp_path / path.name)
        ]
        assert labels[0] == labels[1] != []


def test_a_part_has_the_table_and_all_that_is_needed_to_repeat_it(content: dict[str, Any], tmp_path: Path) -> None:
    content = {**content, "command": "compressive experiment tiny.toml data/ runs/tiny"}
    page = SCRIPT["fill"](PAGE, SCRIPT["read_results"](write(tmp_path, content)))
    assert str(Results(content)) in page
    torch = content["runs"][0]["score"]["conditions"]["versions"]["torch"]
    told = ["compressive experiment tiny.toml", *content["commits"], content["corpus"], "seeds 0", f"torch {torch}"]
    for part in (*told, "](results-tiny.svg)", "](../results/tiny.json)", "test split, about 200 tokens"):
        assert part in page, part
    assert "old" not in page.split("<!-- results of tiny -->")[1].splitlines()
    assert page.startswith("# Title\n\nBy hand.\n\n<!--")
    assert page.endswith("-->\n\nAlso by hand.\n")
    assert SCRIPT["fill"](page, {"tiny": content}) == page  # writing it again changes nothing
    assert "Not run yet." in SCRIPT["fill"](page, {})


def test_a_picture_is_drawn_for_each_experiment(content: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    SCRIPT["draw"]({"tiny": content, "transfer": TRANSFER}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results-tiny.svg"]


def test_buckets_have_tables_of_their_own(tmp_path: Path) -> None:
    bucket = {"bucket": "< 100", "words": 1234, "bytes": 1000, "difference": -0.5, "difference_over_runs": [-1, 0]}
    nats = {"baseline": [1000 * math.log(2)] * 2, "setting": [400 * math.log(2), 600 * math.log(2)]}
    kinds = {"by_frequency": [{**bucket, "nats": nats}], "by_position": [{**bucket, "bucket": "0", "nats": nats}]}
    content = {
        "command": "python examples/buckets.py a b data",
        "format": 1,
        "baseline": "xl",
        "setting": "conv",
        "seeds": [3, 4],
        "buckets": kinds,
    }
    part = SCRIPT["part_of"]("tiny", content)
    assert "| frequency | words | xl | conv | difference | 95 % over seeds |" in part
    assert "| < 100 | 1,234 | 1.0000 | 0.5000 | -0.5000 | -1.0000 to +0.0000 |" in part
    assert "| position | words | xl | conv |" in part
    assert "seeds 3, 4" in part
    assert content["command"] in part
    SCRIPT["draw"]({"tiny": content}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_foreign_lines_have_a_table_of_their_own() -> None:
    content = {
        "command": "python examples/foreign_lines.py a b",
        "format": 1,
        "log": "a",
        "steps": 1234,
        "seeds": [3, 4],
    }
    part = SCRIPT["part_of"]("tiny", {**content, "foreign_lines": {"b": [0.5, 1.0]}})
    assert "| b | 0.7500 | 0.5000 to 1.0000 |" in part
    assert "Among lines of a; 1,234 steps, mean over seeds 3, 4." in part
    assert content["command"] in part


def test_transfer_has_a_table_of_its_own(tmp_path: Path) -> None:
    page = SCRIPT["fill"](PAGE, SCRIPT["read_results"](write(tmp_path, TRANSFER)))
    assert "| own f_c | 2.1000 ± 0.1414 | – | – | – |" in page
    assert "| f_c of the other corpus | 2.2000 ± 0.1414 | +0.1000 | +0.0500 to +0.1500 | – |" in page
    for part in (TRANSFER["command"], "Commit: 0123. Corpus: abc.", "123,456 tokens trained", "seeds 0, 1"):
        assert part in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "tiny.json: not a readable JSON file"),
        ({"format": 0}, "tiny.json: format 0 is unknown"),
        ({"format": 1, "runs": []}, "tiny.json: not the results.json of an experiment"),
        ({**TRANSFER, "transfer": [{}]}, "tiny.json: not the results.json of an experiment"),
        ({"format": 1, "missing": ["conv, seed 1"]}, "tiny.json: not all runs are finished"),
    ],
)
def test_a_file_that_is_no_whole_result_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompressiveError, match=message):
        SCRIPT["read_results"](write(tmp_path, change))


def test_results_that_the_page_has_no_place_for_are_refused() -> None:
    with pytest.raises(CompressiveError, match=r"results/new\.json has no place in the page: add the lines"):
        SCRIPT["fill"](PAGE, {"new": TRANSFER})
