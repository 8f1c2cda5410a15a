"""Attention while a model reads: summed by the age of slots, and slot by slot for single tokens.

It is observed by hooks, which cost nothing when they are not set. A text that is being read is one lane.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...memory import Memory, SlotLayout
from ...model import CompressiveTransformer

Tier = Literal["compressed", "recent", "segment"]
AGES = 6
"""Buckets of each tier, as in Figure 2 of the paper."""
SLOTS_KEPT = 8
"""Slots of each tier, those with most attention, that are kept of a token."""


class AgeBucket(NamedTuple):
    """Neighboring slots of one tier, and the age of their tokens."""

    tier: Tier
    first: int
    """Oldest slot, counted from the oldest of its tier."""
    stop: int
    """The slot after the newest."""
    label: str
    """Tokens that the slots stand for, counted from the beginning of the segment that reads them."""


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer by age, a mean over all tokens."""

    buckets: tuple[AgeBucket, ...]
    """Oldest first: at most six of compressed memory, six of recent memory, six of the segment."""
    heads: tuple[tuple[float, ...], ...]
    """Share of each bucket for each head; the shares of a head add up to 1."""


class Slot(NamedTuple):
    """Slot that a token reads, and the tokens that it stands for."""

    tier: Tier
    place: int
    """Counted from the oldest slot of its tier; of the segment, from its first token."""
    weight: float
    """Share of the attention, in [0, 1]."""
    first: int
    """First token that it stands for; -1 is the start, before the text."""
    stop: int
    """Token after the last; `first` for an empty slot."""


class HeadRead(NamedTuple):
    """Attention of a token in one head, or on average over the heads of a layer."""

    compressed: float
    """Share of all compressed memory."""
    recent: float
    segment: float
    slots: tuple[Slot, ...]
    """Slots with most attention, at most eight of each tier, compressed memory first, most attention first."""


class LayerRead(NamedTuple):
    """Attention of a token in one layer."""

    mean: HeadRead
    heads: tuple[HeadRead, ...]


@dataclass(frozen=True)
class TokenAttention:
    """Attention that predicts one token: the query is that of the token before it."""

    token: int
    """Place in the text, from 0."""
    layers: tuple[LayerRead, ...]


OnLayerWeights = Callable[[int, Tensor], None]


