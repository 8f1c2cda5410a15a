"""A small corpus of real text, models that train on it in a second, and what a run leaves: shared by tests."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from io import BufferedReader, FileIO
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from compressive_transformer.cli import main
from compressive_transformer.config import ModelConfig, TrainConfig
from compressive_transformer.data import Corpus
from compressive_transformer.model import CompressiveTransformer
from compressive_transformer.train import Resume, train

# Beginnings of sample books in bytes; segments and batches divide none of them.
BOOKS = {
    "train": {"10002": 1701, "11": 2903, "10576": 403},
    "validation": {"28776": 331, "42142": 150},
    "test": {"356": 211, "51859": 93},
}

# The rate divides neither the segment nor what is evicted, so states wait and documents end anywhere.
MODEL = {
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 2,
    "segment_length": 8,
    "memory_length": 9,
    "compressed_length": 4,
    "compression_rate": 3,
}

# From step 4 on an update takes three steps: they end at 1, 2, 3, 6, 9 and, as the last one, 10.
TRAINING = {
    "steps": 10,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "compression_learning_rate": 1e-3,
    "warmup_steps": 2,
    "late_update_step": 4,
    "late_steps_per_update": 3,
    "log_every": 1,
    "validate_every": 4,
    "validation_tokens": 100,
    "sample_every": 5,
    "sample_tokens": 5,
    "checkpoint_every": 3,
    "keep_checkpoints": 1,
}

# For runs that sum in another order: AdamW turns the rounding of a gradient near zero into a step of this size.
SLOW = {"learning_rate": 1e-3, "compression_learning_rate": 1e-4}


def write_books(folder: Path) -> Path:
    sample = files("compressive_transformer.apps.demo") / "sample"
    for split, books in BOOKS.items():
        (folder / split).mkdir(parents=True)
        for name, size in books.items():
            content = (sample / split / f"{name}.txt").read_bytes()[-size:]
            (folder / split / f"{name}.txt").write_text(content.decode("utf-8", "ignore"), encoding="utf-8")
    return folder


def tiny_model(*, seed: int = 0, **fields: Any) -> CompressiveTransformer:
    torch.manual_seed(seed)
    return CompressiveTransformer(ModelConfig(**{"vocab_size": 257, **MODEL, **fields}))


def tiny_run(
    corpus: Corpus,
    out: Path,
    *,
    model: dict[str, Any] | None = None,
    resume: Resume = None,
    stop_at: int | None = None,
    **training: Any,
) -> CompressiveTransformer:
    """Train a new tiny model on the corpus; gives it as it is after the last step."""
    trained = tiny_model(**(model or {}))
    config = TrainConfig(**{**TRAINING, **training})
    train(trained, corpus, config, out, resume=resume, stop_at=stop_at)
    return trained


def log_of(run: Path) -> list[dict[str, Any]]:
    """The lines of the log, without speeds, which are never twice the same."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line.pop("tokens_per_second", None)
    return lines


def in_processes(world: int, work: Callable[[], object]) -> None:
    """Call `work` in each of `world` processes, with the environment of torchrun.

    They are forked: a new interpreter would import PyTorch for seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}

    def begin(rank: int) -> None:
        os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        work()

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=begin, args=(rank,), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * world


@dataclass
class Program:
    """The command line in another process, with pipes as its standard streams."""

    process: BaseProcess
    stdin: FileIO
    stdout: BufferedReader
    stderr: BufferedReader

    def wait(self) -> int | None:
        self.process.join(timeout=120)
        return self.process.exitcode


@contextlib.contextmanager
def program(*arguments: str | Path) -> Iterator[Program]:
    """Run `compressive` with arguments. The process is forked: a new interpreter would import PyTorch for seconds."""
    (read_in, write_in), (read_out, write_out), (read_err, write_err) = (os.pipe() for _ in range(3))

    def run() -> None:
        for end, number in ((read_in, 0), (write_out, 1), (write_err, 2)):
            os.dup2(end, number)
        os.closerange(3, max(read_err, write_err) + 1)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.argv = ["compressive", *map(str, arguments)]
        main()

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    for end in (read_in, write_out, write_err):
        os.close(end)
    with open(write_in, "wb", 0) as stdin, open(read_out, "rb") as stdout, open(read_err, "rb") as stderr:
        yield Program(process, cast(FileIO, stdin), cast(BufferedReader, stdout), cast(BufferedReader, stderr))
        process.kill()


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
