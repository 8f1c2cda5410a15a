"""A run is a function of its data and settings alone: however it is cut in time, in parts or over processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compressive_transformer.checkpoint import load
from compressive_transformer.config import TrainConfig
from compressive_transformer.data import Corpus
from compressive_transformer.data.lanes import lanes
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import evaluate, truncate_split
from compressive_transformer.model import CompressiveTransformer, next_token_loss
from compressive_transformer.train import Trainer, train
from compressive_transformer.train.distributed import Processes
from compressive_transformer.train.log import Log, read_log, truncate_log
from compressive_transformer.train.optimizer import Optimizer
from compressive_transformer.train.resume import Resume
from compressive_transformer.train.signals import StopSignals
from runs import MODEL, TRAINING, log_of, tiny_model, tiny_run

pytestmark = pytest.mark.usefixtures("cpu")

STEPS = TRAINING["steps"]

# For runs that sum in another order: AdamW makes of the rounding of a gradient near zero a step of this size.
SLOW = {"learning_rate": 1e-3, "compression_learning_rate": 1e-4}


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def assert_same_run(actual: Path, expected: Path) -> None:
    """The same parameters, optimizer, memory, random state, position and log, to the bit."""
    assert sorted(file.name for file in actual.iterdir()) == sorted(file.name for file in expected.iterdir())
    point, other = (next((run / "resume").iterdir()) for run in (actual, expected))
    for name in ("training.safetensors", "process-0.safetensors"):
        assert_same_tensors(load_file(point / name), load_file(other / name))
    assert (point / "state.json").read_text() == (other / "state.json").read_text()
    assert log_of(actual) == log_of(expected)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (actual / name).read_bytes() == (expected / name).read_bytes()


def assert_close_parameters(
    actual: CompressiveTransformer, expected: CompressiveTransformer, tolerance: float = 1e-6
) -> None:
    for (name, one), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


# --- going on ---


@pytest.mark.parametrize("stops", [(5, 10), (1, 4, 7, 10)])
def test_a_run_in_parts_is_the_run_in_one_go_to_the_bit(
    corpus: Corpus, finished: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    for number, stop in enumerate(stops):
        last = tiny_run(
            corpus,
            tmp_path / "run",
            model={"dropout": 0.1, "seed": number},
            resume="latest" if number else None,
            stop_at=stop,
        )
        assert [file.name for file in (tmp_path / "run/resume").iterdir()] == [f"step-{stop:09}"]
    assert_same_run(tmp_path / "run", finished)
    shared = load_file(finished / f"resume/step-{STEPS:09}/training.safetensors")
    assert_same_tensors(
        {f"model.{k}": v for k, v in last.state_dict().items()},
        {name: value for name, value in shared.items() if name.startswith("model.")},
    )


def test_a_run_goes_on_if_there_is_anything_to_go_on_from(corpus: Corpus, finished: Path, tmp_path: Path) -> None:
    model = {"dropout": 0.1}
    tiny_run(corpus, tmp_path / "run", model=model, resume="if-any", stop_at=4)
    tiny_run(corpus, tmp_path / "run", model=model, resume="if-any")
    assert_same_run(tmp_path / "run", finished)
    # A run that ended before its first checkpoint has a log only.
    (tmp_path / "early").mkdir()
    (tmp_path / "early/log.jsonl").write_text('{"step": 2, "loss": 1.0}\n')
    tiny_run(corpus, tmp_path / "early", model=model, resume="if-any")
    assert_same_run(tmp_path / "early", finished)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").write_text("mine")
    with pytest.raises(CompressiveError, match="exists already; choose another folder"):
        tiny_run(corpus, tmp_path / "other", resume="if-any")


def test_the_newest_checkpoints_stay_with_their_checksums(corpus: Corpus, tmp_path: Path) -> None:
    for kept in (1, 2, 3, 9):
        tiny_run(corpus, tmp_path / f"run-{kept}", keep_checkpoints=kept)
        points = sorted((tmp_path / f"run-{kept}" / "resume").iterdir())
        assert [int(point.name[5:]) for point in points] == [3, 6, 9, 10][-kept:]
        for point in points:
            sums = [line.split("  ") for line in (point / "SHA256SUMS").read_text().splitlines()]
            assert {name for _, name in sums} == {path.name for path in point.iterdir()} - {"SHA256SUMS"}
            assert all(hashlib.sha256((point / name).read_bytes()).hexdigest() == found for found, name in sums)


def test_a_copy_of_a_checkpoint_is_neither_taken_up_nor_removed(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", stop_at=3)
    points = tmp_path / "run/resume"
    shutil.copytree(points / "step-000000003", points / "step-000000003-mine")
    (points / "step-000000003-mine/state.json").write_text("{}")
    tiny_run(corpus, tmp_path / "run", resume="latest")
    assert sorted(path.name for path in points.iterdir()) == ["step-000000003-mine", "step-000000010"]


@pytest.mark.parametrize("name", ["state.json", "training.safetensors", "process-0.safetensors"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_gives_the_same_run(
    corpus: Corpus, finished: Path, tmp_path: Path, name: str
) -> None:
    options = {"model": {"dropout": 0.1}, "keep_checkpoints": 3}
    tiny_run(corpus, tmp_path / "run", stop_at=9, **options)
    damaged = tmp_path / "run/resume/step-000000009" / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1  # one bit, which may well be a number that can be
    damaged.write_bytes(content)
    for content_now in (bytes(content), b""):
        damaged.write_bytes(content_now)
        with pytest.raises(CompressiveError, match=rf"000009/{name}: damaged, .*; resume from .* --resume 6$"):
            tiny_run(corpus, tmp_path / "run", resume="latest", **options)
    damaged.unlink()
    with pytest.raises(CompressiveError, match=rf"000009/{name}: damaged"):
        tiny_run(corpus, tmp_path / "run", resume="latest", **options)
    with pytest.raises(CompressiveError, match="no checkpoint of step 5; there are those of steps 3, 6, 9"):
        tiny_run(corpus, tmp_path / "run", resume=5, **options)
    tiny_run(corpus, tmp_path / "run", resume=6, **options)
    points = sorted((tmp_path / "run/resume").iterdir())
    assert [int(point.name[5:]) for point in points] == [6, 9, 10]
    whole = finished / "resume" / points[-1].name
    for file in ("training.safetensors", "process-0.safetensors"):
        assert_same_tensors(load_file(points[-1] / file), load_file(whole / file))
    assert log_of(tmp_path / "run") == log_of(finished)


def test_a_checkpoint_without_checksums_of_an_earlier_version_is_gone_on_from(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", stop_at=4)
    (tmp_path / "run/resume/step-000000004/SHA256SUMS").unlink()
    tiny_run(corpus, tmp_path / "run", resume="latest", stop_at=5)
    (tmp_path / "run/resume/step-000000005/SHA256SUMS").write_text("no checksum\n")
    with pytest.raises(
        CompressiveError, match="damaged, its checksum differs from that in SHA256SUMS; there is none before"
    ):
        tiny_run(corpus, tmp_path / "run", resume="latest")


def test_a_run_over_pieces_of_documents_goes_on_to_the_bit(corpus: Corpus, tmp_path: Path) -> None:
    for stop in (3, 7, 10):
        tiny_run(
            corpus, tmp_path / "parts", max_document_length=24, resume="latest" if stop > 3 else None, stop_at=stop
        )
        own = load_file(tmp_path / f"parts/resume/step-{stop:09}/process-0.safetensors")
        # No piece ends early in these steps, so that all lanes begin a new one every third step.
        assert own["memory-0.seen"].tolist() == [24 if stop % 3 == 0 else 8] * 4
    tiny_run(corpus, tmp_path / "whole", max_document_length=24)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_checkpoint_in_the_middle_of_an_update_holds_its_gradients(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", stop_at=5)
    own = load_file(tmp_path / "run/resume/step-000000005/process-0.safetensors")
    assert sum(name.startswith("gradient.") for name in own) == len(list(tiny_model().parameters()))
    tiny_run(corpus, tmp_path / "run", resume="latest", stop_at=6)
    own = load_file(tmp_path / "run/resume/step-000000006/process-0.safetensors")
    assert not any(name.startswith("gradient.") for name in own)


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(
    corpus: Corpus, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.train_step

    def killed(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.counters.step == 8:
            raise KeyboardInterrupt
        return step(trainer, *arguments)

    run = tmp_path / "run"
    monkeypatch.setattr(Trainer, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(corpus, run, model={"dropout": 0.1})
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert log_of(run)[-1]["step"] == 8
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 9, "lo')  # and power went while a line was written
    tiny_run(corpus, run, model={"dropout": 0.1}, resume="latest")
    assert_same_run(run, finished)


def test_a_log_keeps_samples_with_any_line_separator_and_loses_what_lies_beyond_a_step(tmp_path: Path) -> None:
    lines = ['{"step": 1, "sample": "a\u2028b\x85c"}\n', '{"step": 2, "loss": 0.1}\n', '{"step": 3, "lo']
    (tmp_path / "log.jsonl").write_text("".join(lines), encoding="utf-8")
    assert read_log(tmp_path / "log.jsonl") == [json.loads(line) for line in lines[:2]]
    truncate_log(tmp_path / "log.jsonl", 1)
    assert (tmp_path / "log.jsonl").read_text(encoding="utf-8") == lines[0]


def test_a_finished_run_has_nothing_left_to_do(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", steps=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    tiny_run(corpus, tmp_path / "run", steps=3, resume="latest")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        ({}, {"learning_rate": 0.02}, r"train\.learning_rate was 0\.01 and is 0\.02 now"),
        ({}, {"batch_size": 2}, r"train\.batch_size was 4 and is 2 now"),
        ({}, {"max_document_length": 8}, r"train\.max_document_length was 0 and is 8 now"),
        ({"memory_length": 10}, {}, r"model\.memory_length was 9 and is 10 now"),
    ],
)
def test_a_run_never_goes_on_under_other_settings(
    corpus: Corpus, tmp_path: Path, model: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    tiny_run(corpus, tmp_path / "run", stop_at=1)
    before = (tmp_path / "run/log.jsonl").read_bytes()
    with pytest.raises(CompressiveError, match=f"step-000000001: cannot resume, {message}; set it back"):
        tiny_run(corpus, tmp_path / "run", model=model, resume="latest", **training)
    assert (tmp_path / "run/log.jsonl").read_bytes() == before


@pytest.mark.parametrize("file", ["training.safetensors", "process-0.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "of another kind"])
def test_a_damaged_checkpoint_is_named_in_one_line(corpus: Corpus, tmp_path: Path, file: str, damage: str) -> None:
    tiny_run(corpus, tmp_path / "run", stop_at=1)
    path = tmp_path / "run/resume/step-000000001" / file
    path.with_name("SHA256SUMS").unlink()  # which would find the damage first
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "of another kind":
        empty = b'{"format": 1}' if file == "state.json" else (2).to_bytes(8, "little") + b"{}"
        path.write_bytes(empty)
    with pytest.raises(CompressiveError, match="step-000000001") as caught:
        tiny_run(corpus, tmp_path / "run", resume="latest")
    assert "\n" not in str(caught.value)


def test_a_run_of_an_earlier_version_goes_on_with_new_settings_at_their_defaults(
    corpus: Corpus, tmp_path: Path
) -> None:
    tiny_run(corpus, tmp_path / "run", stop_at=1)
    path = tmp_path / "run/resume/step-000000001/state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    for name in ("optimizer", "gradient_checkpointing", "compile"):
        del state["train"][name]
    del state["model"]["compression_heads"]
    path.write_text(json.dumps(state), encoding="utf-8")
    path.with_name("SHA256SUMS").unlink()  # they wrote none
    with pytest.raises(CompressiveError, match=r"train\.optimizer was 'adamw' and is 'muon' now"):
        tiny_run(corpus, tmp_path / "run", resume="latest", optimizer="muon")
    tiny_run(corpus, tmp_path / "run", resume="latest", stop_at=2)
    tiny_run(corpus, tmp_path / "whole", stop_at=2)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_run_with_muon_goes_on_to_the_bit(corpus: Corpus, tmp_path: Path) -> None:
    start = dict(tiny_model().named_parameters())
    whole = tiny_run(corpus, tmp_path / "whole", optimizer="muon", stop_at=7)
    tiny_run(corpus, tmp_path / "parts", optimizer="muon", stop_at=4)
    tiny_run(corpus, tmp_path / "parts", optimizer="muon", resume="latest", stop_at=7)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert all(parameter.ne(start[name]).any() for name, parameter in whole.named_parameters())


# --- what does not change the result ---


@pytest.mark.parametrize(
    "fields",
    [
        {"compression_loss": "bptt"},
        {"compression_loss": "auto-encoding"},
        {"compression": "dilated"},
        {"compression": "most-used"},
        {"compression": "attention", "compression_heads": 2},
    ],
    ids=str,
)
def test_every_function_and_loss_trains_what_it_should_and_goes_on_to_the_bit(
    corpus: Corpus, tmp_path: Path, fields: dict[str, Any]
) -> None:
    whole = tiny_run(corpus, tmp_path / "whole", model=fields, stop_at=7)
    tiny_run(corpus, tmp_path / "parts", model=fields, stop_at=4)  # in the middle of an update
    tiny_run(corpus, tmp_path / "parts", model=fields, resume="latest", stop_at=7)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    start = dict(tiny_model(**fields).named_parameters())
    for name, parameter in whole.named_parameters():
        assert parameter.ne(start[name]).any(), name
        assert parameter.isfinite().all(), name


@pytest.mark.usefixtures("double")
def test_parts_of_a_step_do_not_change_it(corpus: Corpus, tmp_path: Path) -> None:
    whole = tiny_run(corpus, tmp_path / "whole", **SLOW)
    parts = tiny_run(corpus, tmp_path / "parts", micro_batches=2, **SLOW)
    assert_close_parameters(parts, whole)


class Job:
    """The command `train` in processes of their own."""

    def __init__(self, corpus: Corpus, folder: Path, *, run: str = "job", sharded: bool = False, **model: Any) -> None:
        self.model, self.run, config = model, folder / run, folder / "config.toml"
        training = {**TRAINING, **SLOW, "sharded": sharded}
        with config.open("w") as file:
            for name, table in {"model": {**MODEL, **model}, "train": training}.items():
                lines = (f"{field} = {json.dumps(value)}" for field, value in table.items())
                print(f"[{name}]", *lines, sep="\n", file=file)
        self.command = ["-m", "compressive_transformer.cli", "train", str(config), str(corpus.path), str(self.run)]

    def start(self, processes: int, *options: str, restarts: int = 0) -> subprocess.Popen[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--max-restarts={restarts}"]
        return subprocess.Popen(
            [sys.executable, *launch, f"--nproc-per-node={processes}", *self.command, *options],
            # The last of these lets restarts find one another: https://github.com/pytorch/pytorch/issues/135712
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, processes: int, *options: str) -> None:
        job = self.start(processes, *options)
        _, errors = job.communicate(timeout=240)
        assert job.returncode == 0, errors

    def assert_learned_what_one_process_learns(self, alone: CompressiveTransformer, run: Path) -> None:
        trained = tiny_model(**self.model)
        shared = load_file(self.run / f"resume/step-{STEPS:09}/training.safetensors")
        trained.load_state_dict(
            {name.removeprefix("model."): value for name, value in shared.items() if name.startswith("model.")}
        )
        # Single precision: AdamW makes what rounding leaves of a gradient that cancels as large as any other. A step
        # moves parameters by up to 1e-3.
        assert_close_parameters(trained, alone, tolerance=1e-4)
        log = [entry for entry in log_of(self.run) if "processes" not in entry]
        for one, other in zip(log, log_of(run), strict=True):
            assert one.keys() == other.keys()
            if "loss" in one:
                assert one["tokens"] == other["tokens"]
                assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
                assert one["compression_loss"] == pytest.approx(other["compression_loss"], rel=1e-3)
            elif "validation" in one:
                assert one["validation"] == pytest.approx(other["validation"], rel=1e-4)


@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        (2, 2, {"compression_loss": "attention"}),
        (2, 1, {"compression_loss": "bptt"}),
        (1, 2, {"compression": "most-used", "compression_loss": "none"}),
        (2, 2, {"sharded": True}),
    ],
)
def test_processes_train_as_one_and_go_on_from_the_middle_of_an_update_in_any_number(
    corpus: Corpus, tmp_path: Path, before: int, after: int, model: dict[str, Any]
) -> None:
    job = Job(corpus, tmp_path, **model)
    alone = tiny_run(corpus, tmp_path / "alone", model=job.model, **SLOW)
    job.finish(before, "--stop-at", "5")
    job.finish(after, "--resume", "latest")
    job.assert_learned_what_one_process_learns(alone, tmp_path / "alone")
    changed = [entry for entry in log_of(job.run) if "processes" in entry]
    expected = {"step": 5, "processes": {"before": before, "now": after}}
    assert changed == ([] if before == after else [expected])


def test_a_job_one_of_whose_processes_is_killed_goes_on_by_itself(corpus: Corpus, tmp_path: Path) -> None:
    alone = tiny_run(corpus, tmp_path / "alone", **SLOW)
    job = Job(corpus, tmp_path)
    launched = job.start(2, "--resume", "if-any", restarts=1)
    children = Path(f"/proc/{launched.pid}/task/{launched.pid}/children")
    while not list(job.run.glob("resume/step-*")):
        assert launched.poll() is None
        time.sleep(0.05)
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    _, errors = launched.communicate(timeout=240)
    assert launched.returncode == 0, errors
    assert "exitcode: -9" in errors, errors
    job.assert_learned_what_one_process_learns(alone, tmp_path / "alone")


def test_a_full_disk_ends_a_run_in_one_line_and_its_last_checkpoint_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    alone = tiny_run(corpus, tmp_path / "alone", **SLOW)
    (tmp_path / "disk").mkdir()
    job = Job(corpus, tmp_path, run="disk/run")
    train = " ".join([sys.executable, *job.command])
    script = f"""
        mount -t tmpfs -o size=700k none {tmp_path}/disk || exit 77
        head -c 250k /dev/zero > {tmp_path}/disk/other
        {train} && exit 1
        find {tmp_path}/disk -mindepth 1 | sort
        rm {tmp_path}/disk/other
        echo resumed >&2
        {train} --resume latest && cp -r {job.run} {tmp_path}/job"""
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=240)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("a file system of its own needs rights that this user does not have")
    assert done.returncode == 0, done.stderr
    full, _, _ = done.stderr.partition("resumed")
    assert re.search(r"compressive: .*/\.step-000000006\.partial/\S+: cannot .*No space left on device", full), full
    assert "Traceback" not in full
    assert "step-000000003" in done.stdout
    assert "partial" not in done.stdout
    job.run = tmp_path / "job"
    job.assert_learned_what_one_process_learns(alone, tmp_path / "alone")


def test_what_was_drawn_before_does_not_change_a_run(corpus: Corpus, finished: Path, tmp_path: Path) -> None:
    model = tiny_model(dropout=0.1)
    torch.rand(17)
    train(model, corpus, TrainConfig(**TRAINING), tmp_path / "run")
    assert_same_run(tmp_path / "run", finished)


# --- the two losses ---


def trained_by_hand(corpus: Corpus, weight: float, updates: int, **training: Any) -> CompressiveTransformer:
    """Each update from three segments, enough to attend to what was compressed on the way."""
    model = tiny_model()
    optimizer = Optimizer(model, TrainConfig(**{**TRAINING, **training}))
    memory = model.empty_memory(2)
    segments = lanes(corpus.train, batch_size=2, length=8)
    for step in range(1, updates + 1):
        for _ in range(5):
            segment = next(segments)
            output = model(segment.tokens, memory.reset(segment.starts), segment.lengths)
            loss = next_token_loss(output.logits, segment.targets) + weight * output.compression_loss
            loss.backward()
            memory = output.memory
        optimizer.step(step)
    return model


@pytest.mark.parametrize(
    ("updates", "training"),
    [(1, {}), (4, {"compression_learning_rate": 0.0})],
    ids=["learning f_c", "fixed f_c"],
)
def test_a_weight_on_the_compression_loss_never_changes_what_the_network_becomes(
    corpus: Corpus, updates: int, training: dict[str, Any]
) -> None:
    """To the bit; with f_c learning only as long as what it has learnt is not read."""
    start = dict(tiny_model().named_parameters())
    models = [dict(trained_by_hand(corpus, w, updates, **training).named_parameters()) for w in (0.0, 1.0, 1e3)]
    for name, first in start.items():
        if ".compression." not in name:
            assert not torch.equal(models[0][name], first), name
            assert torch.equal(models[0][name], models[1][name]), name
            assert torch.equal(models[0][name], models[2][name]), name
        else:
            assert torch.equal(models[0][name], first), name
            assert torch.equal(models[1][name], first) == bool(training), name
            assert torch.equal(models[2][name], first) == bool(training), name


@pytest.mark.parametrize("fields", [{}, {"compressed_position": "unit", "norm": "post"}, {"position": "rotary"}])
def test_every_parameter_learns(corpus: Corpus, tmp_path: Path, fields: dict[str, Any]) -> None:
    start = dict(tiny_model(**fields).named_parameters())
    model = tiny_run(corpus, tmp_path / "run", model=fields)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.ne(start[name]).any(), name
        assert parameter.isfinite().all(), name


def test_a_frozen_parameter_stays_frozen(corpus: Corpus, tmp_path: Path) -> None:
    model, start = tiny_model(), tiny_model()
    model.embedding.weight.requires_grad_(False)
    train(model, corpus, TrainConfig(**TRAINING), tmp_path / "run")
    assert torch.equal(model.embedding.weight, start.embedding.weight)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["embedding.weight"]


@pytest.mark.filterwarnings("ignore::compressive_transformer.CompressiveWarning")
@pytest.mark.parametrize(
    "fields",
    [
        {"compression": "mean"},
        {"compression_loss": "none"},
        {"compressed_length": 0},
        {"compressed_length": 0, "memory_length": 0},
        {"compressed_length": (0, 4), "memory_length": (9, 0), "compression": "max"},
    ],
)
def test_models_without_a_compression_that_learns_are_trained_too(
    corpus: Corpus, tmp_path: Path, fields: dict[str, Any]
) -> None:
    tiny_run(corpus, tmp_path / "parts", model=fields, stop_at=4)
    tiny_run(corpus, tmp_path / "parts", model=fields, resume="latest", stop_at=7)
    tiny_run(corpus, tmp_path / "whole", model=fields, stop_at=7)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert all(line["compression_loss"] == 0 for line in log_of(tmp_path / "whole") if "loss" in line)


def test_training_learns(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", steps=60, late_update_step=0, validate_every=0, sample_every=0)
    losses = [line["loss"] for line in log_of(tmp_path / "run")]
    assert losses[0] == pytest.approx(math.log(257) + 0.5, abs=0.2)  # logits of variance 1 that know nothing
    assert sum(losses[-10:]) / 10 < 3.6


def test_bf16_keeps_parameters_and_memory_in_fp32(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", precision="bf16", stop_at=4)
    point = tmp_path / "run/resume/step-000000004"
    for file in ("training", "process-0"):
        tensors = load_file(point / f"{file}.safetensors")
        assert {value.dtype for value in tensors.values()} <= {torch.float32, torch.int64, torch.uint8}
    first = log_of(tmp_path / "run")[0]
    assert first["loss"] == pytest.approx(math.log(257) + 0.5, abs=0.2)


def test_bf16_stays_finite_over_hundreds_of_segments(corpus: Corpus, tmp_path: Path) -> None:
    options = {"steps": 500, "batch_size": 2, "late_update_step": 0, "validate_every": 0, "sample_every": 0}
    tiny_run(corpus, tmp_path / "run", precision="bf16", checkpoint_every=500, log_every=25, **options)
    entries = log_of(tmp_path / "run")
    assert not any("skipped" in entry for entry in entries)
    losses = [entry["loss"] for entry in entries]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 1.5
    point = tmp_path / "run/resume/step-000000500"
    for file in ("training", "process-0"):
        assert all(value.isfinite().all() for value in load_file(point / f"{file}.safetensors").values())


# --- what a run leaves ---


def test_the_model_that_is_kept_is_the_best_at_validation(corpus: Corpus, tmp_path: Path) -> None:
    # A rate that rises until it destroys what was learnt.
    tiny_run(
        corpus, tmp_path / "run", steps=12, warmup_steps=12, learning_rate=1.0, late_update_step=0, validate_every=2
    )
    scores = [line["validation"]["bits_per_byte"] for line in log_of(tmp_path / "run") if "validation" in line]
    assert len(scores) == 6
    assert min(scores) < scores[-1]
    model, tokenizer = load(tmp_path / "run")
    split = truncate_split(corpus.validation, tokenizer, TRAINING["validation_tokens"])
    kept = evaluate(model, split).total.bits_per_byte
    assert kept == pytest.approx(min(scores), rel=1e-6)
    assert kept != pytest.approx(scores[-1], rel=1e-3)
    state = json.loads(next((tmp_path / "run/resume").iterdir()).joinpath("state.json").read_text())
    assert state["counters"]["best"] == min(scores)


def test_validation_reads_whole_documents_where_training_reads_pieces(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", max_document_length=8, validate_every=10, validation_tokens=0)
    model, _ = load(tmp_path / "run")
    (score,) = (line["validation"] for line in log_of(tmp_path / "run") if "validation" in line)
    assert score == pytest.approx(evaluate(model, corpus.validation).total.to_dict(), rel=1e-6)


def test_without_validation_the_last_model_is_kept(corpus: Corpus, tmp_path: Path) -> None:
    trained = tiny_run(corpus, tmp_path / "run", validate_every=0)
    assert_same_tensors(dict(load(tmp_path / "run")[0].state_dict()), dict(trained.state_dict()))
    assert not any("validation" in line for line in log_of(tmp_path / "run"))


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


# --- mistakes ---


@pytest.mark.parametrize(
    ("model", "training", "options", "message"),
    [
        ({"vocab_size": 300}, {}, {}, r"vocab_size \(300\) must be 257, the number of ids of "),
        ({}, {"max_document_length": 30}, {}, r"max_document_length \(30\) must be a multiple .* the nearest is 32"),
        ({}, {}, {"resume": "latest"}, "new/run: nothing to resume, no checkpoint was written there"),
        ({}, {}, {"resume": True}, r"resume \(True\) must be .latest., .if-any., a step or None"),
        ({}, {}, {"stop_at": 0}, r"stop_at \(0\) must be 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    corpus: Corpus,
    tmp_path: Path,
    model: dict[str, Any],
    training: dict[str, Any],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(CompressiveError, match=message):
        tiny_run(corpus, tmp_path / "new/run", model=model, **options, **training)
    assert not list(tmp_path.iterdir())


def test_lanes_that_processes_and_parts_cannot_share_are_refused(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(rank=0, world=3, device=torch.device("cpu"))
    with pytest.raises(
        CompressiveError, match=r"batch_size \(4\) must be a multiple of 6, processes times micro_batches"
    ):
        Trainer(tiny_model(), corpus, TrainConfig(batch_size=4, micro_batches=2), tmp_path / "run", processes)


def test_what_exists_is_never_overwritten(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("mine")
    for out in (tmp_path / "run", tmp_path / "run/mine.txt"):
        with pytest.raises(CompressiveError, match="exists already; choose another folder"):
            tiny_run(corpus, out)
    assert [file.name for file in tmp_path.rglob("*")] == ["run", "mine.txt"]
    (tmp_path / "empty").mkdir()
    tiny_run(corpus, tmp_path / "empty", stop_at=1)
    assert (tmp_path / "empty/model.safetensors").is_file()


# --- what is not finite, and what stops a run ---


def made(corpus: Corpus, out: Path, *, resume: Resume = None, **fields: Any) -> Trainer:
    config = TrainConfig(**{**TRAINING, **fields})
    trainer = Trainer(tiny_model(), corpus, config, out, Processes(0, 1, torch.device("cpu")))
    trainer.begin(resume)
    return trainer


def spoil(trainer: Trainer, lane: int) -> None:
    """Put a number that is none into the memory of a lane."""
    memory = trainer.memories[0]
    memory.recent[1][lane, -1, 3] = math.nan


def captured(trainer: Trainer) -> tuple[Log, list[dict[str, Any]]]:
    """A log that keeps its entries in a list."""
    entries: list[dict[str, Any]] = []
    log = Log(trainer.model, trainer.processes, trainer.out, last=STEPS)
    log.write = entries.append  # type: ignore[method-assign]
    return log, entries


def test_an_update_that_is_not_finite_is_skipped_and_its_lane_begins_anew(corpus: Corpus, tmp_path: Path) -> None:
    trainer = made(corpus, tmp_path / "run")
    log, entries = captured(trainer)
    trainer.run(2, log, StopSignals())
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    moments = {name: value.clone() for name, value in trainer.optimizer.state().items()}
    spoil(trainer, 2)
    trainer.run(3, log, StopSignals())
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert all(torch.equal(value, moments[name]) for name, value in trainer.optimizer.state().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    skipped = next(entry["skipped"] for entry in entries if "skipped" in entry)
    titles = {document.title for document in corpus.train.documents}
    assert list(skipped["lanes"]) == ["2"]
    assert skipped["lanes"]["2"] in titles
    assert (skipped["gradient_norm"], skipped["count"]) == ("nan", 1)
    memory = trainer.memories[0]
    assert memory.seen[2] == 0
    assert (memory.seen[[0, 1, 3]] > 0).all()
    assert all(states.isfinite().all() for states in memory.state_dict().values())
    trainer.run(6, log, StopSignals())
    assert not all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.counters.skipped == 1
    assert trainer.counters.skipped_in_a_row == 0
    assert all(math.isfinite(entry["loss"]) for entry in entries if "loss" in entry)


def test_too_many_skipped_updates_in_a_row_end_the_run_at_its_last_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    trainer = made(corpus, tmp_path / "run", max_skipped_updates=2, late_update_step=0)
    log, entries = captured(trainer)
    trainer.run(3, log, StopSignals())
    kept = {path.name for path in (tmp_path / "run" / "resume").iterdir()}
    hook = trainer.model.embedding.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(
        CompressiveError,
        match=r"3 updates in a row were skipped, .* \(2\); the last: update skipped: gradients",
    ):
        trainer.run(10, log, StopSignals())
    hook.remove()
    assert [entry["step"] for entry in entries if "skipped" in entry] == [4, 5, 6]
    assert {path.name for path in (tmp_path / "run" / "resume").iterdir()} == kept
    resumed = made(corpus, tmp_path / "run", resume="latest", max_skipped_updates=2, late_update_step=0)
    resumed.run(10, captured(resumed)[0], StopSignals())
    assert resumed.counters.skipped == 0


@pytest.fixture
def default_signals() -> Iterator[None]:
    """As in a program that somebody started in a terminal; background jobs of some shells ignore Ctrl-C."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_and_resuming_gives_what_no_signal_gives(
    corpus: Corpus, tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    model, config = tiny_model(), TrainConfig(**{**TRAINING, "checkpoint_every": 100})

    def kill(entry: dict[str, Any], _: CompressiveTransformer) -> None:
        if entry["step"] == 4 and "loss" in entry:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt, match="stopped after step 4, with a checkpoint to resume from"):
        train(model, corpus, config, tmp_path / "run", callbacks=[kill])
    assert "stopping after this step, with a checkpoint; a second signal stops" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train(tiny_model(), corpus, config, tmp_path / "run", resume="latest")
    train(tiny_model(), corpus, config, tmp_path / "whole")
    points = [load_file(tmp_path / name / "resume/step-000000010/training.safetensors") for name in ("run", "whole")]
    assert all(torch.equal(points[0][name], value) for name, value in points[1].items())


@pytest.mark.usefixtures("default_signals")
def test_a_second_signal_interrupts_at_once() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_signals_that_are_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.received is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
