"""Keys and values of all slots, for lanes of any ages and layers of one layout, a place a lane."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import RelativeAttention, rotated
from ..attention.positions import Positions, RotaryPositions, chunk_positions, compressed_offsets, distance_tables
from ..memory import Memory, SlotLayout, new_groups
from .kv_cache import move
from .layers import PackedModel


class Lane:
    """What one lane remembers, but for its pending states."""

    def __init__(self, memory: Memory, segment_length: int) -> None:
        self.seen = int(memory.seen)
        self.segment_length = segment_length
        self.compressed, self.recent = list(memory.compressed), list(memory.recent)
        self.usage = [self.padded(sums, segment_length - self.begun) for sums in memory.usage]

    @property
    def begun(self) -> int:
        """Tokens of the segment that is not complete."""
        return self.seen % self.segment_length

    @staticmethod
    def padded(sums: Tensor, count: int) -> Tensor:
        """Sums `[1, slot, 1]` with room for `count` more tokens; layers that count nothing have none."""
        return functional.pad(sums, (0, 0, 0, count * bool(sums.shape[1])))


@dataclass(frozen=True, eq=False)
class LaneReach:
    """What one token of each lane reads and writes in one layer; views into buffers."""

    own: tuple[Tensor, Tensor]
    """Lanes, and the slots of their tokens, `[batch]` each."""
    buffer: Tensor
    """Keys, values and, under rotary positions, turned keys `[2 or 3, batch, head, slot, d_head]`."""
    mask: Tensor
    """0 or -inf `[batch, 1, slot]`."""
    rows: tuple[tuple[Tensor, Tensor, slice], ...] = ()
    """Of each region projected distances `[head, d_head, row]`, the row of each slot `[batch, slot]`, and where it
    lies; relative attention only."""
    angles: Tensor | None = None
    """Of the tokens' places `[batch, 1, d_head]`; rotary attention only."""


