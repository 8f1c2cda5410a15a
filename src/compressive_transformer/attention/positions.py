"""Positions of queries and slots: distances for relative attention, angles for rotary attention.

Slots sit at fixed places relative to the segment, so all this follows from `seen` alone, is the same in all layers
of one layout, and distances stay small however long the stream is. `docs/positions.svg` draws it; the function
`plain_scores` in `relative.py` is the same in loops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..memory import SlotLayout
from .masks import slot_mask

CPU = torch.device("cpu")


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
    """Number of the offset of each lane `[batch]`; None if all lanes share one."""
    table: Tensor
    """Sinusoids of all distances at which a segment may see the region `[distance, d_model]`."""
    index: Tensor
    """Rows of the table in `rows`, `[step, 1 or offsets, distances]`."""

    @classmethod
    def of(cls, slots: int, table: Tensor, index: Tensor, lanes: Tensor | None) -> Grid:
        """Return the grid whose rows are those of `index` in `table`."""
        index = index.to(table.device)
        return cls(slots, table[index], lanes, table, index)


class PositionCache:
    """Projections of sinusoids that are kept from call to call while weights stay the same.

    Relative attention projects the sinusoids of all distances that occur in a call, which gives the same numbers each
    time. Create a new cache whenever the weights change.
    """

    def __init__(self) -> None:
        self._projected: dict[tuple[nn.Module, Tensor, bool], Tensor] = {}

    def projected(self, projection: nn.Module, grid: Grid) -> Tensor:
        """Return `projection(grid.rows)`, projecting all distances of the region the first time."""
        device = grid.table.device.type
        rounded = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        key = (projection, grid.table, rounded)
        if key not in self._projected:
            self._projected[key] = projection(grid.table)
        return self._projected[key][grid.index]


@dataclass(frozen=True)
class Positions:
    """Mask of one chunk of queries; subclasses add how far slots are."""

    mask: Tensor
    """0 where a query may read a slot, else -inf: `[1 or batch, query, slot]`."""


@dataclass(frozen=True)
class RelativePositions(Positions):
    """Distances between queries and slots."""

    grids: tuple[Grid, ...]
    """Compressed slots (where there are any), then recent slots and segment as one region."""
    queries: int
    """Queries, padded to a multiple of the largest step."""
    cache: PositionCache | None = None

    def projected(self, projection: nn.Module, grid: Grid) -> Tensor:
        """Return `projection(grid.rows)`, from the cache where there is one."""
        if self.cache is not None:
            return self.cache.projected(projection, grid)
        rows: Tensor = projection(grid.rows)
        return rows


@dataclass(frozen=True)
class RotaryPositions(Positions):
    """Angles of queries and slots, those of the segment's first token being 0.

    One angle a pair of numbers of a head: all sines, then all cosines, in single precision at least.
    """

    queries: Tensor
    """`[1 or batch, query, d_head]`."""
    slots: Tensor
    """`[1 or batch, slot, d_head]`."""


def chunk_positions(
    config: ModelConfig,
    layout: SlotLayout,
    *,
    seen: Tensor,
    lengths: Tensor,
    chunk: int,
    like: Tensor,
    cache: PositionCache | None = None,
) -> Positions:
    """Return the positions of a chunk of at most one segment, for layers of one layout.

    Lanes have seen `seen [batch]` tokens; lane b reads `lengths[b]` of `chunk` more, which complete at most its
    segment. Slots are [compressed | recent | segment], the segment as wide as `SlotLayout.segment_width` says. `like`
    gives dtype and device; `cache` keeps projections of relative positions.
    """
    if config.position == "rotary":
        return rotary_positions(config, layout, seen=seen, lengths=lengths, chunk=chunk, like=like)
    positions = relative_positions(config, layout, seen=seen, lengths=lengths, chunk=chunk, like=like)
    return replace(positions, cache=cache)


def relative_positions(
    config: ModelConfig, layout: SlotLayout, *, seen: Tensor, lengths: Tensor, chunk: int, like: Tensor
) -> RelativePositions:
    """Return positions for `RelativeAttention`; the arguments are those of `chunk_positions`."""
    pending = layout.pending(seen)
    width = layout.segment_width(before=seen, after=seen + lengths)
    span = config.compressed_position == "span"
    # Fewer queries than the step: each has a grid of its own and none needs padding.
    step = min(layout.compression_rate, chunk) if span and layout.compressed_length else 1
    queries = -(-chunk // step) * step
    recent_slots = layout.recent_length + width
    grids = [_recent_grid(config, layout, pending, queries, recent_slots, like)]
    if layout.compressed_length:
        grids.insert(0, _compressed_grid(config, layout, seen, queries, step, like))
    return RelativePositions(slot_mask(config, layout, seen, queries, width, like), tuple(grids), queries)


def distance_tables(config: ModelConfig, layout: SlotLayout, like: Tensor) -> tuple[Tensor, ...]:
    """Return the sinusoids of all distances from tokens of a segment to recent slots, then to compressed slots.

    The token at place p of its segment sees recent slot s, those of the segment being the last ones, as row
    s + segment_length - 1 - p of the first `[recent + segment_length, d_model]`, and compressed slot s as row
    o + step · (compressed_length - 1 - s) of the second; o and step are those of `compressed_offsets`.
    """
    reach = layout.recent_length
    recent = _recent_table(config, layout, like)[1 : 1 + reach + layout.segment_length].flip(0)
    return (recent, _compressed_table(config, layout, like)) if layout.compressed_length else (recent,)


def compressed_offsets(config: ModelConfig, layout: SlotLayout, seen: Tensor) -> tuple[Tensor, int]:
    """Return distances to compressed slots beyond those from a segment's start `[batch]`, and the step of slots."""
    pending = layout.pending(seen)
    if config.compressed_position == "unit":
        return pending, 1
    return pending + layout.waiting(seen), layout.compression_rate


