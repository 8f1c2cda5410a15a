"""The command `score`."""

from __future__ import annotations

import json as json_format
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Self

from ..generate import ScoredLine, Stream, score_lines
from ._common import RunArgument, load_model, say

SECONDS_BETWEEN_SAVES = 60.0


def score(
    run: RunArgument,
    /,
    top: int = 0,
    block: int = 0,
    state: Path | None = None,
    json: bool = False,
) -> None:
    """Score lines of standard input as they arrive, each given all lines before it.

    Prints bits, bits per byte and the line, and at the end a summary with the speed on stderr. Example: tail -F app.log
    | compressive score RUN

    Args:
        run: Run from `compressive train`.
        top: Also print the N most surprising tokens of each line.
        block: Score fixed-size blocks of N raw bytes instead of lines; for models whose tokens are bytes.
        state: File that keeps the state of the stream: resumed from if it exists, written every minute and at the end.
        json: Print one JSON object per line.
    """
    model, tokenizer = load_model(run)
    if state and state.exists():
        stream = Stream.load(state, model, tokenizer)
        say(f"{state}: resuming after {stream.state.seen:,} tokens")
    else:
        stream = Stream(model, tokenizer)
    with _Input(sys.stdin.buffer) as source:
        summary, saved = _Summary(), time.perf_counter()
        try:
            for line in score_lines(stream, source, top=top, block=block):
                print(_to_json(line) if json else _to_text(line), flush=True)
                summary.add(line)
                if state and time.perf_counter() - saved >= SECONDS_BETWEEN_SAVES:
                    stream.save(state)
                    saved = time.perf_counter()
        except KeyboardInterrupt:
            pass  # the normal end of a live stream
        finally:
            if state:
                stream.save(state)
            say(summary.text(source.waited))


def _to_text(line: ScoredLine) -> str:
    tokens = "".join(f"\n{bits:>10.2f}           {text!r}" for text, bits in line.top)
    return f"{line.bits:>10.2f} {line.bits_per_byte:>9.4f}  {line.text}{tokens}"


def _to_json(line: ScoredLine) -> str:
    top = [{"token": token, "bits": bits} for token, bits in line.top]
    return json_format.dumps({**asdict(line), "bits_per_byte": line.bits_per_byte, "top": top}, ensure_ascii=False)


class _Summary:
    """Totals of all lines."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lines, self._bytes, self._bits = 0, 0, 0.0

    def add(self, line: ScoredLine) -> None:
        self._lines, self._bytes, self._bits = self._lines + 1, self._bytes + line.bytes, self._bits + line.bits

    def text(self, waited: float) -> str:
        """Return the totals, and the speed without the seconds `waited` for input."""
        seconds = time.perf_counter() - self._began - waited
        mean = f", {self._bits / self._bytes:.4f} bits per byte" if self._bytes else ""
        return (
            f"{self._lines:,} lines, {self._bytes:,} bytes{mean}; "
            f"{self._bytes / seconds:,.0f} bytes a second over {seconds:.1f} s of work"
        )


class _Input:
    """A pipe whose reading Ctrl-C and SIGTERM interrupt; while a line is scored, they wait for its end."""

    def __init__(self, file: BinaryIO) -> None:
        self.waited = 0.0
        """Seconds spent waiting for input."""
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
