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
        self.scores = self.buffer.new_zeros(lanes * sizes[0] * sizes[1])
        self.queries = self.buffer.new_zeros(len(packed.layers[self.layers[0]].biases), lanes, sizes[0], sizes[2])
        if self.rotary:
            self.angles = self._positions(torch.zeros(1, dtype=torch.int64)).queries[0]  # type: ignore[attr-defined]
        else:
            self.tables = packed.distance_tables(layout)
        self.waiting, self.filled = [0] * lanes, [False] * lanes
        self._views: dict[tuple[int, ...], list[CacheView]] = {}

    def gather(self, lanes: Tensor) -> None:
        """Bring lanes `[new capacity]` to new places, one after another."""
        buffer, mask = self.buffer[:, :, lanes], self.mask[lanes]
        if buffer.shape == self.buffer.shape:
            self.buffer.copy_(buffer)  # in place, where views into it are kept
            self.mask.copy_(mask)
        else:
            self.buffer, self.mask, self._views = buffer, mask, {}
            self.scores = self.scores.new_zeros(buffer[0, 0, ..., 0].numel())
            self.queries = self.queries[:, lanes]
        order = lanes.tolist()
        self.waiting, self.filled = [self.waiting[lane] for lane in order], [self.filled[lane] for lane in order]

    def copy(self, source: int, target: int) -> None:
        """Copy one lane to another place."""
        self.buffer[:, :, target], self.mask[target] = self.buffer[:, :, source], self.mask[source]
        self.waiting[target], self.filled[target] = self.waiting[source], self.filled[source]

    def fill(self, lanes: slice, seen: int, layers: list[LayerMemory]) -> None:
        """Project all states of some lanes of one age; `layers` are those of the whole model, with pending states."""
        pending = seen % self.layout.segment_length
        for layer in self.layers:
            memory = layers[layer]
            states = torch.cat([memory.compressed, memory.recent, memory.pending[:, :pending]], dim=1)
            self._project(layer, lanes, states, 0)
        # A weight of 0 does not hide a NaN that an earlier lane left here.
        self.buffer[:, :, lanes, :, self.committed + pending :] = 0
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
        places = [age % self.layout.segment_length for age in seen]
        if len(set(zip(places, self.waiting, strict=False))) > 1:
            return self._make_views(torch.tensor(seen), len(seen))
        # A segment later the views of one place hold for the next token there.
        key = (len(seen), places[0], self.waiting[0], all(self.filled[: len(seen)]))
        if key not in self._views:
            self._views[key] = self._make_views(torch.tensor(seen[:1]), len(seen))
        return self._views[key]

    def _make_views(self, seen: Tensor, batch: int) -> list[CacheView]:
        """Return a view for each layer; `seen [1 or batch]` says where the tokens stand."""
        places, device = self.layout.pending(seen), self.buffer.device
        width = self.committed + int(places.max()) + 1
        slot = (self.committed + places).to(device) if len(places) > 1 else None
        scores = self.scores[: batch * self.buffer.shape[3] * width].view(batch, -1, width)
        queries = self.queries[:, :batch]
        regions = [()] * len(self.layers) if self.rotary else self._regions(seen, queries, scores.transpose(0, 1))
        angles = self.angles[places.to(device)][:, None] if self.rotary else None
        mask, views = self._mask(batch, places, width), []
        for buffer, layer_regions in zip(self.buffer[:, :, :batch, :, :width], regions, strict=True):
            keys, values = buffer[2 if self.rotary else 0].flatten(0, 1).transpose(1, 2), buffer[1].flatten(0, 1)
            room = queries, queries[0].view(-1, 1, queries.shape[3]), scores.view(-1, 1, width)
            views.append(CacheView(slot, buffer, keys, values, *room, mask, layer_regions, angles))
        return views

    def _mask(self, batch: int, places: Tensor, width: int) -> Tensor | None:
        """Return the mask of committed slots, and where lanes differ of slots that a lane has not written yet."""
        if len(places) == 1:  # a view, which later commits update
            return None if all(self.filled[:batch]) else self.mask[:batch, None]
        mask, beyond = self.mask[:batch], torch.arange(width - self.committed) > places[:, None]
        ahead = mask.new_zeros(beyond.shape).masked_fill(beyond.to(mask.device), float("-inf"))
        return torch.cat([mask, ahead.expand(batch, -1)], dim=1)[:, None]

    def _regions(self, seen: Tensor, queries: Tensor, scores: Tensor) -> list[tuple[Region, ...]]:
        """Return the regions of each layer, recent slots and segment first, with their queries and scores."""
        offsets, _ = compressed_offsets(self.packed.config, self.layout, seen)
        recent = scores[:, :, self.layout.compressed_length :]
        parts = (self.layout.pending(seen), recent), (offsets, scores[:, :, : self.layout.compressed_length])
        regions = []
        for (rows, bias, first_row), (where, room) in zip(self.tables, parts, strict=False):
            first, count, index = first_row(where), room.shape[2], None
            if len(first) == 1:
                rows = rows.narrow(-1, int(first), count)
            else:  # slots that are not yet written lie beyond the last row
                index = (first[:, None] + torch.arange(count)).clamp(max=rows.shape[-1] - 1)
                index = index.to(rows.device).expand(len(room), -1, -1)
            biased = queries[bias].transpose(0, 1)
            regions.append([Region(layer_rows, index, biased, room) for layer_rows in rows])
        return list(zip(*regions, strict=True))

    def _project(self, layer: int, lanes: slice, states: Tensor, first: int) -> None:
        """Project `states [batch, slot, d_model]` of a layer into the slots from `first` on."""
        attention = self.packed.layers[layer].block.attention
        projected = torch.stack(attention.keys_values(states)).transpose(2, 3)  # [2, batch, head, slot, d_head]
        self.buffer[self.layers.index(layer), :2, lanes, :, first : first + states.shape[1]] = projected

    def _place(self, lanes: slice, seen: int) -> None:
        """Set mask and turned keys to the segment to which token `seen` of the document belongs."""
        pending = seen % self.layout.segment_length
        start = torch.tensor([seen - pending])
        positions, count = self._positions(start), lanes.stop - lanes.start
        mask = positions.mask[0, 0, : self.committed]
        self.mask[lanes] = mask
        self.waiting[lanes], self.filled[lanes] = [int(self.layout.waiting(start))] * count, [not mask.any()] * count
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
