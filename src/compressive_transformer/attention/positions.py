"""Where queries and slots stand: which slots may be read, and at which distances or places.

Slots sit at fixed places relative to the segment, so all this follows from `seen` alone, is the same in all layers
of one layout, and distances stay small however long the stream is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..memory import SlotLayout


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
    table: Tensor
    """Sinusoids of all distances at which a segment may see the region `[distance, d_model]`."""
    index: Tensor
    """Which of them the rows are `[step, 1 or offsets, distances]`."""

    @classmethod
    def of(cls, slots: int, table: Tensor, index: Tensor, lanes: Tensor | None) -> Grid:
        """The grid whose rows are those of `index` in `table`."""
        index = index.to(table.device)
        return cls(slots, table[index], lanes, table, index)


class PositionCache:
    """Projected distances that are kept from call to call, of models whose weights stay as they are.

    Relative attention projects the sinusoids of all distances that occur in a call. Where the same weights read call
    after call, that gives the same numbers each time: `model(tokens, memory, distances=distances)` takes them from
    here, after the first. When weights change, begin with new ones: these would mix old and new.
    """

    def __init__(self) -> None:
        """Nothing is projected yet."""
        self._kept: dict[tuple[nn.Module, Tensor, bool], Tensor] = {}

    def projected(self, projection: nn.Module, grid: Grid) -> Tensor:
        """`projection(grid.rows)`, all distances of the region being projected once."""
        device = grid.table.device.type
        rounded = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        key = (projection, grid.table, rounded)
        if key not in self._kept:
            self._kept[key] = projection(grid.table)
        return self._kept[key][grid.index]


@dataclass(frozen=True)
class Positions:
    """What attention needs to know about places, for one chunk of queries."""

    mask: Tensor
    """0 where a query may read a slot, else -inf: `[1 or batch, query, slot]`."""


@dataclass(frozen=True)
class RelativePositions(Positions):
    """Places as distances between queries and slots."""

    grids: tuple[Grid, ...]
    """Compressed slots (where there are any), then recent slots and segment as one region."""
    queries: int
    """Queries, padded to a multiple of the largest step."""
    distances: PositionCache | None = None
    """Where projected distances are kept, if they are."""

    def projected(self, projection: nn.Module, grid: Grid) -> Tensor:
        """`projection(grid.rows)`."""
        if self.distances is not None:
            return self.distances.projected(projection, grid)
        rows: Tensor = projection(grid.rows)
        return rows


@dataclass(frozen=True)
class RotaryPositions(Positions):
    """Places as angles, those of the segment's first token being 0.

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
    distances: PositionCache | None = None,
) -> Positions:
    """Places of a chunk of at most one segment, in layers of one layout, read by lanes that have seen `seen [batch]`.

    Lane b reads `lengths[b]` of `chunk` tokens, which complete at most its current segment. Slots are those
    of [compressed | recent | segment], the segment as wide as `SlotLayout.segment_width` says. `like` gives
    dtype and device. The form is the one that the config's `position` names; `distances` are of relative ones only.
    """
    if config.position == "rotary":
        return rotary_positions(config, layout, seen=seen, lengths=lengths, chunk=chunk, like=like)
    positions = relative_positions(config, layout, seen=seen, lengths=lengths, chunk=chunk, like=like)
    return replace(positions, distances=distances)


def relative_positions(
    config: ModelConfig, layout: SlotLayout, *, seen: Tensor, lengths: Tensor, chunk: int, like: Tensor
) -> RelativePositions:
    """Places for `RelativeAttention`; the arguments are those of `chunk_positions`."""
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
    return RelativePositions(_mask(config, layout, seen, queries, width, like), tuple(grids), queries)


def distance_tables(config: ModelConfig, layout: SlotLayout, like: Tensor) -> tuple[Tensor, ...]:
    """Sinusoids of all distances at which tokens of a segment see recent slots, then compressed ones, if there are any.

    The token at place p of its segment sees recent slot s, those of the segment being the last ones, as row
    s + segment_length - 1 - p of the first `[recent + segment_length, d_model]`, and compressed slot s as row
    o + step · (compressed_length - 1 - s) of the second; o and step are those of `compressed_offsets`.
    """
    reach = layout.recent_length
    recent = _recent_table(config, layout, like)[1 : 1 + reach + layout.segment_length].flip(0)
    return (recent, _compressed_table(config, layout, like)) if layout.compressed_length else (recent,)


