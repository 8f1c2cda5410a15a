"""Training log: metrics and events of a run for callbacks, log.jsonl and the console."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import CompressiveError
from ..files import atomic_file
from ..model import CompressiveTransformer
from ..progress import Progress
from .distributed import Processes
from .optimizer import Update
from .step import StepLosses

Callback = Callable[[dict[str, Any], CompressiveTransformer], bool | None]
"""Function of an entry of the log before it is written, to which it may add plain values, and the model, which it may
read; True stops the run after this step."""


class Averages:
    """Means over the steps since the last log line; tensors stay on the device until `entry`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.targets = 0
        self.steps = 0.0
        self.nats: Tensor | float = 0.0
        self.loss: Tensor | float = 0.0
        self.error: Tensor | float = 0.0
        self.commits: Tensor | float = 0.0
        self.update: Update | None = None
        """The last update."""

    def add(self, losses: StepLosses, share: float) -> None:
        """Add the losses of one micro-batch; `share` is its fraction of the lanes of the process."""
        self.steps += share
        self.nats = self.nats + losses.nats.detach()
        self.loss = self.loss + losses.compression_loss.detach() * share
        self.error = self.error + losses.reconstruction_error
        self.commits = self.commits + losses.commits

    def entry(self, processes: Processes) -> dict[str, Any]:
        """Return losses in nats, tokens per second and the last update, over all processes, as plain values."""
        nats = processes.all_reduce(torch.as_tensor(self.nats, dtype=torch.float64))
        loss = processes.all_reduce(torch.as_tensor(self.loss / self.steps)) / processes.world
        error = processes.all_reduce(torch.as_tensor(self.error))
        commits = processes.all_reduce(torch.as_tensor(self.commits)).clamp(min=1)
        return {
            "loss": float(nats) / max(self.targets, 1),
            "compression_loss": float(loss),
            "reconstruction_error": [round(value, 5) for value in (error / commits).tolist()],
            "tokens_per_second": round(self.targets / (time.perf_counter() - self.began), 1),
            **(self.update.to_dict() if self.update else {}),
        }


class Log:
    """Log of a run: entries go to the callbacks, to log.jsonl in the run's folder, and to the console.

    All processes call `write`; rank 0 alone calls callbacks and writes. The console, stderr, shows a progress bar on a
    terminal and lines elsewhere.
    """

    def __init__(
        self,
        model: CompressiveTransformer,
        processes: Processes,
        out: Path,
        *,
        last: int,
        step: int = 0,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """`step` is the step that the run resumes from, `last` that at which it ends."""
        self.model, self.processes, self.callbacks = model, processes, callbacks
        self.path, self.step, self.last = out / "log.jsonl", step, last
        self.stack, self.stopped = ExitStack(), False
        """True if a callback has stopped the run, the same in all processes."""

    def __enter__(self) -> Self:
        if self.processes.is_main:
            self.file = self.stack.enter_context(self.path.open("a", encoding="utf-8"))
            self.progress = self.stack.enter_context(Progress(self.last, unit="steps", completed=self.step))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def write(self, entry: dict[str, Any]) -> None:
        """Log an entry, which has a `step`. Raises CompressiveError if it holds more than plain values."""
        stops = False
        if self.processes.is_main:
            for callback in self.callbacks:
                stops = callback(entry, self.model) is True or stops
            self._append(entry)
        self.stopped = self.processes.any(stops) or self.stopped

    def _append(self, entry: dict[str, Any]) -> None:
        try:
            line = _line(entry)
        except (TypeError, ValueError) as error:
            raise CompressiveError(
                f"an entry of the log must hold plain values only, such as float, str or list: {error}"
            ) from None
        self.file.write(line)
        self.file.flush()
        text = _summary(entry)
        if "loss" in entry and self.progress.has_bar:
            self.progress.update(entry["step"], text)
        else:
            self.progress.print(f"step {entry['step']}/{self.last}  {text}")


def truncate_log(path: Path, step: int) -> None:
    """Remove the lines of a log beyond `step`, which a resumed run writes again."""
    if not path.exists():
        return
    lines = [_line(entry) for entry in read_log(path) if entry["step"] <= step]
    with atomic_file(path) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a log, without an unfinished last line; none if there is no log."""
    if not path.exists():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):  # samples may hold other line ends
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and "step" in entry:
            entries.append(entry)
    return entries


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def _summary(entry: dict[str, Any]) -> str:
    if "validation" in entry:
        score = entry["validation"]
        return f"validation: {score['bits_per_byte']:.4f} bits per byte, {score['nats_per_token']:.4f} nats per token"
    if "sample" in entry:
        return f"sample: {entry['sample']}"
    if "skipped" in entry:
        return describe_skip(entry["skipped"])
    if "processes" in entry:
        before, now = entry["processes"]["before"], entry["processes"]["now"]
        return f"resumed with {now} processes instead of {before}: lanes keep their memory, RNG states are reset"
    errors = entry["reconstruction_error"]
    text = f"loss {entry['loss']:.4f} nats"
    if any(errors):
        text += f"  compression {entry['compression_loss']:.2e} (error {sum(errors) / len(errors):.3f})"
    return f"{text}  {entry['tokens_per_second']:,.0f} tokens/s"


def describe_skip(skipped: Mapping[str, Any]) -> str:
    """Return the log line of a skipped update."""
    norms = f"norm {skipped['gradient_norm']}, of compression {skipped['compression_gradient_norm']}"
    lanes = [f"lane {lane} (document {title!r})" for lane, title in skipped["lanes"].items()]
    reset = f"; memory was not finite and is reset in {', '.join(lanes)}" if lanes else ""
    return f"update skipped: gradients are not finite ({norms}), {skipped['count']} skipped so far{reset}"