@contextlib.contextmanager
def observed_attention(model: CompressiveTransformer, callback: OnLayerWeights) -> Iterator[None]:
    """Call `callback(layer, weights [batch, query, slot])` for each head that reads inside the `with` block.

    Slots are [compressed | recent | segment].
    """

    def watch(layer: int) -> Callable[..., Any]:
        def reading(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            projected, positions, *rest = arguments
            first = next(iter(rest), None)  # usage observes too
            queries = projected.queries.shape[1]

            def on_weights(weights: Tensor) -> None:
                if first is not None:
                    first(weights)
                callback(layer, weights[:, :queries])  # the rest is padding

            return projected, positions, on_weights

        return reading

    blocks: Any = model.blocks
    handles = [block.attention.register_forward_pre_hook(watch(layer)) for layer, block in enumerate(blocks)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class AttentionByAge:
    """Sums of the attention of each head over all tokens, slot by slot; their size does not grow with the text."""

    def __init__(self, model: CompressiveTransformer) -> None:
        self._layouts, heads = model.layouts, model.config.n_heads
        sizes = [tuple(map(_width, tiers_of(layout))) for layout in self._layouts]
        self._sums = [torch.zeros(heads, sum(widths), dtype=torch.float64) for widths in sizes]
        self._calls = [0] * len(sizes)

    def add(self, layer: int, weights: Tensor) -> None:
        """Add one head's `weights [1, query, slot]`; heads come in order, as from `observed_attention`."""
        sums, head = self._sums[layer], self._calls[layer] % len(self._sums[layer])
        sums[head, : weights.shape[2]] += weights[0].sum(0, dtype=torch.float64).cpu()
        self._calls[layer] += 1

    def layers(self, tokens: int) -> tuple[LayerAttention, ...]:
        """Return the means over `tokens`, the number of tokens read."""
        return tuple(self._layer(*pair, tokens) for pair in zip(self._layouts, self._sums, strict=True))

    def _layer(self, layout: SlotLayout, sums: Tensor, tokens: int) -> LayerAttention:
        buckets, begins, begin = age_buckets(layout), {}, 0
        for tier, length in tiers_of(layout):
            begins[tier] = begin
            begin += length
        places = [slice(begins[bucket.tier] + bucket.first, begins[bucket.tier] + bucket.stop) for bucket in buckets]
        shares = torch.stack([sums[:, place].sum(1) for place in places], dim=1) / tokens
        return LayerAttention(buckets, tuple(map(tuple, shares.tolist())))


def tiers_of(layout: SlotLayout) -> tuple[tuple[Tier, int], ...]:
    """Return the tiers in the order of attention, with their numbers of slots."""
    lengths = (layout.compressed_length, layout.recent_length, layout.segment_length)
    return ("compressed", lengths[0]), ("recent", lengths[1]), ("segment", lengths[2])


def _width(tier: tuple[Tier, int]) -> int:
    return tier[1]


def age_buckets(layout: SlotLayout) -> tuple[AgeBucket, ...]:
    """Return the buckets of a layer, oldest first: six equal parts of each tier, or as many as it has slots."""
    buckets = []
    for tier, length in tiers_of(layout):
        count = min(AGES, length)
        borders = [length * part // count for part in range(count + 1)] if count else []
        for first, stop in pairwise(borders):
            buckets.append(AgeBucket(tier, first, stop, _label(layout, tier, first, stop)))
    return tuple(buckets)


def _label(layout: SlotLayout, tier: Tier, first: int, stop: int) -> str:
    if tier == "segment":
        return f"token {_range(first + 1, stop)} of the segment"
    if tier == "recent":
        return f"{_range(layout.recent_length - stop + 1, layout.recent_length - first)} tokens before"
    # With nothing waiting; where r states wait, the groups stand r further back.
    rate, slots, begin = layout.compression_rate, layout.compressed_length, layout.memory_length
    return f"{_range(begin + rate * (slots - stop) + 1, begin + rate * (slots - first))} tokens before"


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


Kept = Mapping[int, Sequence[int]]
"""Token of each filled slot of compressed memory, oldest first, by layer whose function selects states; as the model
counts: the start is 0."""


@torch.no_grad()
def attention_of_tokens(
    model: CompressiveTransformer, memory: Memory, tokens: Tensor, places: Sequence[int], kept: Kept
) -> list[TokenAttention]:
    """Return the attention of the queries at `places` of the segment `tokens [segment]`, given the memory before it.

    Only the slots with most attention are kept. Token k of the text is at place k + 1 of the model's input, and the
    query at place k predicts it.
    """
    observed: dict[int, list[Tensor]] = {layer: [] for layer in range(model.config.n_layers)}
    with observed_attention(model, lambda layer, weights: observed[layer].append(weights[0, places].double().cpu())):
        model(tokens[None].to(model.embedding.weight.device), memory)
    seen = int(memory.seen)
    layers = []  # for each layer, one `LayerRead` a place
    for layer, layout in enumerate(model.layouts):
        spans = _spans(layout, seen, len(tokens), kept.get(layer))
        heads = torch.stack(observed[layer])  # [head, place, slot]
        layers.append([_layer_read(heads[:, row], layout, spans) for row in range(len(places))])
    return [TokenAttention(seen + place, tuple(reads[row] for reads in layers)) for row, place in enumerate(places)]


def _spans(layout: SlotLayout, seen: int, length: int, kept: Sequence[int] | None) -> list[range]:
    """Return the tokens that each slot of [compressed | recent | segment] stands for, as the model counts."""
    compressed, recent = layout.slot_spans(seen)
    if kept is not None:
        empty = layout.compressed_length - len(kept)
        compressed = [range(0)] * empty + [range(token, token + 1) for token in kept]
    return [*compressed, *recent, *(range(seen + place, seen + place + 1) for place in range(length))]


def _layer_read(weights: Tensor, layout: SlotLayout, spans: Sequence[range]) -> LayerRead:
    """Return the attention of one token from its `weights [head, slot]`."""
    heads = [_head_read(row, layout, spans) for row in weights]
    return LayerRead(_head_read(weights.mean(0), layout, spans), tuple(heads))


def _head_read(weights: Tensor, layout: SlotLayout, spans: Sequence[range]) -> HeadRead:
    shares, slots, begin = [], [], 0
    for tier, length in tiers_of(layout):
        tier_weights = weights[begin : begin + length]
        shares.append(float(tier_weights.sum()))
        best = tier_weights.topk(min(SLOTS_KEPT, len(tier_weights)))
        for weight, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if weight > 0:
                span = spans[begin + place]
                slots.append(Slot(tier, place, weight, span.start - 1, span.stop - 1))
        begin += length
    return HeadRead(shares[0], shares[1], shares[2], tuple(slots))