class LaneSlots:
    """Keys and values of all slots of the layers of one layout, a place a lane."""

    def __init__(self, packed: PackedModel, layout: SlotLayout) -> None:
        self.packed, self.layout = packed, layout
        self.layers = packed.layers_of(layout)
        self.committed = layout.compressed_length + layout.recent_length
        config = packed.config
        self.rotary = config.position == "rotary"
        sizes = (config.n_heads, self.committed + layout.segment_length, config.d_model // config.n_heads)
        self.buffer = packed.weight.new_zeros(len(self.layers), 3 if self.rotary else 2, 1, *sizes)
        self.mask = packed.weight.new_zeros(1, self.committed)
        self.tables = [] if self.rotary else self._projected()
        if self.rotary:
            self.angles = self._positions(0).queries[0]  # type: ignore[attr-defined]

    def grow(self) -> None:
        """Make room for twice as many lanes."""
        self.buffer = torch.cat([self.buffer, torch.zeros_like(self.buffer)], dim=2)
        self.mask = torch.cat([self.mask, torch.zeros_like(self.mask)])

    def copy(self, source: int, target: int) -> None:
        """Bring a lane to another place."""
        self.buffer[:, :, target] = self.buffer[:, :, source]
        self.mask[target] = self.mask[source]

    def take(self, place: int, lane: Lane, pending: list[Tensor]) -> None:
        """Project all states of a lane; `pending [begun, d_model]` a layer of the layout."""
        for layer, own in zip(self.layers, pending, strict=True):
            states = torch.cat([lane.compressed[layer], lane.recent[layer], own[None]], dim=1)
            self._fill(layer, place, states, 0)
        self._begin(place, lane.seen)

    def commit(self, place: int, lane: Lane) -> None:
        """Follow the commit of a lane: projections move with their slots, only new slots are projected."""
        layout, after = self.layout, torch.tensor([lane.seen])
        length = layout.compressed_length
        new = min(int(new_groups(layout, before=after - layout.segment_length, after=after)), length)
        own = self.buffer[:, :, place]
        move(own, length + layout.segment_length, length, layout.recent_length)
        if new:
            move(own, new, 0, length - new)
            for layer in self.layers:
                self._fill(layer, place, lane.compressed[layer][:, length - new :], length - new)
        self._begin(place, lane.seen)

    def reach(self, seen: Tensor) -> dict[int, LaneReach]:
        """What the next token of each lane reads and writes, by layer; `seen [batch]` are tokens before it."""
        layout, device, batch_size = self.layout, self.buffer.device, len(seen)
        places = layout.pending(seen)
        width = int(places.max()) + 1
        beyond = (torch.arange(width) > places[:, None]).to(device)
        ahead = self.mask.new_zeros(batch_size, width).masked_fill(beyond, float("-inf"))
        mask = torch.cat([self.mask[:batch_size], ahead], dim=1)[:, None]
        own = (torch.arange(batch_size, device=device), (self.committed + places).to(device))
        buffers = self.buffer[:, :, :batch_size, :, : self.committed + width]
        if self.rotary:
            angles = self.angles[places.to(device)][:, None]
            return {
                layer: LaneReach(own, buffer, mask, (), angles)
                for layer, buffer in zip(self.layers, buffers, strict=True)
            }
        index = [torch.arange(layout.recent_length + width) + (layout.segment_length - 1 - places)[:, None]]
        regions = [slice(layout.compressed_length, None)]
        if layout.compressed_length:
            regions.append(slice(0, layout.compressed_length))
            offsets, step = compressed_offsets(self.packed.config, layout, seen)
            ages = layout.compressed_length - 1 - torch.arange(layout.compressed_length)
            index.append(offsets[:, None] + step * ages)
        index = [
            rows.clamp(max=table.shape[-1] - 1).to(device)  # what is not yet written stands beyond the last row
            for rows, table in zip(index, self.tables, strict=True)
        ]
        return {
            layer: LaneReach(
                own, buffer, mask, tuple(zip([table[at] for table in self.tables], index, regions, strict=True))
            )
            for at, (layer, buffer) in enumerate(zip(self.layers, buffers, strict=True))
        }

    def _fill(self, layer: int, place: int, states: Tensor, first: int) -> None:
        """Project `states [1, slot, d_model]` of a layer into the slots from `first` on."""
        projected = torch.stack(self.packed.layers[layer].block.attention.keys_values(states))[:, 0].transpose(1, 2)
        self.buffer[self.layers.index(layer), :2, place, :, first : first + states.shape[1]] = projected

    def _begin(self, place: int, seen: int) -> None:
        """Take up the places that slots of a lane have in the segment to which token `seen` belongs."""
        pending = seen % self.layout.segment_length
        positions = self._positions(seen - pending)
        self.mask[place] = positions.mask[0, 0, : self.committed]
        if isinstance(positions, RotaryPositions):
            width = self.committed + pending
            unturned = self.buffer[:, 0, place, :, :width]
            places = unturned.flatten(0, 1)[:, :, None]  # [layer · head, slot, 1, d_head]
            self.buffer[:, 2, place, :, :width] = rotated(places, positions.slots[:, :width]).view(unturned.shape)

    def _positions(self, start: int) -> Positions:
        length = torch.tensor([self.layout.segment_length])
        return chunk_positions(
            self.packed.config,
            self.layout,
            seen=torch.tensor([start]),
            lengths=length,
            chunk=int(length),
            like=self.packed.weight,
        )

    def _projected(self) -> list[Tensor]:
        """Projected distances `[layer, head, d_head, row]`, to recent slots and then to compressed ones."""
        tables: list[list[Tensor]] = []
        for number, distances in enumerate(distance_tables(self.packed.config, self.layout, self.packed.weight)):
            tables.append([])
            for layer in self.layers:
                attention = self.packed.layers[layer].block.attention
                assert isinstance(attention, RelativeAttention)
                own = attention.own_compressed_position and number == 1
                projection = attention.compressed_position if own else attention.position
                heads = projection(distances).unflatten(-1, (attention.n_heads, attention.d_head))
                tables[-1].append(heads.permute(1, 2, 0))
        return [torch.stack(rows).contiguous() for rows in tables]
