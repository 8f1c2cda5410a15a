"""Processes train as one: with full parameters or shards of them, in any number, across kills and full disks."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compressive_transformer.config import TrainConfig
from compressive_transformer.data import Corpus
from compressive_transformer.errors import CompressiveError
from compressive_transformer.model import CompressiveTransformer
from compressive_transformer.train import Trainer
from compressive_transformer.train.distributed import (
    Processes,
    distribute_like,
    full_tensor,
    init_distributed,
    shard,
    unshard,
)
from compressive_transformer.train.log import Log
from compressive_transformer.train.signals import StopSignals
from runs import MODEL, SLOW, TRAINING, assert_close_parameters, in_processes, log_of, tiny_model, tiny_run

pytestmark = pytest.mark.usefixtures("cpu")

STEPS = TRAINING["steps"]


def assert_learned_alike(run: Path, model: dict[str, Any], alone: CompressiveTransformer, whole: Path) -> None:
    """The run of several processes came to what one process, whose run is `whole`, made of `alone`."""
    trained = tiny_model(**model)
    shared = load_file(run / f"resume/step-{STEPS:09}/training.safetensors")
    trained.load_state_dict(
        {name.removeprefix("model."): value for name, value in shared.items() if name.startswith("model.")}
    )
    # Single precision: AdamW makes what rounding leaves of a gradient that cancels as large as any other. A step
    # moves parameters by up to 1e-3.
    assert_close_parameters(trained, alone, tolerance=1e-4)
    log = [entry for entry in log_of(run) if "processes" not in entry]
    for one, other in zip(log, log_of(whole), strict=True):
        assert one.keys() == other.keys()
        if "loss" in one:
            assert one["tokens"] == other["tokens"]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert one["compression_loss"] == pytest.approx(other["compression_loss"], rel=1e-3)
        elif "validation" in one:
            assert one["validation"] == pytest.approx(other["validation"], rel=1e-4)


# --- the same run ---


@pytest.mark.filterwarnings("ignore:.*FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("before", "after", "model", "training"),
    [
        pytest.param(2, 2, {"compression_loss": "attention"}, {}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"compression_loss": "bptt"}, {}, marks=pytest.mark.slow),
        (1, 2, {"compression": "most-used", "compression_loss": "none"}, {"micro_batches": 2}),
        (2, 2, {}, {"sharded": True}),
    ],
)
def test_any_number_of_processes_trains_as_one_across_a_resume(
    corpus: Corpus, tmp_path: Path, before: int, after: int, model: dict[str, Any], training: dict[str, Any]
) -> None:
    run, options = tmp_path / "run", {**SLOW, **training}
    alone = tiny_run(corpus, tmp_path / "alone", model=model, **SLOW)
    in_processes(before, lambda: tiny_run(corpus, run, model=model, stop_at=5, **options))
    in_processes(after, lambda: tiny_run(corpus, run, model=model, resume="latest", **options))
    assert_learned_alike(run, model, alone, tmp_path / "alone")
    changed = [entry for entry in log_of(run) if "processes" in entry]
    expected = {"step": 5, "processes": {"before": before, "now": after}}
    assert changed == ([] if before == after else [expected])


def test_a_lane_of_any_process_is_reset_and_logged_by_its_number(corpus: Corpus, tmp_path: Path) -> None:
    def train() -> None:
        with init_distributed() as processes:
            trainer = Trainer(tiny_model(), corpus, TrainConfig(**TRAINING), tmp_path / "run", processes)
            trainer.begin()
            with Log(trainer.model, processes, trainer.out, last=3) as log:
                trainer.run(2, log, StopSignals())
                if processes.rank == 1:
                    trainer.memories[0].layers[1].recent[0, -1, 3] = math.nan
                trainer.run(3, log, StopSignals())
            assert trainer.counters.skipped == 1
            assert trainer.memories[0].finite().all()

    in_processes(2, train)
    (skipped,) = (entry["skipped"] for entry in log_of(tmp_path / "run") if "skipped" in entry)
    assert list(skipped["lanes"]) == ["2"]  # the first of the two lanes of the second process
    assert skipped["lanes"]["2"] in {document.title for document in corpus.train.documents}


def test_all_processes_learn_what_one_of_them_says() -> None:
    def talk() -> None:
        with init_distributed() as processes:
            assert processes.gather(f"rank {processes.rank}") == ["rank 0", "rank 1", "rank 2"]
            assert processes.any(processes.rank == 2)
            assert not processes.any(False)
            assert processes.all_reduce(torch.tensor(processes.rank)) == 3
            processes.barrier()

    in_processes(3, talk)
    alone = Processes(0, 1, torch.device("cpu"))
    assert (alone.gather(3), alone.any(True), alone.any(False)) == ([3], True, False)


# --- as jobs ---


class Job:
    """The command `train` in processes of their own."""

    def __init__(self, corpus: Corpus, folder: Path, *, run: str = "job") -> None:
        self.run, config = folder / run, folder / "config.toml"
        with config.open("w") as file:
            for name, table in {"model": MODEL, "train": {**TRAINING, **SLOW}}.items():
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


@pytest.mark.slow
def test_a_job_with_a_killed_process_restarts_and_resumes(corpus: Corpus, tmp_path: Path) -> None:
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
    assert_learned_alike(job.run, {}, alone, tmp_path / "alone")


@pytest.mark.slow
def test_a_full_disk_stops_a_run_in_one_line_and_it_can_be_resumed(corpus: Corpus, tmp_path: Path) -> None:
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
    assert_learned_alike(tmp_path / "job", {}, alone, tmp_path / "alone")


def test_lanes_that_cannot_be_split_over_processes_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    processes = Processes(rank=0, world=3, device=torch.device("cpu"))
    message = r"batch_size \(4\) must be a multiple of 6, processes times micro_batches"
    with pytest.raises(CompressiveError, match=message):
        Trainer(tiny_model(), corpus, TrainConfig(batch_size=4, micro_batches=2), tmp_path / "run", processes)


# --- shards ---


def losses_of(model: CompressiveTransformer, alone: CompressiveTransformer, lane: int) -> Tensor:
    """The first lane has a full memory and evicts; the other ends a short document and commits nothing."""
    tokens = torch.arange(48)[None] * (lane + 3) % 256
    with torch.no_grad():
        memory = alone.empty_memory(1) if lane else alone(tokens[:, :40]).memory
    output = model(tokens[:, 40 : 45 if lane else 48], memory)
    return output.logits.square().mean() + output.compression_loss


def check_shards() -> None:
    with init_distributed() as processes:
        model, alone = tiny_model(), tiny_model()
        full = alone.state_dict()
        shard(model, processes)
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        total = sum(value.numel() for value in full.values())
        assert total / 2 <= processes.all_reduce(torch.tensor(float(held))) / 2 <= 1.01 * total / 2, (held, total)
        assert held < 0.55 * total
        gathered = unshard(model).state_dict()
        assert gathered.keys() == full.keys()
        for name, parameter in model.named_parameters():
            assert torch.equal(gathered[name], full[name]), name
            assert torch.equal(distribute_like(full[name], parameter).to_local(), parameter.to_local()), name

        losses_of(model, alone, processes.rank).backward()
        gradients = {name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()}
        (sum(losses_of(alone, alone, lane) for lane in range(2)) / 2).backward()
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
            assert ".compression" not in name or parameter.grad.any(), name


@pytest.mark.filterwarnings("ignore:.*FSDP2-wrapped module")
def test_shards_make_the_model_and_its_gradient() -> None:
    in_processes(2, check_shards)


def test_full_tensors_and_models_are_unchanged() -> None:
    model = tiny_model()
    assert unshard(model) is model
    tensor = torch.ones(3)
    assert full_tensor(tensor) is tensor
    assert distribute_like(tensor, like=torch.zeros(3)) is tensor


def test_muon_is_refused_where_matrices_are_in_shards() -> None:
    with pytest.raises(CompressiveError, match="sharded needs optimizer = 'adamw'"):
        TrainConfig(sharded=True, optimizer="muon")
