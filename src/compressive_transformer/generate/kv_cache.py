"""KV cache of the layers of one layout: keys and values of [compressed | recent | segment], written in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import rotated
from ..attention.positions import Positions, RotaryPositions, chunk_positions, compressed_offsets
from ..memory import LayerMemory, SlotLayout, new_groups
from .layers import CacheView, PackedModel, Region


class KVCache:
    """Keys and values of all slots of the layers of one layout, for lanes of any ages.

    Lanes are addressed by slices of neighbors of one age, so that everything is a view.
    """

    def __init__(self, packed: PackedModel, layout: SlotLayout, lanes: int) -> None:
        """Make room for `lanes` lanes, all slots empty."""
        self.packed, self.layout = packed, layout
        self.layers = packed.layers_of(layout)
        self.committed = layout.compressed_length + layout.recent_length
        config = packed.config
        self.rotary = config.position == "rotary"
        sizes = (config.n_heads, self.committed + layout.segment_length, config.d_model // config.n_heads)
        # Keys and values, then, under rotary positions, keys turned by angles that change with each commit.
        self.buffer = packed.weight.new_zeros(len(self.layers), 3 if self.rotary else 2, lanes, *sizes)
        self.mask = packed.weight.new_zeros(lanes, self.committed)
        if self.rotary:
            self.angles = self._positions(torch.zeros(1, dtype=torch.int64)).queries[0]  # type: ignore[attr-defined]
        else:
            self.tables = packed.distance_tables(layout)
        self._views: dict[tuple[int, ...], list[CacheView]] = {}

    def gather(self, lanes: Tensor) -> None:
        """Bring lanes `[new capacity]` to new places, one after another."""
        buffer, self.mask = self.buffer[:, :, lanes], self.mask[lanes]
        if buffer.shape == self.buffer.shape:
            self.buffer.copy_(buffer)  # in place, where views into it are kept
        else:
            self.buffer, self._views = buffer, {}

    def fill(self, lanes: slice, seen: int, layers: list[LayerMemory]) -> None:
        """Project all states of some lanes of one age; `layers` are those of the whole model, with pending states."""
        pending = seen % self.layout.segment_length
        for layer in self.layers:
            memory = layers[layer]
            states = torch.cat([memory.compressed, memory.recent, memory.pending[:, :pending]], dim=1)
            self._project(layer, lanes, states, 0)
        self._place(lanes, seen)

    def commit(self, lanes: slice, seen: int, layers: list[LayerMemory]) -> None:
        """Follow the commit of some lanes of one age at `seen` tokens: projections move with their slots.

        Only the slots that are new are projected; `layers` is the memory after the commit.
        """
        layout, after = self.layout, torch.tensor([seen])
        length = layout.compressed_length
        new = min(int(new_groups(layout, before=after - layout.segment_length, after=after)), length)
        buffer = self.buffer[:, :, lanes]
        _move(buffer, length + layout.segment_length, length, layout.recent_length)
        if new:
            _move(buffer, new, 0, length - new)
            for layer in self.layers:
                self._project(layer, lanes, layers[layer].compressed[:, length - new :], length - new)
        self._place(lanes, seen)

    def views(self, seen: list[int]) -> list[CacheView]:
        """Return what the next token of each lane reads and writes, a view for each layer of the layout."""
        ages = torch.tensor(seen if len(set(seen)) > 1 else seen[:1])
        places, offsets = self.layout.pending(ages), torch.zeros_like(ages)
        if not self.rotary:
            offsets, _ = compressed_offsets(self.packed.config, self.layout, ages)
        if len(set(zip(places.tolist(), offsets.tolist(), strict=True))) > 1:
            return self._make_views(len(seen), places, offsets)
        # Views of one place are made once: a segment later they hold for the next token there.
        masked = bool(self.mask[: len(seen)].any())
        key = (len(seen), int(places[0]), int(offsets[0]))
        if masked or key not in self._views:
            views = self._make_views(len(seen), places[:1], offsets[:1])
            if masked:
                return views
            self._views[key] = views
        return self._views[key]

    def _make_views(self, batch: int, places: Tensor, offsets: Tensor) -> list[CacheView]:
        """Return a view for each layer; `places` and `offsets [1 or batch]` say where the tokens stand."""
        device, width = self.buffer.device, self.committed + int(places.max()) + 1
        slots = self.committed + places
        written = int(slots) if len(slots) == 1 else slots.to(device)
        regions = [()] * len(self.layers) if self.rotary else self._regions(places, offsets, width)
        angles = self.angles[places.to(device)][:, None] if self.rotary else None
        mask, views = self._mask(batch, places, width), []
        for buffer, own_regions in zip(self.buffer, regions, strict=True):
            buffer = buffer[:, :batch, :, :width]
            keys, values = buffer[2 if self.rotary else 0].flatten(0, 1), buffer[1].flatten(0, 1)
            views.append(CacheView(written, buffer, keys.transpose(1, 2), values, mask, own_regions, angles))
        return views

    def _mask(self, batch: int, places: Tensor, width: int) -> Tensor | None:
        """Return the mask of committed slots and of slots that a lane has not written yet."""
        mask = self.mask[:batch]
        beyond = torch.arange(width - self.committed) > places[:, None]
        if not bool(beyond.any()) and not bool(mask.any()):
            return None
        ahead = mask.new_zeros(beyond.shape).masked_fill(beyond.to(mask.device), float("-inf"))
        return torch.cat([mask, ahead.expand(batch, -1)], dim=1)[:, None]

    def _regions(self, places: Tensor, offsets: Tensor, width: int) -> list[tuple[Region, ...]]:
        """Return the regions of each layer: recent slots and segment, then compressed slots."""
        compressed = self.layout.compressed_length
        spans, found = (slice(compressed, width), slice(0, compressed)), []
        for (rows, bias, first_row), where, slots in zip(self.tables, (places, offsets), spans, strict=False):
            table, first, count, index = rows, first_row(where), slots.stop - slots.start, None
            if len(first) == 1:
                table = table.narrow(-1, int(first), count)
            else:  # slots that are not yet written lie beyond the last row
                index = (first[:, None] + torch.arange(count)).clamp(max=table.shape[-1] - 1).to(table.device)
            found.append([Region(slots, layer_rows, index, bias) for layer_rows in table])
        return list(zip(*found, strict=True))

    def _project(self, layer: int, lanes: slice, states: Tensor, first: int) -> None:
        """Project `states [batch, slot, d_model]` of a layer into the slots from `first` on."""
        attention = self.packed.layers[layer].block.attention
        projected = torch.stack(attention.keys_values(states)).transpose(2, 3)  # [2, batch, head, slot, d_head]
        self.buffer[self.layers.index(layer), :2, lanes, :, first : first + states.shape[1]] = projected

    def _place(self, lanes: slice, seen: int) -> None:
        """Set mask and turned keys to the segment to which token `seen` of the document belongs."""
        pending = seen % self.layout.segment_length
        positions = self._positions(torch.tensor([seen - pending]))
        self.mask[lanes] = positions.mask[0, 0, : self.committed]
        if isinstance(positions, RotaryPositions):
            width = self.committed + pending
            keys = self.buffer[:, 0, lanes, :, :width]
            turned = rotated(keys.flatten(0, 2)[:, :, None], positions.slots[:, :width])  # heads among the lanes
            self.buffer[:, 2, lanes, :, :width] = turned.view(keys.shape)

    def _positions(self, start: Tensor) -> Positions:
        """Return the positions of a whole segment that begins at `start [1]`; of one token where that is enough."""
        chunk = self.layout.segment_length if self.rotary else 1
        return chunk_positions(
            self.packed.config,
            self.layout,
            seen=start,
            lengths=torch.tensor([chunk]),
            chunk=chunk,
            like=self.packed.weight,
        )


def _move(buffer: Tensor, source: int, target: int, count: int) -> None:
    """Copy `count` slots of `buffer [..., slot, d_head]` to a place further left; the two may overlap."""
    moved = buffer[..., source : source + count, :]
    buffer[..., target : target + count, :] = moved.clone() if source < target + count else moved
