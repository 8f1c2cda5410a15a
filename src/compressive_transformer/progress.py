"""Progress of everything that takes long: a bar on a terminal, a line every few seconds elsewhere, both on stderr.

    with Progress(total=10_000, unit="tokens") as progress:
        for batch in batches:
            ...
            progress.advance(len(batch))             # or progress.update(done, "loss 1.23 nats")
        progress.print("a line that stays above the bar")

shows `2,500 of 10,000 tokens, ETA 0:00:12; loss 1.23 nats`, beside the bar or as a line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

Report = Callable[[str], None]
"""A function that receives lines of progress."""


class Progress:
    """A display of work that is counted in one unit. Use it as a context manager."""

    def __init__(
        self,
        total: int | None = None,
        *,
        unit: str = "tokens",
        completed: int = 0,
        seconds: float = 5.0,
        report: Report | bool = True,
    ) -> None:
        """Set up the display, which appears when the context is entered.

        Args:
            total: All units, with those that were completed before; None where it is unknown.
            unit: Plural name of what is counted.
            completed: Units done before, of a run that is resumed. They do not count for the ETA.
            seconds: Least time between two lines where there is no bar; 0 shows every update.
            report: True for stderr, False for no display, or a function that receives each line.
        """
        self.total, self.completed = total, completed
        self._unit, self._seconds, self._report = unit, seconds, report
        self._text = ""
        self._bar = _terminal_bar() if report is True else None
        if self._bar:
            self._task = self._bar.add_task("", total=total, completed=completed)
        self.restart(completed)

    @property
    def has_bar(self) -> bool:
        """True on a terminal, where updates replace each other; elsewhere they become lines."""
        return self._bar is not None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def restart(self, completed: int) -> None:
        """Measure speed from now on, with `completed` units done before."""
        self.completed = self._completed_before = completed
        self._began = time.monotonic()
        self._next_line = self._began + self._seconds

    def print(self, line: str) -> None:
        """Print a line that stays; the next line of progress waits for its full interval."""
        self._next_line = time.monotonic() + self._seconds
        if callable(self._report):
            self._report(line)
        elif self._bar:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._report:
            print(line, file=sys.stderr, flush=True)

    def advance(self, units: int = 1) -> None:
        """Count units that were completed."""
        self.update(self.completed + units, self._text)

    def update(self, completed: int, text: str = "", *, total: int | None = None) -> None:
        """Set the units completed, a text to show behind them and, where it changed, the total."""
        self.completed, self._text = completed, text
        self.total = self.total if total is None else total
        if self._bar:
            self._bar.update(self._task, total=self.total, completed=completed, description=str(self))
        elif self._report and time.monotonic() >= self._next_line:
            self.print(str(self))

    def __str__(self) -> str:
        seconds, done = time.monotonic() - self._began, self.completed - self._completed_before
        if self.total is None:
            count = f"{self.completed:,} {self._unit}, {done / max(seconds, 1e-9):,.0f} a second"
        else:  # at the mean speed so far
            left = timedelta(seconds=round((self.total - self.completed) * seconds / done)) if done > 0 else "unknown"
            count = f"{self.completed:,} of {self.total:,} {self._unit}, ETA {left}"
        return f"{count}; {self._text}" if self._text else count


def _terminal_bar() -> Any:
    """Return a bar of rich on stderr, None where that is no terminal."""
    from rich import progress  # takes a tenth of a second
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    text = progress.TextColumn("{task.description}", markup=False)
    return progress.Progress(progress.BarColumn(20), progress.TimeElapsedColumn(), text, console=console)
