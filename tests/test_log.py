"""Callbacks and trackers are told what the log is told, by the leading process alone, and cost nothing unasked."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compressive_transformer.config import TrainConfig
from compressive_transformer.data import Corpus
from compressive_transformer.errors import CompressiveError
from compressive_transformer.train import train
from compressive_transformer.train.distributed import Processes
from compressive_transformer.train.log import Log
from compressive_transformer.train.resume import Resume
from compressive_transformer.train.trackers import open_tracker
from runs import TRAINING, log_of, tiny_model

pytestmark = pytest.mark.usefixtures("cpu")

FEW = {**TRAINING, "steps": 4, "late_update_step": 0, "sample_every": 4, "validate_every": 2}


def run_of(corpus: Corpus, out: Path, *, resume: Resume = None, stop_at: int | None = None, **options: Any) -> None:
    settings = TrainConfig(**{**FEW, **options.pop("training", {})})
    train(tiny_model(), corpus, settings, out, resume=resume, stop_at=stop_at, **options)


# --- callbacks ---


def test_a_callback_sees_each_line_of_the_log_and_the_model_and_may_add_to_the_line(
    corpus: Corpus, tmp_path: Path
) -> None:
    seen = []

    def largest(entry: dict[str, Any], model: torch.nn.Module) -> None:
        entry["largest"] = max(float(parameter.detach().abs().max()) for parameter in model.parameters())
        seen.append(entry)

    run_of(corpus, tmp_path / "run", callbacks=[largest])
    written = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert written == seen
    assert [sorted({"loss", "validation", "sample"} & set(entry)) for entry in seen] == [
        *([["loss"]] * 2),
        ["validation"],
        *([["loss"]] * 2),
        ["validation"],
        ["sample"],
    ]
    assert len({entry["largest"] for entry in seen}) == 4  # parameters of each of the four steps


@pytest.mark.parametrize("at", ["loss", "validation"])
def test_a_callback_that_returns_true_ends_the_run_with_a_checkpoint_that_goes_on_to_the_bit(
    corpus: Corpus, tmp_path: Path, at: str
) -> None:
    called = []
    run_of(
        corpus,
        tmp_path / "run",
        training={"log_every": 2},
        callbacks=[lambda entry, model: at in entry and entry["step"] == 2, lambda entry, model: called.append(entry)],
    )
    assert [line["step"] for line in log_of(tmp_path / "run")] == [2, 2]
    assert len(called) == 2  # all callbacks are called, whatever the first says
    assert [folder.name for folder in (tmp_path / "run/resume").iterdir()] == ["step-000000002"]
    run_of(corpus, tmp_path / "run", training={"log_every": 2}, resume="latest")
    run_of(corpus, tmp_path / "whole", training={"log_every": 2})
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")


def test_steps_since_the_last_line_are_logged_when_a_callback_ends_the_run(corpus: Corpus, tmp_path: Path) -> None:
    run_of(
        corpus,
        tmp_path / "run",
        training={"log_every": 4},
        callbacks=[lambda entry, model: "validation" in entry],
    )
    assert [sorted({"loss", "validation"} & set(line)) for line in log_of(tmp_path / "run")] == [
        ["validation"],
        ["loss"],
    ]


def test_only_the_leading_process_calls_callbacks_and_all_learn_that_the_run_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called, told = [], []

    def stop(entry: dict[str, Any], model: Any) -> bool:
        called.append(entry)
        return True

    def all_reduce(processes: Processes, values: torch.Tensor) -> torch.Tensor:
        told.append(float(values))
        return torch.ones(())  # what the leading process says reaches all

    monkeypatch.setattr(Processes, "all_reduce", all_reduce)
    other = Log(tiny_model(), Processes(1, 2, torch.device("cpu")), tmp_path, last=1, callbacks=[stop])
    other.write({"step": 1})
    assert (called, told, other.stopped) == ([], [0.0], True)


def test_what_json_has_no_form_for_is_refused_by_name(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(CompressiveError, match=r"must hold plain values only, .* Tensor is not JSON serializable"):
        run_of(corpus, tmp_path / "run", callbacks=[lambda entry, model: entry.update(norm=torch.ones(1))])


# --- trackers ---


def test_an_unknown_tracker_and_a_missing_package_are_refused_before_anything_is_written(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompressiveError, match=r"tracker \('mlflow'\) must be 'tensorboard' or 'trackio' or 'wandb'"):
        run_of(corpus, tmp_path / "run", tracker="mlflow")
    (tmp_path / "here/wandb").mkdir(parents=True)  # which W&B makes; it is not the package
    code = """if True:
        import sys
        from compressive_transformer.train import trackers
        sys.path = [sys.argv[1]]
        for name in trackers.TRACKERS:
            try:
                trackers.require_tracker(name)
            except trackers.CompressiveError as error:
                print(error)
    """
    told = subprocess.run([sys.executable, "-c", code, tmp_path / "here"], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == [
        f"{name} is not installed; pip install 'compressive-transformer[{name}]'"
        for name in ("tensorboard", "trackio", "wandb")
    ]
    assert not (tmp_path / "run").exists()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: steps and values of each name."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(folder))
    shown.Reload()
    return {name: [(event.step, event.value) for event in shown.Scalars(name)] for name in shown.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages below TensorBoard
def test_tensorboard_shows_the_numbers_of_the_log_across_a_resume(corpus: Corpus, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_of(corpus, tmp_path / "run", tracker="tensorboard", stop_at=2)
    run_of(corpus, tmp_path / "run", tracker="tensorboard", resume="latest")
    shown, lines = scalars(tmp_path / "run/tensorboard"), log_of(tmp_path / "run")
    for name in ("loss", "compression_loss", "learning_rate", "gradient_norm", "tokens"):
        expected = [(line["step"], line[name]) for line in lines if "loss" in line]
        assert shown[f"train/{name}"] == [(step, pytest.approx(value)) for step, value in expected]
    for layer in range(2):
        expected = [(line["step"], line["reconstruction_error"][layer]) for line in lines if "loss" in line]
        assert shown[f"train/reconstruction_error/{layer}"] == [(s, pytest.approx(value)) for s, value in expected]
    assert [step for step, _ in shown["validation/bits_per_byte"]] == [2, 4]
    assert not any("step" in name for name in shown)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_hides_what_a_run_that_was_killed_wrote_beyond_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for resumed, steps in ((0, (1, 2, 3, 4)), (2, (3,))):
        with open_tracker("tensorboard", tmp_path, {}, step=resumed) as callback:
            for step in steps:
                callback({"step": step, "loss": float(10 * resumed + step)}, tiny_model())
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(1, 1.0), (2, 2.0), (3, 23.0)]}


TWO_PARTS = """if True:
    import sys
    from pathlib import Path
    from compressive_transformer import TrainConfig, open_corpus, train
    from runs import TRAINING, tiny_model
    data, out, tracker, resume = sys.argv[1:]
    settings = TrainConfig(**{**TRAINING, "steps": 4, "late_update_step": 0})
    part = {"resume": "latest", "stop_at": 4} if resume == "yes" else {"stop_at": 2}
    train(tiny_model(), open_corpus(data), settings, Path(out), tracker=tracker, **part)
