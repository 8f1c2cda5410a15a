"""The command line: each command end to end, and every mistake in one line with nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compressive_transformer.checkpoint import load
from compressive_transformer.cli import COMMANDS, main
from compressive_transformer.corpus import Corpus
from compressive_transformer.evaluate import evaluate
from runs import MODEL, TRAINING, write_books

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compressive(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cpu: None) -> Run:
    """Runs the command with some arguments: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compressive", *map(str, arguments)])
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code
        output, errors = capfd.readouterr()
        # A text as status is what Python prints to standard error before it exits with 1.
        return (1, output, errors + status) if isinstance(status, str) else (int(str(status or 0)), output, errors)

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tables = {"model": MODEL, "train": {**TRAINING, "steps": 3, "warmup": 1}}
    lines = [
        line
        for name, table in tables.items()
        for line in (f"[{name}]", *(f"{key} = {value}" for key, value in table.items()))
    ]
    path = tmp_path / "recipe.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_from_text_to_a_score_and_to_new_text(compressive: Run, recipe: Path, tmp_path: Path) -> None:
    books, data, run = write_books(tmp_path / "books"), tmp_path / "data", tmp_path / "run"
    status, output, _ = compressive("prepare", books, data)
    assert status == 0
    assert [line.split()[0] for line in output.splitlines()] == ["train", "validation", "test"]
    assert compressive("train", recipe, data, run, "--set", "model.compression=mean")[0] == 0
    assert json.loads((run / "config.json").read_text())["model"]["compression"] == "mean"
    status, output, _ = compressive("evaluate", run, data, "--split", "test", "--json", "--memory-length", 4)
    assert status == 0
    result = json.loads(output)
    assert result["conditions"]["model"]["memory_length"] == 4
    assert result["tokens"] == sum(document["tokens"] for document in result["documents"])
    (tmp_path / "prompt.txt").write_bytes(b"It was a dark night.\r\n")
    first = compressive("generate", run, "--prompt", tmp_path / "prompt.txt", "--tokens", 20, "--seed", 1)
    again = compressive("generate", run, "--prompt", tmp_path / "prompt.txt", "--tokens", 20, "--seed", 1)
    assert first == again
    assert (first[0], len(first[1]) > 1) == (0, True)


def test_the_score_that_is_printed_is_that_of_the_library(compressive: Run, finished: Path, corpus: Corpus) -> None:
    model, _ = load(finished)
    expected = evaluate(model, corpus.validation)
    status, output, _ = compressive("evaluate", finished, corpus.path, "--batch", 1)
    assert status == 0
    assert f"bits per byte     {expected.total.bits_per_byte:.4f}" in output


MISTAKES: dict[str, tuple[str, str]] = {
    "missing folder": ("prepare {tmp}/nowhere {out}", "nowhere"),
    "empty file": ("prepare {tmp}/empty {out} --holdout 0", "empty.txt"),
    "not UTF-8": ("prepare {tmp}/latin {out} --holdout 0", "latin.txt"),
    "no such split": ("evaluate {run} {tmp}/whole --split test", "no test split"),
    "missing run": ("evaluate {tmp}/nowhere {data}", "nowhere"),
    "corrupt checkpoint": ("evaluate {tmp}/corrupt {data}", "model.safetensors"),
    "other shape": ("generate {tmp}/shape", "embedding.weight"),
    "pickled": ("generate {tmp}/model.pt", "never loaded"),
    "unknown key": ("train {recipe} {data} {out} --set model.d_modle=16", "did you mean d_model"),
    "impossible size": ("train {recipe} {data} {out} --set model.n_heads=3", r"n_heads \(3\) must divide d_model"),
    "negative size": ("train {recipe} {data} {out} --set model.memory_length=-1", r"memory_length \(-1\)"),
    "not a number": ("train {recipe} {data} {out} --set train.steps=many", r"steps \('many'\)"),
    "bad override": ("train {recipe} {data} {out} --set compression", "--set compression"),
    "bad TOML": ("train {tmp}/bad.toml {data} {out}", "bad.toml"),
    "missing recipe": ("train {tmp}/nowhere.toml {data} {out}", "nowhere.toml"),
    "lanes and parts": ("train {recipe} {data} {out} --set train.accumulation=3", "accumulation"),
    "unknown compression": ("train {recipe} {data} {out} --set model.compression=median", "known: mean, max, conv"),
    "resume of nothing": ("train {recipe} {data} {out} --resume", "nothing to resume"),
    "existing run": ("train {recipe} {data} {run}", "exists already"),
    "resume, changed": ("train {recipe} {data} {run} --resume", "cannot resume, .*steps|dropout"),
    "prompt not UTF-8": ("generate {run} --prompt {tmp}/latin/latin.txt", "not UTF-8"),
    "missing prompt": ("generate {run} --prompt {tmp}/nowhere.txt", "nowhere.txt"),
    "temperature": ("generate {run} --temperature -1", r"temperature \(-1.0\)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_clear_line_and_leaves_nothing(
    mistake: str, compressive: Run, recipe: Path, finished: Path, corpus: Corpus, tmp_path: Path
) -> None:
    for name, content in {"empty": b"", "latin": "caf\u00e9".encode("latin-1"), "whole": b"Some text."}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_bytes(content)
    assert compressive("prepare", tmp_path / "whole", tmp_path / "corpus", "--holdout", 0)[0] == 0
    shutil.rmtree(tmp_path / "whole")
    (tmp_path / "corpus").rename(tmp_path / "whole")
    (tmp_path / "bad.toml").write_text("[model", encoding="utf-8")
    shutil.copytree(finished, tmp_path / "corrupt")
    (tmp_path / "corrupt" / "model.safetensors").write_bytes(b"no tensors")
    shutil.copytree(finished, tmp_path / "shape")
    config = json.loads((tmp_path / "shape" / "config.json").read_text())
    config["model"]["d_model"] = 32
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    out, before = tmp_path / "out", sorted(tmp_path.iterdir())
    command, message = MISTAKES[mistake]
    places = {"tmp": tmp_path, "out": out, "run": finished, "data": corpus.path, "recipe": recipe}
    status, _, errors = compressive(*command.format(**places).split())
    assert status == 1
    line = errors.splitlines()[-1]
    assert line.startswith("compressive: ")
    assert "Traceback" not in errors
    assert re.search(message, line), line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("arguments", [("train",), ("nonsense",), ("generate", "run", "--tokens", "many"), ()])
def test_wrong_usage_exits_with_2(compressive: Run, arguments: tuple[str, ...]) -> None:
    assert compressive(*arguments)[0] == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_argument(compressive: Run, command: str) -> None:
    status, output, _ = compressive(command, "--help")
    assert status == 0
    assert COMMANDS[command].__doc__ is not None
    for line in COMMANDS[command].__doc__.splitlines()[:1]:
        assert line.strip().split(":")[0][:60] in " ".join(output.split())


def test_a_mistake_in_a_real_process_prints_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "compressive_transformer.cli", "generate", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"compressive: {tmp_path / 'nowhere'}: no such folder; expected a run that `compressive train` wrote"
    ]