def compressed_offsets(config: ModelConfig, layout: SlotLayout, seen: Tensor) -> tuple[Tensor, int]:
    """How much further than at a segment's first token compressed slots stand `[batch]`, and from slot to slot."""
    pending = layout.pending(seen)
    if config.compressed_position == "unit":
        return pending, 1
    return pending + layout.waiting(seen), layout.compression_rate


def rotary_positions(
    config: ModelConfig, layout: SlotLayout, *, seen: Tensor, lengths: Tensor, chunk: int, like: Tensor
) -> RotaryPositions:
    """Places for `RotaryAttention`; the arguments are those of `chunk_positions`."""
    width = layout.segment_width(before=seen, after=seen + lengths)
    # From the oldest recent slot to the end of the segment; padding beyond a segment stands at its last token.
    table = _angles(config, -layout.recent_length, layout.recent_length + layout.segment_length, like)
    places = (_common(layout.pending(seen))[:, None] + torch.arange(chunk)).clamp(max=layout.segment_length - 1)
    slots = [table[None, : layout.recent_length + width]]
    if layout.compressed_length:
        slots.insert(0, _compressed_angles(config, layout, _common(layout.waiting(seen)), like))
    lanes = slots[0].shape[0]
    return RotaryPositions(
        mask=_mask(config, layout, seen, chunk, width, like),
        queries=table[(layout.recent_length + places).to(like.device)],
        slots=torch.cat([part.expand(lanes, -1, -1) for part in slots], dim=1),
    )


def _compressed_angles(config: ModelConfig, layout: SlotLayout, waiting: Tensor, like: Tensor) -> Tensor:
    """Angles of compressed slots `[1 or batch, slot, d_head]` in lanes where `waiting [1 or batch]` states wait."""
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
    return _sinusoids(config.d_model // config.n_heads, first, count, precise, like.device)


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
    further = rate * (per_step + slots - 2 - torch.arange(per_step + slots - 1))
    index = torch.arange(step)[:, None, None] + distinct[:, None] + further  # [step, offsets, distances]
    table = _compressed_table(config, layout, like)
    index = index.clamp(max=len(table) - 1)  # only padding beyond a segment stands further away
    return Grid.of(slots, table, index, lanes)


def _recent_table(config: ModelConfig, layout: SlotLayout, like: Tensor) -> Tensor:
    """Sinusoids of the distances -1, 0, 1, ... to recent slots and the segment."""
    count = layout.recent_length + 2 * config.segment_length + 1
    return _sinusoids(config.d_model, -1.0, count, like.dtype, like.device)


def _compressed_table(config: ModelConfig, layout: SlotLayout, like: Tensor) -> Tensor:
    """Sinusoids of the distances to compressed slots, from the nearest on that a segment's first token can see."""
    # Span: with nothing waiting, the newest group ends n_m tokens before the segment; its mean lies
    # (c + 1) / 2 further back than that border. Unit: the newest slot stands right before the segment.
    span = config.compressed_position == "span"
    rate = layout.compression_rate if span else 1
    nearest = layout.memory_length + (rate + 1) / 2 if span else 1.0
    furthest = 2 * (config.segment_length + rate) + rate * layout.compressed_length
    return _sinusoids(config.d_model, nearest, furthest, like.dtype, like.device)


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


def _common(counts: Tensor) -> Tensor:
    """One number instead of `counts [batch]` where all lanes have the same."""
    return counts[:1] if bool((counts == counts[0]).all()) else counts


def _distinct(offsets: Tensor) -> tuple[Tensor, Tensor | None]:
    distinct, lanes = torch.unique(offsets, return_inverse=True)
    return distinct, (lanes if len(distinct) > 1 else None)


@lru_cache(maxsize=128)  # two tables a layout, and a deep model may have as many layouts as layers
def _sinusoids(width: int, first: float, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows [sin(d · w), cos(d · w)] for the distances or places d = first, first + 1, ... (Dai et al. 2019).

    There are width / 2 frequencies w = 10,000^(-2k / width), in RoFormer's angles as in sinusoids.
    """
    distances = first + torch.arange(count, dtype=torch.float64)
    frequencies = 10_000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = distances[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(device, dtype)