"""


def tracked_in_two_parts(corpus: Corpus, out: Path, tracker: str, **environment: str) -> None:
    """A run of four steps, stopped and resumed after two, each part in a process of its own, without a network."""
    pytest.importorskip(tracker)
    for resume in ("no", "yes"):
        done = subprocess.run(
            [sys.executable, "-c", TWO_PARTS, corpus.path, out, tracker, resume],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""


def test_trackio_goes_on_with_the_same_run(corpus: Corpus, tmp_path: Path) -> None:
    tracked_in_two_parts(corpus, tmp_path / "run", "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    assert {(run, name) for run, name, *_ in rows} == {(rows[0][0], f"run-{run_id(tmp_path / 'run')}")}
    losses = [(step, json.loads(values)["train/loss"]) for *_, step, values in rows if b"train/loss" in values]
    assert losses == [(line["step"], line["loss"]) for line in log_of(tmp_path / "run") if "loss" in line]


def test_weights_and_biases_goes_on_with_the_same_run_offline(corpus: Corpus, tmp_path: Path) -> None:
    tracked_in_two_parts(corpus, tmp_path / "run", "wandb", WANDB_MODE="offline", HOME=str(tmp_path))
    parts = [folder.name for folder in (tmp_path / "run/wandb").glob("offline-run-*")]
    assert len(parts) == 2
    assert all(name.endswith(f"-{run_id(tmp_path / 'run')}") for name in parts)


def test_weights_and_biases_without_an_account_is_an_error_that_leaves_the_folder_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "run").mkdir()
    with pytest.raises(CompressiveError, match=r"cannot start: .* or set WANDB_MODE=offline"):
        open_tracker("wandb", tmp_path / "run", {}, step=0).__enter__()
    assert not list((tmp_path / "run").iterdir())


def run_id(run: Path) -> str:
    return str(json.loads((run / "tracker.json").read_text(encoding="utf-8"))["id"])
