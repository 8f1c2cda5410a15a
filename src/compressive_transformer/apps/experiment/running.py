"""One run of an experiment: train, score, and store the numbers that the report needs."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...checkpoint import FORMAT, check_format, load, read_json, write_json
from ...config.toml import with_defaults
from ...data import Corpus
from ...errors import CompressiveError
from ...model import CompressiveTransformer, with_lengths
from ...train import train
from ...train.log import read_log
from ...train.resume import ResumePoint
from .plan import Run
from .tasks import TASKS

RESULT = "result.json"
CURVE_POINTS = 100


def finish(run: Run, corpus: Corpus, out: Path) -> None:
    """Train and score a run of the experiment in `out`, as far as that is not done yet; its folder gets result.json.

    An interrupted training resumes from its last checkpoint. The scored weights are those that `load` returns: the best
    at validation, or those of the last step where the training does not validate.
    """
    folder, setting, config = out / run.path, run.setting, run.setting.evaluate
    resume = _interrupted(folder)
    if not resume and folder.exists():
        shutil.rmtree(folder)  # it ended before its first checkpoint and is of no use
    torch.manual_seed(run.seed)
    trained = CompressiveTransformer(setting.model)
    train(trained, corpus, run.train, folder, resume="latest" if resume else None)
    model, tokenizer = load(folder)
    device = next(trained.parameters()).device  # where `train` moved it
    model = with_lengths(model, **config.lengths).to(device)
    began = time.perf_counter()
    score = TASKS[config.task].score(model, tokenizer, corpus.split(config.split), config)
    result = {
        "format": FORMAT,
        "setting": setting.name,
        "seed": run.seed,
        **run.tables(),
        "corpus": corpus.fingerprint,
        "commit": _commit(),
        "training": _training(read_log(folder / "log.jsonl")),
        "evaluation_seconds": round(time.perf_counter() - began, 3),
        "score": score,
    }
    write_json(folder / RESULT, _plain(result))


def result_of(run: Run, out: Path) -> dict[str, Any] | None:
    """Return the result that `finish` wrote; None for a run that is not finished."""
    file = out / run.path / RESULT
    if not file.exists():
        return None
    result = read_json(file)
    check_format(file, result)
    return result


def check_unchanged(run: Run, corpus: Corpus, out: Path) -> None:
    """Raise CompressiveError if the run in `out`, finished or interrupted, differs from the run of the plan."""
    folder = out / run.path
    result = result_of(run, out)
    if result is None and not _interrupted(folder):
        return
    # The state of a training says nothing of the evaluation, which has not begun.
    stored = result or ResumePoint.find(folder).state()
    if stored["corpus"] != corpus.fingerprint:
        raise CompressiveError(
            f"{folder}: {run.name} ran on another corpus than {corpus.path}; use that one, or choose another folder"
        )
    configs = {"model": run.setting.model, "train": run.train, "evaluate": run.setting.evaluate}
    for table, now in run.tables().items():
        before = with_defaults(configs[table], stored.get(table, now))
        for name in {**now, **before}:
            if before.get(name) != now.get(name):
                raise CompressiveError(
                    f"{folder}: {table}.{name} was {before.get(name)!r} when {run.name} ran and is {now.get(name)!r} "
                    "in the plan now; set it back, choose another folder, or remove "
                    f"{folder / RESULT if table == 'evaluate' else folder} to run it again"
                )


def steps_done(run: Run, out: Path) -> int:
    """Return the step of the training, from the end of its log."""
    try:
        with (out / run.path / "log.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 65_536))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # being written just now
    return 0


def _interrupted(folder: Path) -> bool:
    """Return True if a training began there and left a checkpoint."""
    return bool(ResumePoint.find_all(folder))


def _training(log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return tokens, seconds and speed of a training, and its curves, thinned."""
    steps = [entry for entry in log if "loss" in entry]
    logged, tokens = [0, *(entry["step"] for entry in steps)], [0, *(entry["tokens"] for entry in steps)]
    speeds = [entry["tokens_per_second"] for entry in steps]
    validations = [
        {
            "step": entry["step"],
            # Logged at other steps than losses are, perhaps.
            "tokens": round(float(np.interp(entry["step"], logged, tokens))),
            "bits_per_byte": entry["validation"]["bits_per_byte"],
        }
        for entry in log
        if "validation" in entry
    ]
    seconds = sum(
        (after - before) / speed for before, after, speed in zip(tokens, tokens[1:], speeds, strict=False) if speed
    )
    return {
        "tokens": tokens[-1],
        "seconds": round(seconds, 3),
        "tokens_per_second": statistics.median(speeds),
        "losses": _thinned(steps),
        "validations": _thinned(validations),
    }


def _thinned(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most `CURVE_POINTS` of the entries, evenly spread, with the last one."""
    count = min(len(entries), CURVE_POINTS)
    return [entries[len(entries) * (number + 1) // count - 1] for number in range(count)]


def _plain(value: Any) -> Any:
    """Return the value with None in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _commit() -> str | None:
    """Return the git commit of the current folder, marked where files differ from it."""
    call = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=, changed"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
