"""Where queries and slots stand: which slots may be read, and at which distances.

Slots sit at fixed places relative to the segment, so all this follows from `seen` alone, is the same in all layers
of one layout, and distances stay small however long the stream is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .config import ModelConfig
from .memory import SlotLayout


@dataclass(frozen=True)
class Grid:
    """The distances between queries and one region of slots, as sinusoids.

    Slots of a region are `step` tokens apart. Queries i = step · a + b with one b see them on one grid of
    distances, so that the score of query a and slot s depends on a - s only: row (queries - 1 - a) + s of
    `rows[b]`. That makes the relative shift a strided view, also for slots that each span c tokens.
    """

    slots: int
    rows: Tensor
    """`[step, 1 or offsets, distances, d_model]`, largest distance first."""
    lanes: Tensor | None
    """Which of the offsets holds for a lane `[batch]`; None where one holds for all."""


@dataclass(frozen=True)
class Positions:
    """What attention needs to know about places, for one chunk of queries."""

    mask: Tensor
    """0 where a query may read a slot, else -inf: `[1 or batch, query, slot]`."""
    grids: tuple[Grid, ...]
    """Compressed slots (where there are any), then recent slots and segment as one region."""
    queries: int
    """Queries, padded to a multiple of the largest step."""


def relative_positions(
    config: ModelConfig, layout: SlotLayout, *, seen: Tensor, lengths: Tensor, chunk: int, like: Tensor
) -> Positions:
    """Places of a chunk of at most one segment, in layers of one layout, read by lanes that have seen `seen [batch]`.

    Lane b reads `lengths[b]` of `chunk` tokens, which complete at most its current segment. Slots are those
    of [compressed | recent | segment], the segment as wide as `SlotLayout.segment_width` says. `like` gives
    dtype and device.
    """
    pending = layout.pending(seen)
    width = layout.segment_width(before=seen, after=seen + lengths)
    span = config.compressed_position == "span"
    # Fewer queries than the step: each has a grid of its own and none needs padding.
    step = min(layout.compression_rate, chunk) if span and layout.compressed_length else 1
    queries = -(-chunk // step) * step
    recent_slots = layout.recent_length + width
    grids = [_recent_grid(config, layout, pending, queries, recent_slots, like)]
    if layout.compressed_length:
        offsets = pending + layout.waiting(seen) if span else pending
        grids.insert(0, _compressed_grid(config, layout, offsets, queries, step, like))
    return Positions(_mask(config, layout, seen, queries, width, like), tuple(grids), queries)


def _recent_grid(
    config: ModelConfig, layout: SlotLayout, pending: Tensor, queries: int, slots: int, like: Tensor
) -> Grid:
    # Distance of query i to slot s: recent_length + pending + i - s. Rows go down to distance -1 or below;
    # what the shifted view shows beyond distance 0 lies in the future and is masked.
    reach = layout.recent_length
    offsets, lanes = _distinct(pending)
    rows = reach + int(offsets.max()) + queries + 1
    distances = reach + offsets[:, None] + queries - 1 - torch.arange(rows)
    table = _sinusoids(config.d_model, -1.0, reach + 2 * config.segment_length + 1, like.dtype, like.device)
    index = distances.clamp(-1, table.shape[0] - 2) + 1
    return Grid(slots, table[index.to(like.device)][None], lanes)


def _compressed_grid(
    config: ModelConfig, layout: SlotLayout, offsets: Tensor, queries: int, step: int, like: Tensor
) -> Grid:
    slots = layout.compressed_length
    span = config.compressed_position == "span"
    # Span: with nothing waiting, the newest group ends n_m tokens before the segment; its mean lies
    # (c + 1) / 2 further back than that border. Unit: the newest slot stands right before the segment.
    rate = layout.compression_rate if span else 1
    nearest = layout.memory_length + (rate + 1) / 2 if span else 1.0
    per_step = queries // step
    distinct, lanes = _distinct(offsets)
    further = rate * (per_step + slots - 2 - torch.arange(per_step + slots - 1))
    index = torch.arange(step)[:, None, None] + distinct[:, None] + further  # [step, offsets, distances]
    furthest = 2 * (config.segment_length + rate) + rate * slots
    index = index.clamp(max=furthest - 1)  # only padding beyond a segment stands further away
    table = _sinusoids(config.d_model, nearest, furthest, like.dtype, like.device)
    return Grid(slots, table[index.to(like.device)], lanes)


def _mask(config: ModelConfig, layout: SlotLayout, seen: Tensor, queries: int, width: int, like: Tensor) -> Tensor:
    compressed, recent = layout.filled(seen)
    if config.empty_slots == "zeros":
        compressed = torch.full_like(seen, layout.compressed_length)
        recent = layout.memory_length + layout.waiting(seen)
    state = torch.stack([compressed, recent, layout.pending(seen)], dim=1)  # [batch, 3]
    if bool((state == state[0]).all()):
        state = state[:1]
    filled_compressed, filled_recent, pending = state[:, :, None, None].unbind(1)
    lanes, places = state.shape[0], torch.arange(queries)[:, None]
    readable = torch.cat(
        [
            (_age(layout.compressed_length) < filled_compressed).expand(lanes, queries, -1),
            (_age(layout.recent_length) < filled_recent).expand(lanes, queries, -1),
            torch.arange(width) <= pending + places,
        ],
        dim=2,
    )
    mask = torch.zeros(readable.shape, dtype=like.dtype).masked_fill(~readable, float("-inf"))
    return mask.to(like.device)


def _age(slots: int) -> Tensor:
    return slots - 1 - torch.arange(slots)


def _distinct(offsets: Tensor) -> tuple[Tensor, Tensor | None]:
    distinct, lanes = torch.unique(offsets, return_inverse=True)
    return distinct, (lanes if len(distinct) > 1 else None)


@lru_cache(maxsize=128)  # two tables a layout, and a deep model may have as many layouts as layers
def _sinusoids(d_model: int, first: float, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows [sin(d · w), cos(d · w)] for the distances d = first, first + 1, ... (Dai et al. 2019)."""
    distances = first + torch.arange(count, dtype=torch.float64)
    frequencies = 10_000.0 ** -(torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = distances[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(device, dtype)
