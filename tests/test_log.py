"""Callbacks and trackers are told what the log is told, by the leading process alone, and cost nothing unasked."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch

from compressive_transformer.config import TrainConfig
from compressive_transformer.data import Corpus
from compressive_transformer.errors import CompressiveError
from compressive_transformer.train import trackers, train
from compressive_transformer.train.distributed import Processes
from compressive_transformer.train.log import Log, read_log, truncate_log
from compressive_transformer.train.resume import Resume
from compressive_transformer.train.trackers import open_tracker
from runs import TRAINING, log_of, tiny_model, tiny_run

pytestmark = pytest.mark.usefixtures("cpu")

FEW = {**TRAINING, "steps": 4, "late_update_step": 0, "sample_every": 4, "validate_every": 2}


def run_of(corpus: Corpus, out: Path, *, resume: Resume = None, stop_at: int | None = None, **options: Any) -> None:
    settings = TrainConfig(**{**FEW, **options.pop("training", {})})
    train(tiny_model(), corpus, settings, out, resume=resume, stop_at=stop_at, **options)


# --- callbacks ---


def test_a_callback_gets_each_entry_and_the_model_and_may_add_to_the_entry(corpus: Corpus, tmp_path: Path) -> None:
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
def test_a_callback_that_returns_true_stops_the_run_with_a_checkpoint(corpus: Corpus, tmp_path: Path, at: str) -> None:
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


def test_steps_since_the_last_line_are_logged_when_a_callback_stops(corpus: Corpus, tmp_path: Path) -> None:
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


def test_only_rank_0_calls_callbacks_and_all_processes_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_a_log_is_truncated_and_keeps_samples_with_any_line_separator(tmp_path: Path) -> None:
    lines = ['{"step": 1, "sample": "a\u2028b\x85c"}\n', '{"step": 2, "loss": 0.1}\n', '{"step": 3, "lo']
    (tmp_path / "log.jsonl").write_text("".join(lines), encoding="utf-8")
    assert read_log(tmp_path / "log.jsonl") == [json.loads(line) for line in lines[:2]]
    truncate_log(tmp_path / "log.jsonl", 1)
    assert (tmp_path / "log.jsonl").read_text(encoding="utf-8") == lines[0]


def test_the_log_has_losses_validations_and_samples(finished: Path) -> None:
    lines = log_of(finished)
    losses, validations, samples = (
        {line["step"]: line for line in lines if kind in line} for kind in ("loss", "validation", "sample")
    )
    assert list(losses) == list(range(1, 11))
    assert list(validations) == [4, 8, 10]
    assert list(samples) == [5, 10]
    assert [line["tokens"] for line in losses.values()] == sorted(line["tokens"] for line in losses.values())
    updates = [step for step, line in losses.items() if "learning_rate" in line]
    assert updates == [1, 2, 3, 6, 9, 10]
    for step in updates:
        assert losses[step]["gradient_norm"] > 0
        assert (losses[step]["compression_gradient_norm"] > 0) == (step > 1)
    assert losses[1]["reconstruction_error"] == [0.0, 0.0]  # nothing has been evicted yet
    assert validations[4]["validation"]["tokens"] == 100
    assert all(isinstance(line["sample"], str) for line in samples.values())


def test_a_line_of_the_log_is_the_mean_over_its_steps(corpus: Corpus, finished: Path, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", model={"dropout": 0.1}, log_every=4)
    single = {line["step"]: line for line in log_of(finished) if "loss" in line}
    ends = [line for line in log_of(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in ends] == [4, 8, 10]
    for begin, line in zip((0, 4, 8), ends, strict=True):
        steps = range(begin + 1, line["step"] + 1)
        for name in ("loss", "compression_loss"):  # every lane of this corpus reads whole segments here
            mean = sum(single[step][name] for step in steps) / len(steps)
            assert line[name] == pytest.approx(mean, rel=1e-3)


def test_speed_and_progress_go_to_stderr_in_lines_that_are_not_broken(
    corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny_run(corpus, tmp_path / "run", stop_at=5)
    printed = capfd.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert re.fullmatch(r"step 2/5  loss \d\.\d{4} nats  compression .* tokens/s", lines[1])
    assert sum(line.startswith("step ") for line in lines) == 7
    written = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert all(line["tokens_per_second"] > 0 for line in written if "loss" in line)


# --- trackers ---


def test_an_unknown_or_missing_tracker_is_refused_before_writing(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompressiveError, match=r"tracker \('mlflow'\) must be 'tensorboard' or 'trackio' or 'wandb'"):
        run_of(corpus, tmp_path / "run", tracker="mlflow")
    (tmp_path / "here/wandb").mkdir(parents=True)  # which W&B makes; it is not the package
    monkeypatch.setattr(trackers, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path / "here")]))
    for name in trackers.TRACKERS:
        with pytest.raises(CompressiveError, match=rf"{name} is not installed; pip install '.*\[{name}\]'$"):
            run_of(corpus, tmp_path / "run", tracker=name)
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
def test_tensorboard_hides_steps_beyond_the_checkpoint(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_trackio_resumes_the_same_run(corpus: Corpus, tmp_path: Path) -> None:
    tracked_in_two_parts(corpus, tmp_path / "run", "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    assert {(run, name) for run, name, *_ in rows} == {(rows[0][0], f"run-{run_id(tmp_path / 'run')}")}
    losses = [(step, json.loads(values)["train/loss"]) for *_, step, values in rows if b"train/loss" in values]
    assert losses == [(line["step"], line["loss"]) for line in log_of(tmp_path / "run") if "loss" in line]


@pytest.mark.slow
def test_weights_and_biases_resumes_the_same_run_offline(corpus: Corpus, tmp_path: Path) -> None:
    tracked_in_two_parts(corpus, tmp_path / "run", "wandb", WANDB_MODE="offline", HOME=str(tmp_path))
    parts = [folder.name for folder in (tmp_path / "run/wandb").glob("offline-run-*")]
    assert len(parts) == 2
    assert all(name.endswith(f"-{run_id(tmp_path / 'run')}") for name in parts)


def test_weights_and_biases_without_an_account_leaves_the_folder_empty(
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
