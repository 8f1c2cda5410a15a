"""Scaling of cost with the sizes of our model, beside the count of operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from compressive_transformer import CompressiveTransformer
from contenders import Ours
from machine import DEVICE, held
from timing import Decoding, interleave, say
from works import WORKS, Work, full_memory, multiply_adds, segments

BASE = replace(WORKS["S"], n_layers=2, batch=1)
STREAM = replace(WORKS["S"], n_layers=2, d_model=64, n_heads=2, batch=1)


@dataclass(frozen=True)
class Axis:
    """One size that grows while the others are fixed."""

    title: str
    works: dict[int, Work]


def axes(quick: bool) -> list[Axis]:
    """Return the works to measure; memory grows in both tiers, as 2 to 1."""
    batches, depths = ((1, 4), (1, 4)) if quick else ((1, 2, 4, 8), (1, 2, 4, 8))
    lengths, slots = ((64, 256), (96, 384)) if quick else ((64, 128, 256, 512, 1024), (96, 192, 384, 768, 1536, 3072))
    return [
        Axis("n_s", {n: replace(BASE, segment_length=n) for n in lengths}),
        Axis("n_m + n_cm", {n: replace(BASE, memory_length=2 * n // 3, compressed_length=n // 3) for n in slots}),
        Axis("depth", {n: replace(BASE, n_layers=n) for n in depths}),
        Axis("batch", {n: replace(BASE, batch=n) for n in batches}),
    ]


def grow(axis: Axis, rounds: int) -> dict[str, Any]:
    """Return seconds of training and scoring per token at each size, and the counted multiply-adds."""
    say(f"growth over {axis.title}")
    contenders = {str(size): Ours(work) for size, work in axis.works.items()}
    seconds = {}
    for measure, step in (("training", "train"), ("scoring", "score")):
        interleave({size: getattr(one, step) for size, one in contenders.items()}, 1)  # warms up
        taken = interleave({size: getattr(one, step) for size, one in contenders.items()}, rounds)
        seconds[measure] = {
            size: [each / contenders[size].work.tokens for each in values] for size, values in taken.items()
        }
    counted = {
        measure: {
            str(size): multiply_adds(work.config, work.batch, training=measure == "training")
            for size, work in axis.works.items()
        }
        for measure in seconds
    }
    return {
        "axis": axis.title,
        "threads": torch.get_num_threads(),
        "seconds_a_token": seconds,
        "multiply_adds_a_token": counted,
    }


@torch.no_grad()
def stream(tokens: int, parts: int = 5) -> dict[str, Any]:
    """Score one long text; return seconds per segment and memory of the process along it."""
    say(f"a stream of {tokens:,} tokens")
    length, model = STREAM.segment_length, CompressiveTransformer(STREAM.config).to(DEVICE).eval()
    memory, total = model.empty_memory(1), tokens // length
    wanted = {round(10 ** (exponent / 2)) for exponent in range(2, 20)}
    marks = [mark for mark in sorted(wanted) if mark + parts < total] + [total - parts]
    text, rows, at = segments(1, length), [], 0

    def read(pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        nonlocal memory
        for piece, _ in pieces:
            memory = model(piece.to(DEVICE), memory).memory

    for mark in marks:
        read(islice(text, mark - at))
        taken = interleave({"": lambda: read(islice(text, 1))}, parts)[""]
        at = mark + parts
        rows.append({"tokens": mark * length, "seconds": taken, "resident_bytes": held(at_most=False)})
        say(f"  {mark * length:,} tokens")
    return {"work": str(STREAM), "threads": torch.get_num_threads(), "rows": rows, "tokens": at * length}


def decoding_along(counts: Iterable[int], rounds: int) -> dict[str, Any]:
    """Return seconds of decoding a token of S at positions along a stream."""
    say("decoding early and late in the stream")
    contenders = {}
    for count in counts:
        contender = Ours(WORKS["S"])
        full, length = full_memory(contender.model, 1), contender.work.segment_length
        seen = max(int(full.seen), count // length * length)
        later = replace(full, seen=torch.tensor([seen]))
        contender.full_memory = lambda batch, later=later: later  # type: ignore[method-assign]
        contenders[seen] = Decoding(contender.decoder, 1, length=length, tokens=4)
    interleave({str(seen): one.run for seen, one in contenders.items()}, rounds)
    seconds = {str(seen): one.ordinary for seen, one in contenders.items()}
    return {"threads": torch.get_num_threads(), "seconds": seconds}
