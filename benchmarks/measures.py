"""Training, scoring, decoding and peak memory of all contenders on one work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from classical import Classical
from contenders import Contender, Ours, OursBf16, WithoutCompression
from machine import held
from peers import PEERS
from timing import LIMIT, Decoding, Seconds, bf16_is_fast, interleave, products, reading, say
from works import WORKS, Work, decoding_bytes, multiply_adds

Entry = dict[str, Any]

OTHERS: dict[str, type[Contender]] = {**PEERS, Classical.name: Classical}
ALL: dict[str, type[Contender]] = {each.name: each for each in (Ours, OursBf16, WithoutCompression, *OTHERS.values())}
NO_BF16 = "this processor has no fast products in bf16"

# Bytes of one weight, and of one number of the keys and values that are cached.
DECODING_BYTES = {Ours.name: (4, 4), f"{Ours.name}, bf16": (2, 4), f"{Ours.name}, int8": (1, 4)}


class Measures:
    """All contenders on one work; each measure returns one entry for JSON."""

    def __init__(self, name: str, work: Work) -> None:
        self.name, self.work = name, work
        self.skipped = {} if bf16_is_fast() else {OursBf16.name: NO_BF16}
        self.contenders = {}
        for kind in ALL.values():
            if kind.name not in self.skipped:
                say(f"{name}: {kind.name}: build and check")
                self.contenders[kind.name] = kind(work)
                self.contenders[kind.name].check()

    def training(self, rounds: int) -> Entry:
        """Measure training: forward, compression loss, backward and Adam, one segment of all lanes per step."""
        return self._by_segments("training", "train", rounds)

    def scoring(self, rounds: int) -> Entry:
        """Measure scoring: forward without gradient, one segment of all lanes per step."""
        return self._by_segments("scoring", "score", rounds)

    def decoding(self, rounds: int, batch: int, tokens: int) -> Entry:
        """Measure greedy decoding of `tokens` at each of four positions, then of a segment's last token, the commit."""
        self._say(f"decoding, batch {batch}")
        length = self.work.segment_length
        decode = {
            name: Decoding(decoder, batch, length=length, tokens=tokens)
            for one in (Ours.name, *OTHERS)
            for name, decoder in self.contenders[one].decoders().items()
        }
        runs: dict[str, Callable[[], object]] = {name: one.run for name, one in decode.items()}
        limits = {}
        for name in [name for name in decode if name in DECODING_BYTES]:
            weight, state = DECODING_BYTES[name]
            needed = decoding_bytes(self.work.config, batch, weight=weight, state=state)
            runs[f"{LIMIT} {name}"], done = reading(needed)
            limits[name] = {"needed_bytes": needed, "bytes": done}
        seconds = interleave(runs, rounds)
        return {
            **self._head("decoding", batch, batch),
            "limits": {name: {**limit, "seconds": seconds[f"{LIMIT} {name}"]} for name, limit in limits.items()},
            "seconds": {name: one.ordinary for name, one in decode.items()},
            "commit_seconds": {name: one.commit for name, one in decode.items()},
        }

    def _by_segments(self, measure: str, step: str, rounds: int) -> Entry:
        self._say(measure)
        left_out = [OursBf16.name] if step == "score" else []
        runs: dict[str, Callable[[], object]] = {
            name: getattr(one, step) for name, one in self.contenders.items() if name not in left_out
        }
        limit, done = products()
        seconds = interleave({**runs, LIMIT: limit}, rounds)
        return {
            **self._head(measure, self.work.batch, self.work.tokens),
            "needed_multiply_adds": self.work.tokens
            * multiply_adds(self.work.config, self.work.batch, training=step == "train"),
            "limit": {"multiply_adds": done, "seconds": seconds.pop(LIMIT)},
            "seconds": seconds,
            "skipped": self.skipped if step == "train" else {},
        }

    def _head(self, measure: str, batch: int, tokens: int) -> Entry:
        return {
            "measure": measure,
            "work": self.name,
            "threads": torch.get_num_threads(),
            "batch": batch,
            "tokens": tokens,
        }

    def _say(self, measure: str) -> None:
        say(f"{self.name}, {torch.get_num_threads()} thread(s): {measure}")


def peak_memory(name: str, work: Work, rounds: int, threads: int) -> Entry:
    """Return peak memory of a fresh process over two training steps, and its memory before the model."""
    bytes_: Seconds = {one: [] for one in ALL if ALL[one].precision == "fp32"}
    before: Seconds = {one: [] for one in bytes_}
    for number in range(rounds):
        for one in bytes_:
            say(f"{name}: peak memory, {one}, {number + 1} of {rounds}")
            command = [sys.executable, str(Path(__file__)), name, one, str(threads)]
            result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            bytes_[one].append(result["peak"])
            before[one].append(result["before"])
    head = {"measure": "memory", "work": name, "threads": threads, "batch": work.batch}
    return {**head, "bytes": bytes_, "bytes_before": before}


def main() -> None:
    """Take two training steps of one contender in this process, and print its memory as JSON."""
    work, name, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    before = held(at_most=False)
    step = partial(ALL[name].train, ALL[name](WORKS[work]))
    step()
    step()  # from the second on Adam's own states are there from the beginning
    print(json.dumps({"before": before, "peak": held(at_most=True)}))


if __name__ == "__main__":
    main()