def rotary_positions(
    config: ModelConfig, layout: SlotLayout, *, seen: Tensor, lengths: Tensor, chunk: int, like: Tensor
) -> RotaryPositions:
    """Return positions for `RotaryAttention`; the arguments are those of `chunk_positions`."""
    width = layout.segment_width(before=seen, after=seen + lengths)
    # From the oldest recent slot to the end of the segment; padding beyond a segment stands at its last token.
    table = _angles(config, -layout.recent_length, layout.recent_length + layout.segment_length, like)
    places = (_common(layout.pending(seen))[:, None] + torch.arange(chunk)).clamp(max=layout.segment_length - 1)
    slots = [table[None, : layout.recent_length + width]]
    if layout.compressed_length:
        slots.insert(0, _compressed_angles(config, layout, _common(layout.waiting(seen)), like))
    lanes = slots[0].shape[0]
    return RotaryPositions(
        mask=slot_mask(config, layout, seen, chunk, width, like),
        queries=table[(layout.recent_length + places).to(like.device)],
        slots=torch.cat([part.expand(lanes, -1, -1) for part in slots], dim=1),
    )


def _compressed_angles(config: ModelConfig, layout: SlotLayout, waiting: Tensor, like: Tensor) -> Tensor:
    """Return the angles of compressed slots `[1 or batch, slot, d_head]`; `waiting [1 or batch]` states wait."""
    # Both numberings begin where recent memory ends, n_m + r states before the segment, so that no two states
    # stand at one place and no place is left out. Span: steps of c, each slot at the mean of its c tokens.
    # Unit: steps of one, as if the slots were tokens themselves.
    rate = layout.compression_rate if config.compressed_position == "span" else 1
    steps = rate * (layout.compressed_length - 1)
    oldest = layout.memory_length + layout.waiting_length + (rate + 1) / 2 + steps
    table = _angles(config, -oldest, layout.waiting_length + steps + 1, like)
    places = layout.waiting_length - waiting[:, None] + rate * torch.arange(layout.compressed_length)
    return table[places.to(like.device)]


def _angles(config: ModelConfig, first: float, count: int, like: Tensor) -> Tensor:
    precise = torch.promote_types(like.dtype, torch.float32)
    return sinusoids(config.d_model // config.n_heads, first, count, precise, like.device)


def _recent_grid(
    config: ModelConfig, layout: SlotLayout, pending: Tensor, queries: int, slots: int, like: Tensor
) -> Grid:
    # Distance of query i to slot s: recent_length + pending + i - s. Rows go down to distance -1 or below;
    # what the shifted view shows beyond distance 0 lies in the future and is masked.
    reach = layout.recent_length
    offsets, lanes = _distinct(pending)
    rows = reach + int(offsets.max()) + queries + 1
    distances = reach + offsets[:, None] + queries - 1 - torch.arange(rows)
    table = _recent_table(config, layout, like)
    index = distances.clamp(-1, table.shape[0] - 2) + 1
    return Grid.of(slots, table, index[None], lanes)


def _compressed_grid(
    config: ModelConfig, layout: SlotLayout, seen: Tensor, queries: int, step: int, like: Tensor
) -> Grid:
    slots, per_step = layout.compressed_length, queries // step
    offsets, rate = compressed_offsets(config, layout, seen)
    distinct, lanes = _distinct(offsets)
    beyond = rate * (per_step + slots - 2 - torch.arange(per_step + slots - 1))
    index = torch.arange(step)[:, None, None] + distinct[:, None] + beyond  # [step, offsets, distances]
    table = _compressed_table(config, layout, like)
    index = index.clamp(max=len(table) - 1)  # only padding beyond a segment stands further away
    return Grid.of(slots, table, index, lanes)


def _recent_table(config: ModelConfig, layout: SlotLayout, like: Tensor) -> Tensor:
    """Return sinusoids of the distances -1, 0, 1, ... to recent slots and the segment."""
    count = layout.recent_length + 2 * config.segment_length + 1
    return sinusoids(config.d_model, -1.0, count, like.dtype, like.device)


def _compressed_table(config: ModelConfig, layout: SlotLayout, like: Tensor) -> Tensor:
    """Return sinusoids of distances to compressed slots, the nearest that a segment's first token sees first."""
    # Span: with nothing waiting, the newest group ends n_m tokens before the segment; its mean lies
    # (c + 1) / 2 further back than that border. Unit: the newest slot stands right before the segment.
    span = config.compressed_position == "span"
    rate = layout.compression_rate if span else 1
    nearest = layout.memory_length + (rate + 1) / 2 if span else 1.0
    furthest = 2 * (config.segment_length + rate) + rate * layout.compressed_length
    return sinusoids(config.d_model, nearest, furthest, like.dtype, like.device)


def _common(counts: Tensor) -> Tensor:
    """Return one number instead of `counts [batch]` where all lanes have the same."""
    return counts[:1] if bool((counts == counts[0]).all()) else counts


def _distinct(offsets: Tensor) -> tuple[Tensor, Tensor | None]:
    distinct, lanes = torch.unique(offsets, return_inverse=True)
    return distinct, (lanes if len(distinct) > 1 else None)


@lru_cache(maxsize=128)  # two tables a layout, and a deep model may have as many layouts as layers
def sinusoids(width: int, first: float, count: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return rows [sin(d · w), cos(d · w)] for the distances or places d = first, first + 1, ... (Dai et al. 2019).

    There are width / 2 frequencies w = 10,000^(-2k / width), in RoFormer's angles as in sinusoids.
    """
    distances = first + torch.arange(count, dtype=torch.float64)
    frequencies = 10_000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = distances[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(device, dtype)
