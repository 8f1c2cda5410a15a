"""How far preparing is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .writer import CorpusFiles

if TYPE_CHECKING:  # only who prepares waits for the library
    from rich.progress import Progress as Bar

Progress = Callable[[str], None]
SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_MOVES = 0.1


class Watch:
    """Tells what is done: to a function, or on stderr with a bar where that is a terminal."""

    def __init__(self, progress: Progress | bool, *, size: int) -> None:
        """`progress` is told each line; True is stderr, False nobody. `size` is that of the source in bytes, or 0."""
        self._progress = progress
        self._size = size
        self._bar = _bar(size, shown=progress is True)
        self._interval = SECONDS_BETWEEN_LINES if self._bar.disable else SECONDS_BETWEEN_MOVES
        self._next = time.monotonic() + self._interval

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """Tell a line."""
        if self._progress is True:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._progress:
            self._progress(line)

    def begin(self, files: CorpusFiles) -> None:
        """Encoding begins, maybe after documents of an earlier time."""
        if files.documents:
            self.say(f"going on after {files.documents:,} documents")
        self._begun = time.monotonic(), files.read, _tokens(files)
        self._task = self._bar.add_task("", total=self._size or None, completed=files.read)

    def move(self, split: str, files: CorpusFiles) -> None:
        """A document of a split has come to the files."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._interval
        if self._bar.disable:
            self.say(f"{_summary(split, files)}; {self._share(files) if self._size else self._speed(files)}")
            return
        text = f"{split}: {len(files.splits[split].documents):,} documents"
        text += "" if self._size else f", {self._speed(files)}"
        self._bar.update(self._task, completed=files.read, description=text)

    def end(self, files: CorpusFiles) -> None:
        """All documents have come."""
        self._bar.update(self._task, completed=files.read, description="")
        for split in files.splits:
            self.say(_summary(split, files))

    def _share(self, files: CorpusFiles) -> str:
        """How much of the source is read, and how long the rest will take."""
        began, read, _ = self._begun
        seconds = (time.monotonic() - began) * (self._size - files.read) / max(1, files.read - read)
        return f"{files.read / self._size:.0%} read, {timedelta(seconds=round(seconds))} left"

    def _speed(self, files: CorpusFiles) -> str:
        began, _, tokens = self._begun
        return f"{(_tokens(files) - tokens) / (time.monotonic() - began):,.0f} tokens/s"


def _summary(name: str, files: CorpusFiles) -> str:
    split = files.splits[name]
    words = sum(document.words for document in split.documents)
    return f"{name}: {len(split.documents):,} documents, {split.tokens:,} tokens, {words:,} words"


def _tokens(files: CorpusFiles) -> int:
    return sum(split.tokens for split in files.splits.values())


def _bar(size: int, *, shown: bool) -> Bar:
    from rich import progress
    from rich.console import Console

    console, text = Console(stderr=True), progress.TextColumn("{task.description}")
    if size:
        percent = progress.TextColumn("{task.percentage:>3.0f} %")
        speed, left = progress.TransferSpeedColumn(), progress.TimeRemainingColumn()
        columns = [progress.BarColumn(20), percent, speed, progress.TextColumn("ETA"), left, text]
    else:
        columns = [progress.TimeElapsedColumn(), text]
    return progress.Progress(*columns, console=console, disable=not shown or not console.is_terminal)
