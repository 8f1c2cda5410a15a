"""Speed and memory of this package and of others on the same works.

    make bench          # about twenty minutes on two cores
    make bench-quick    # fewer repetitions of the small work; prints, and writes nothing

Writes performance.json beside this file once everything is measured, then the tables of docs/performance.md and of
the README (page.py). Where PyTorch finds a GPU everything is measured there instead; that goes to performance-gpu.json,
and the tables are printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compressive_transformer.checkpoint import FORMAT, write_json
from growth import axes, decoding_along, grow, stream
from machine import DEVICE, conditions
from measures import Measures, peak_memory
from page import RESULTS, write_pages
from profiling import profile_training
from timing import say
from works import WORKS, table

GPU_RESULTS = RESULTS.with_name("performance-gpu.json")


@dataclass(frozen=True)
class WorkPlan:
    """Repetitions of one work."""

    rounds: dict[int, int]
    """By threads, rounds in which all take their turn."""
    decoded: dict[int, int]
    """By batch, tokens that each decodes at each place in a round."""
    fresh: int
    """Fresh processes of each whose peak memory is measured."""


@dataclass(frozen=True)
class Plan:
    """Extent of a run."""

    works: dict[str, WorkPlan]
    growth_rounds: int
    stream_tokens: int


SMALL = WorkPlan(rounds={1: 3, 2: 3}, decoded={1: 4, 8: 2}, fresh=1)
LARGE = WorkPlan(rounds={1: 1, 2: 3}, decoded={1: 1}, fresh=1)
FULL = Plan({"S": SMALL, "L": LARGE}, growth_rounds=3, stream_tokens=1_000_000)
QUICK = Plan({"S": WorkPlan({2: 2}, {1: 2}, fresh=1)}, growth_rounds=2, stream_tokens=20_000)


def measure(plan: Plan, *, quick: bool) -> dict[str, Any]:
    """Return all results for JSON."""
    began = time.monotonic()
    most = max(threads for work in plan.works.values() for threads in work.rounds)
    torch.set_num_threads(most)
    entries = [entry for name, work in plan.works.items() for entry in _entries(name, work, most)]
    grown = [grow(axis, plan.growth_rounds) for axis in axes(quick)]
    read = stream(plan.stream_tokens)
    along = decoding_along((0, plan.stream_tokens), plan.growth_rounds)
    say("profile")
    profile = profile_training()
    say("done")
    return {
        "format": FORMAT,
        "quick": quick,
        "made": conditions(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "works": {name: table(WORKS[name]) for name in plan.works},
        "entries": entries,
        "growth": grown,
        "stream": read,
        "decoding_along": along,
        "profile": profile,
    }


def _entries(name: str, plan: WorkPlan, most: int) -> Iterator[dict[str, Any]]:
    measures = Measures(name, WORKS[name])
    for threads, rounds in plan.rounds.items():
        if DEVICE.type == "cuda" and threads < most:
            continue  # what is measured there does not run in threads
        torch.set_num_threads(threads)
        yield measures.training(rounds)
        yield measures.scoring(rounds)
        for batch, tokens in plan.decoded.items():
            yield measures.decoding(rounds, batch, tokens)
    torch.set_num_threads(most)
    del measures  # other processes need the room
    yield peak_memory(name, WORKS[name], plan.fresh, most)


def main() -> None:
    """Measure, then write the JSON and the pages; a quick run prints the page instead."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="work S only, few repetitions; the page goes to stdout")
    parser.add_argument("--out", type=Path, help="the JSON to write; none if --quick")
    given = parser.parse_args()
    results = measure(QUICK if given.quick else FULL, quick=given.quick)
    on_gpu = DEVICE.type == "cuda"
    if out := given.out or (None if given.quick else GPU_RESULTS if on_gpu else RESULTS):
        write_json(out, results)
    write_pages(results, to_stdout=given.quick or on_gpu)


if __name__ == "__main__":
    main()
