"""The command that scores a live stream."""

from __future__ import annotations

import json as json_format
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Self

import tyro
from tyro.conf import Positional

from ..checkpoint import load
from ..generate.line_scores import ScoredLine, score_lines
from ..generate.stream import Stream
from .terminal import default_device, say

SAVED_EVERY = 60.0
"""Seconds between two savings of --state while lines come."""


def score(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    top: int = 0,
    block: int = 0,
    state: Path | None = None,
    json: bool = False,
) -> None:
    """Score lines from standard input as they come, for ever, each given all before it: tail -F app.log | compressive
    score RUN

    Prints bits, bits per byte and the line; how fast it was is said at the end on stderr.

    Args:
        run: A run that `compressive train` wrote.
        top: Print the so many most surprising tokens of each line as well.
        block: Score blocks of so many bytes, as they are, instead of lines; for models of bytes.
        state: A file that keeps what was read: it is taken up if it exists, and written each minute and at the end.
        json: Print an object of JSON a line.
    """
    model, tokenizer = load(run)
    model = model.to(default_device())
    taken_up = state is not None and state.exists()
    stream = Stream.load(state, model, tokenizer) if state and taken_up else Stream(model, tokenizer)
    if state and taken_up:
        say(f"{state}: {int(stream.memory.seen):,} tokens were read before")
    with _Input(sys.stdin.buffer) as source:
        done = _Done(time.perf_counter())
        try:
            for line in score_lines(stream, source, top=top, block=block):
                print(_object(line) if json else _plain(line), flush=True)
                done.add(line)
                if state and done.is_time_to_save():
                    stream.save(state)
        except KeyboardInterrupt:
            pass  # the way in which a live stream ends
        finally:
            if state:
                stream.save(state)
            say(done.summary(source.waited))


def _plain(line: ScoredLine) -> str:
    tokens = "".join(f"\n{bits:>10.2f}           {text!r}" for text, bits in line.top)
    return f"{line.bits:>10.2f} {line.bits_per_byte:>9.4f}  {line.text}{tokens}"


def _object(line: ScoredLine) -> str:
    top = [{"token": token, "bits": bits} for token, bits in line.top]
    return json_format.dumps({**asdict(line), "bits_per_byte": line.bits_per_byte, "top": top}, ensure_ascii=False)


@dataclass
class _Done:
    """What was scored."""

    began: float
    lines: int = 0
    bytes: int = 0
    bits: float = 0.0
    saved: float = 0.0

    def add(self, line: ScoredLine) -> None:
        self.lines, self.bytes, self.bits = self.lines + 1, self.bytes + line.bytes, self.bits + line.bits

    def is_time_to_save(self) -> bool:
        """Whether the last time was long ago; it is then taken as done."""
        now = time.perf_counter()
        if now - max(self.saved, self.began) < SAVED_EVERY:
            return False
        self.saved = now
        return True

    def summary(self, waited: float) -> str:
        """`waited`: seconds that no input was there."""
        seconds = time.perf_counter() - self.began - waited
        mean = f", {self.bits / self.bytes:.4f} bits per byte" if self.bytes else ""
        return (
            f"{self.lines:,} lines, {self.bytes:,} bytes{mean}; "
            f"{self.bytes / seconds:,.0f} bytes a second over {seconds:.1f} s of work"
        )


class _Input:
    """A pipe that Ctrl-C or SIGTERM ends while it is waited for, and otherwise after the piece being scored."""

    def __init__(self, file: BinaryIO) -> None:
        self.waited = 0.0
        self._file = file
        self._waiting = self._stopped = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def readline(self, size: int, /) -> bytes:
        return self._wait(self._file.readline, size)

    def read(self, size: int, /) -> bytes:
        return self._wait(self._file.read, size)

    def _wait(self, read: Callable[[int], bytes], size: int) -> bytes:
        began, self._waiting = time.perf_counter(), True
        try:
            if self._stopped:
                raise KeyboardInterrupt
            return read(size)
        finally:
            self._waiting = False
            self.waited += time.perf_counter() - began

    def _stop(self, *_: object) -> None:
        self._stopped = True
        if self._waiting:
            raise KeyboardInterrupt
