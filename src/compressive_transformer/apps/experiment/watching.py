"""How far an experiment is, over all its runs: a bar on a terminal, lines elsewhere, on stderr."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from .plan import Run
from .running import result_of, steps_done

SECONDS_BETWEEN_LINES = 60.0


class Watch:
    """Counts runs, and the tokens that all their trainings are to read, places of padding included."""

    def __init__(self, runs: Sequence[Run], out: Path) -> None:
        # Only who runs an experiment waits for this import.
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self.runs, self.out = runs, out
        self.total = sum(_tokens(run, run.train.steps) for run in runs)
        self.finished = sum(result_of(run, out) is not None for run in runs)
        self.began, self.before = time.monotonic(), self._done()
        self.shown = self.began
        self.console = Console(stderr=True)
        columns = BarColumn(), TextColumn("{task.description}")
        self.bar = Bar(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task(self._summary(), total=self.total, completed=self.before)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def ended(self, run: Run, reason: str | None) -> None:
        """A run has ended, badly where there is a reason."""
        if reason is None:
            self.finished += 1
        else:
            self.total -= _tokens(run, run.train.steps - steps_done(run, self.out))
        self._print(f"{run.name}: {'finished' if reason is None else f'failed: {reason}'}; {self._summary()}")

    def look(self, active: Sequence[Run]) -> None:
        """Show how far the runs are, `active` the ones that are at work; called every now and then."""
        if self.console.is_terminal:
            self.bar.update(self.task, total=self.total, completed=self._done(), description=self._summary())
        elif time.monotonic() - self.shown >= SECONDS_BETWEEN_LINES:
            at = (f"{run.name} at step {steps_done(run, self.out):,}" for run in active)
            self._print("; ".join([self._summary(), *at]))

    def _done(self) -> int:
        return sum(_tokens(run, steps_done(run, self.out)) for run in self.runs)

    def _summary(self) -> str:
        done, seconds = self._done(), time.monotonic() - self.began
        # Scoring takes time too: from the first runs on that end, it is in the mean.
        left = (self.total - done) * seconds / (done - self.before) if done > self.before else None
        eta = "unknown" if left is None else str(timedelta(seconds=round(left)))
        return f"{self.finished} of {len(self.runs)} runs, {done:,} of {self.total:,} tokens, ETA {eta}"

    def _print(self, line: str) -> None:
        self.shown = time.monotonic()
        self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tokens(run: Run, steps: int) -> int:
    model = run.setting.model
    return steps * run.train.batch_size * run.train.segments_of(model) * model.segment_length
