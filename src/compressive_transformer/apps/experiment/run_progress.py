"""Progress of an experiment over all its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ...progress import Progress
from .plan import Run
from .running import result_of, steps_done

SECONDS_BETWEEN_LINES = 60.0


class RunProgress:
    """Display of finished runs and of the tokens that all trainings read, padding included."""

    def __init__(self, runs: Sequence[Run], out: Path) -> None:
        self.runs, self.out = runs, out
        self.total = sum(_tokens(run, run.train.steps) for run in runs)
        self.finished = sum(result_of(run, out) is not None for run in runs)
        self.progress = Progress(self.total, completed=self._done(), seconds=SECONDS_BETWEEN_LINES)

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, trace)

    def ended(self, run: Run, reason: str | None) -> None:
        """Print that a run has ended, with the reason where it failed."""
        if reason is None:
            self.finished += 1
        else:
            self.total -= _tokens(run, run.train.steps - steps_done(run, self.out))
        self.update([])
        self.progress.print(f"{run.name}: {'finished' if reason is None else f'failed: {reason}'}; {self.progress}")

    def update(self, active: Sequence[Run]) -> None:
        """Show the progress of all runs; `active` are those at work."""
        steps = [f"{run.name} at step {steps_done(run, self.out):,}" for run in active]
        text = "; ".join([f"{self.finished} of {len(self.runs)} runs", *([] if self.progress.has_bar else steps)])
        self.progress.update(self._done(), text, total=self.total)

    def _done(self) -> int:
        return sum(_tokens(run, steps_done(run, self.out)) for run in self.runs)


def _tokens(run: Run, steps: int) -> int:
    model = run.setting.model
    return steps * run.train.batch_size * run.train.segments_of(model) * model.segment_length
