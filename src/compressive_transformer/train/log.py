"""What a training run tells: a line of JSON for machines, a progress bar for people, numbers for a tracker."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ..errors import CompressiveError
from ..files import atomic_file
from .distributed import Processes
from .step import StepLosses
from .trackers import Tracker

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Sums:
    """Means over the steps since the last line of the log, kept on the device until they are asked for."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.targets = 0
        self.steps = 0.0
        self.nats: Tensor | float = 0.0
        self.loss: Tensor | float = 0.0
        self.error: Tensor | float = 0.0
        self.commits: Tensor | float = 0.0

    def add(self, read: StepLosses, share: float) -> None:
        """Take in one part of a step; `share` is that part of the process's lanes."""
        self.steps += share
        self.nats = self.nats + read.nats.detach()
        self.loss = self.loss + read.compression_loss.detach() * share
        self.error = self.error + read.reconstruction_error
        self.commits = self.commits + read.commits

    def entry(self, processes: Processes) -> dict[str, Any]:
        """Losses in nats and speed, over all processes, as plain values."""
        nats = processes.total(torch.as_tensor(self.nats, dtype=torch.float64))
        loss = processes.total(torch.as_tensor(self.loss / self.steps)) / processes.world
        error = processes.total(torch.as_tensor(self.error))
        commits = processes.total(torch.as_tensor(self.commits)).clamp(min=1)
        return {
            "loss": float(nats) / max(self.targets, 1),
            "compression_loss": float(loss),
            "reconstruction_error": [round(value, 5) for value in (error / commits).tolist()],
            "tokens_per_second": round(self.targets / (time.perf_counter() - self.began), 1),
        }


def new_bar() -> Bar:
    """A bar on stderr with the time that is left, which shows nothing where nobody watches a terminal."""
    # Only who waits for something waits for this import.
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    return Bar(*columns, console=console, disable=not console.is_terminal)


class Progress:
    """Writes log.jsonl in the run's folder, and shows a bar on a terminal or lines elsewhere, on stderr."""

    def __init__(self, out: Path, last: int, *, step: int, tracker: Tracker | None) -> None:
        self.file = (out / "log.jsonl").open("a", encoding="utf-8")
        self.last = last
        self.tracker = tracker
        self.bar = new_bar()
        self.console = self.bar.console
        self.task = self.bar.add_task("", total=last, completed=step)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        self.file.close()
        if self.tracker is not None:
            self.tracker.close()

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line to the log and show what it says. Raises CompressiveError where JSON has no form for it."""
        try:
            line = _line(entry)
        except (TypeError, ValueError) as error:
            raise CompressiveError(
                f"an entry of the log must hold plain values only, such as float, str or list: {error}"
            ) from None
        self.file.write(line)
        self.file.flush()
        text = _summary(entry)
        if "loss" in entry and self.console.is_terminal:
            self.bar.update(self.task, completed=entry["step"], description=text)
        else:
            line = f"step {entry['step']}/{self.last}  {text}"
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self.tracker is not None and (numbers := _numbers(entry)):
            self.tracker.log(numbers, entry["step"])


def cut_log(path: Path, step: int) -> None:
    """Remove the lines of a log that lie beyond `step`: a resumed run writes them again."""
    if not path.exists():
        return
    kept = [_line(entry) for entry in read_log(path) if entry["step"] <= step]
    with atomic_file(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log, without a line that was being written when the run ended; none where there is no log."""
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
        return skip_line(entry["skipped"])
    if "processes" in entry:
        before, now = entry["processes"]["before"], entry["processes"]["now"]
        return f"goes on with {now} instead of {before} processes: lanes keep their memory, random numbers begin anew"
    errors = entry["reconstruction_error"]
    text = f"loss {entry['loss']:.4f} nats"
    if any(errors):
        text += f"  compression {entry['compression_loss']:.2e} (error {sum(errors) / len(errors):.3f})"
    return f"{text}  {entry['tokens_per_second']:,.0f} tokens/s"


def skip_line(skipped: dict[str, Any]) -> str:
    """What the log says of an update that was left out, as a sentence."""
    lanes = [f"lane {lane}, in {title!r}," for lane, title in skipped["lanes"].items()]
    emptied = f"; memory of {' '.join(lanes)} was not finite and is empty now" if lanes else ""
    norms = f"norm {skipped['gradient_norm']}, of compression {skipped['compression_gradient_norm']}"
    return f"gradients are not finite ({norms}): update {skipped['count']} that is skipped{emptied}"


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of an entry under the names that a tracker groups; one a layer becomes one a name."""
    kind = next((kind for kind in ("validation", "sample") if kind in entry), "train")
    values = {**entry, **entry.get("validation", {})}
    for name, value in entry.items():
        if isinstance(value, list):
            values.update({f"{name}/{place}": one for place, one in enumerate(value)})
    return {
        f"{kind}/{name}": value
        for name, value in values.items()
        if isinstance(value, int | float) and name != "step" and math.isfinite(value)
    }
