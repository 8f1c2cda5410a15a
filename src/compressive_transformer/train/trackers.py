"""Experiment trackers: callbacks that show the metrics of a run in TensorBoard, trackio or Weights & Biases."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ..checkpoint import read_json, write_json
from ..errors import CompressiveError
from ..model import CompressiveTransformer
from .log import Callback

TrackerName = Literal["tensorboard", "trackio", "wandb"]
PROJECT = "compressive-transformer"

Metrics = dict[str, float]
LogMetrics = Callable[[Metrics, int], Any]
"""Function that logs the metrics of a step."""


def require_tracker(name: str | None) -> None:
    """Raise CompressiveError if a tracker is unknown or its package is not installed."""
    if name is None:
        return
    if name not in TRACKERS:
        raise CompressiveError(f"tracker ({name!r}) must be {' or '.join(map(repr, TRACKERS))}")
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # a mere folder of that name, as W&B makes, has no origin
        raise CompressiveError(f"{name} is not installed; pip install 'compressive-transformer[{name}]'")


@contextlib.contextmanager
def open_tracker(name: TrackerName, out: Path, config: Mapping[str, Any], *, step: int) -> Iterator[Callback]:
    """Yield the callback that logs to a tracker; `out` is the run's folder, `step` the step it resumes from.

    `config` is shown beside the metrics. A resumed run continues the same run of trackio or Weights & Biases, whose id
    is in tracker.json; TensorBoard hides what was logged beyond `step`.

    Raises CompressiveError if the tracker cannot start.
    """
    path = out / "tracker.json"
    run = read_json(path).get("id") if path.exists() else uuid.uuid4().hex[:12]
    if not isinstance(run, str):
        raise CompressiveError(f"{path}: expected a table with the run's id; remove the file to start a new run there")
    with TRACKERS[name](out, run, dict(config), step) as log:
        write_json(path, {"id": run})  # not before: a tracker that cannot start leaves the folder unchanged

        def callback(entry: dict[str, Any], _: CompressiveTransformer) -> None:
            if metrics := _metrics(entry):
                log(metrics, entry["step"])

        yield callback


@contextlib.contextmanager
def _tensorboard(out: Path, _: str, config: Mapping[str, Any], step: int) -> Iterator[LogMetrics]:
    """Write event files in the folder tensorboard/ of the run."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def log(metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    with contextlib.closing(writer):
        yield log


@contextlib.contextmanager
def _trackio(out: Path, run: str, config: Mapping[str, Any], _: int) -> Iterator[LogMetrics]:
    """Write to a local database, or to what trackio's settings say."""
    import trackio

    with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
        name = f"{out.resolve().name}-{run}"  # runs are known by their names
        tracked = trackio.init(PROJECT, name=name, config=config, resume="allow")
    try:
        yield lambda metrics, step: tracked.log(metrics, step=step)
    finally:
        with contextlib.redirect_stdout(sys.stderr):
            trackio.finish()  # the run's own method would be called once more at the end of the process


@contextlib.contextmanager
def _wandb(out: Path, run: str, config: Mapping[str, Any], _: int) -> Iterator[LogMetrics]:
    """Log to the service, or with WANDB_MODE=offline to the folder wandb/ of the run, for `wandb sync` to upload."""
    import wandb

    project, name = os.environ.get("WANDB_PROJECT", PROJECT), out.resolve().name
    try:
        tracked = wandb.init(project=project, name=name, id=run, dir=out, config=config, resume="allow")
    except wandb.Error as error:
        raise CompressiveError(
            f"Weights & Biases cannot start: {error} Log in, or set WANDB_MODE=offline to keep its files in the run"
        ) from None
    try:
        yield lambda metrics, step: tracked.log(metrics, step=step)
    finally:
        tracked.finish()


TRACKERS: dict[str, Callable[[Path, str, dict[str, Any], int], AbstractContextManager[LogMetrics]]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}


def _metrics(entry: Mapping[str, Any]) -> Metrics:
    """Return the finite numbers of an entry, grouped by kind; a list with one per layer becomes one name each."""
    kind = next((kind for kind in ("validation", "sample") if kind in entry), "train")
    values = {**entry, **entry.get("validation", {})}
    for name, value in entry.items():
        if isinstance(value, list):
            values.update({f"{name}/{index}": number for index, number in enumerate(value)})
    return {
        f"{kind}/{name}": value
        for name, value in values.items()
        if isinstance(value, int | float) and name != "step" and math.isfinite(value)
    }
