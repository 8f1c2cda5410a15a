"""Timing in turn, A B A B, next to the limits of the machine measured in the same rounds."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from machine import DEVICE, wait

Step = Callable[[Tensor], Tensor]
"""Takes the next token of each lane `[batch]` in, and gives logits `[batch, vocab_size]`."""
Seconds = dict[str, list[float]]
"""By name, one number for each round."""

LIMIT = "limit"
"""The name under which a limit of the machine runs among the contenders."""
SIDE = 1024 if DEVICE.type == "cpu" else 8192  # large enough to keep it busy
PRODUCTS = 4
PLACES = (1, 3, 5, 7)
"""Eighths of a segment at which decoding is timed; its commit, the last token, is timed apart."""

_began = time.monotonic()


def say(text: str) -> None:
    """Print a line of progress on stderr, with the minutes since the start."""
    minutes, seconds = divmod(int(time.monotonic() - _began), 60)
    print(f"{minutes:3d}:{seconds:02d}  {text}", file=sys.stderr, flush=True)


def interleave(runs: Mapping[str, Callable[[], object]], rounds: int) -> Seconds:
    """Return seconds of each run in each round, all runs in turn.

    Other load affects all of them. Nothing is discarded: warm up before.
    """
    seconds: Seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            wait()
            seconds[name].append(time.perf_counter() - began)
    return seconds


@dataclass(frozen=True)
class Spread:
    """Median and range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more numbers."""
        return cls(statistics.median(values), min(values), max(values))


def ratio(seconds: Sequence[float], ours: Sequence[float]) -> Spread:
    """Return the ratio of times to ours by round, since load differs between rounds."""
    return Spread.of([other / own for other, own in zip(seconds, ours, strict=True)])


def fraction(needed: float, seconds: Sequence[float], limit: Sequence[float], done: float) -> Spread:
    """Return the share of the machine's limit by round: `needed` in our seconds against `done` in the limit's."""
    return Spread.of([needed / own * other / done for own, other in zip(seconds, limit, strict=True)])


class Decoding:
    """Timer of one form of decoding; each call of `run` adds one round."""

    def __init__(self, decoder: Callable[[int, int], Step], batch: int, *, length: int, tokens: int) -> None:
        self.decoder, self.batch, self.length, self.tokens = decoder, batch, length, tokens
        self.ordinary: list[float] = []
        """Seconds of a token of each lane, a mean over places of the segment."""
        self.commit: list[float] = []
        """Seconds of the last token of a segment."""

    def run(self) -> None:
        """Decode at each position, with full memory."""
        took = [self._time(self.length * eighth // 8, self.tokens) for eighth in PLACES]
        self.ordinary.append(sum(map(sum, took)) / len(took) / self.tokens)
        self.commit.append(self._time(self.length - 3, 2)[-1])

    def _time(self, at: int, tokens: int) -> list[float]:
        step, taken = self.decoder(self.batch, at), torch.zeros(self.batch, dtype=torch.int64, device=DEVICE)
        taken = step(taken).argmax(dim=-1)  # warms up
        wait()
        seconds = []
        for _ in range(tokens):
            began = time.perf_counter()
            taken = step(taken).argmax(dim=-1)
            wait()
            seconds.append(time.perf_counter() - began)
        return seconds


def products(dtype: torch.dtype = torch.float32) -> tuple[Callable[[], None], float]:
    """Return a function of SIDE x SIDE matrix products, and its multiply-adds."""
    left, right = (torch.randn(SIDE, SIDE, device=DEVICE).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def run() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)

    run()
    return run, PRODUCTS * SIDE**3


def reading(size: float, least: float = 2e9) -> tuple[Callable[[], None], float]:
    """Return a function that reads a buffer of `size` bytes repeatedly, and the bytes read, at least `least`.

    The buffer is as large as the data that a decoder reads per token, so that both fit in the same cache.
    """
    buffer = torch.ones(max(1, int(size) // 4), device=DEVICE)
    times = max(1, round(least / buffer.nbytes))

    def run() -> None:
        for _ in range(times):
            buffer.sum()

    return run, float(times * buffer.nbytes)


def bf16_is_fast() -> bool:
    """Return True if this machine multiplies in bf16 at no less than half of its rate in fp32.

    CPUs without bf16 instructions take a hundred times as long.
    """
    runs = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.randn(256, 256, device=DEVICE).to(dtype) for _ in range(2))
        runs[str(dtype)] = partial(torch.mm, left, right)
    # The fastest of many rounds: beside other processes a single one may wait for as long as bf16 takes.
    plain, rounded = (min(took) for took in interleave(runs, 20).values())
    return rounded < 2 * plain
