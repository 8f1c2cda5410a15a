"""Trackers of experiments: numbers of a run in TensorBoard, trackio or Weights & Biases, each an extra of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from ..checkpoint import read_json, write_json
from ..errors import CompressiveError

TrackerName = Literal["tensorboard", "trackio", "wandb"]
PROJECT = "compressive-transformer"


class Tracker(Protocol):
    """Where numbers of one run go."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take in the numbers of a step, by name."""

    def close(self) -> None:
        """Write what is not written yet."""


def require_tracker(name: str | None) -> None:
    """Raise CompressiveError for a tracker that is unknown or whose package is missing."""
    if name is None:
        return
    if name not in OPENERS:
        raise CompressiveError(f"tracker ({name!r}) must be {' or '.join(map(repr, OPENERS))}")
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # a mere folder of that name, as W&B makes, has no origin
        raise CompressiveError(f"{name} is not installed; pip install 'compressive-transformer[{name}]'")


def open_tracker(name: TrackerName, out: Path, config: Mapping[str, Any], *, step: int) -> Tracker:
    """The tracker of the run in the folder `out`, which has come to `step`.

    `config` is shown beside the numbers. Where the run has used the tracker before, its numbers go on in the same
    run of trackio or Weights & Biases, whose id is in tracker.json, and TensorBoard hides those beyond `step`.

    Raises CompressiveError where the tracker cannot begin.
    """
    path = out / "tracker.json"
    run = read_json(path).get("id") if path.exists() else uuid.uuid4().hex[:12]
    if not isinstance(run, str):
        raise CompressiveError(f"{path}: expected a table with the run's id; remove the file to begin a new run there")
    tracker = OPENERS[name](out, run, config, step)
    write_json(path, {"id": run})  # not before: a tracker that cannot begin leaves the folder as it was
    return tracker


class _TensorBoard:
    """Event files in the folder tensorboard/ of the run."""

    def __init__(self, out: Path, run: str, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Trackio:
    """A database on this machine, or wherever trackio's own settings say."""

    def __init__(self, out: Path, run: str, config: Mapping[str, Any], step: int) -> None:
        import trackio

        with contextlib.redirect_stdout(sys.stderr):  # results alone go to stdout
            name = f"{out.resolve().name}-{run}"  # runs are known by their names
            self.run = trackio.init(PROJECT, name=name, config=dict(config), resume="allow")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        import trackio

        with contextlib.redirect_stdout(sys.stderr):
            trackio.finish()  # the run's own method would be called once more at the end of the process


class _WeightsAndBiases:
    """The service, or with WANDB_MODE=offline the folder wandb/ of the run, for `wandb sync` to upload."""

    def __init__(self, out: Path, run: str, config: Mapping[str, Any], step: int) -> None:
        import wandb

        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=out.resolve().name,
                id=run,
                dir=out,
                config=dict(config),
                resume="allow",
            )
        except wandb.Error as error:
            raise CompressiveError(
                f"Weights & Biases cannot begin: {error} Log in, or set WANDB_MODE=offline to keep its files in the run"
            ) from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


OPENERS: dict[TrackerName, type[_TensorBoard | _Trackio | _WeightsAndBiases]] = {
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
    "wandb": _WeightsAndBiases,
}
