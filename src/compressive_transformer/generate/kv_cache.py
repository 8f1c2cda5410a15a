"""Keys and values of all slots, for lanes of one age and layers of one layout, in buffers of fixed size."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import rotated
from ..attention.positions import RotaryPositions, chunk_positions
from ..memory import SlotLayout, new_groups
from .layers import PackedModel, Reach, Scratch


class Slots:
    """Projected [compressed | recent | segment] of the layers of one layout, written in place."""

    def __init__(self, packed: PackedModel, layout: SlotLayout, batch_size: int) -> None:
        self.packed = packed
        self.layout = layout
        self.layers = packed.layers_of(layout)
        self.committed = layout.compressed_length + layout.recent_length
        config = packed.config
        self.rotary = config.position == "rotary"
        slots, d_head = self.committed + layout.segment_length, config.d_model // config.n_heads
        # Keys and values, then, under rotary positions, keys turned by angles that change with each commit.
        kinds = 3 if self.rotary else 2
        self.buffer = packed.weight.new_zeros(len(self.layers), kinds, config.n_heads, batch_size, slots, d_head)
        self.keys = self.buffer[:, 2 if self.rotary else 0].flatten(1, 2).transpose(2, 3)
        self.values = self.buffer[:, 1].flatten(1, 2)
        # For all scores, and for those of one region: products into a part of the first would go head by head.
        self.room, self.apart = packed.weight.new_zeros(2, config.n_heads * batch_size * slots)
        biases = packed.layers[self.layers[0]].biases
        self.scratch = Scratch(
            packed.weight,
            biases=0 if biases is None else len(biases),
            n_heads=config.n_heads,
            batch_size=batch_size,
            d_head=d_head,
        )
        self.reaches: dict[tuple[int, int], list[Reach]] = {}

    def fill(self, layer: int, states: Tensor, first: int) -> None:
        """Project `states [batch, slot, d_model]` of a layer into the slots from `first` on."""
        attention = self.packed.layers[layer].block.attention
        projected = torch.stack(attention.keys_values(states)).permute(0, 3, 1, 2, 4)  # [2, head, batch, slot, d_head]
        self.buffer[self.layers.index(layer), :2, :, :, first : first + states.shape[1]] = projected

    def begin(self, seen: int) -> None:
        """Take up the places that slots have in the segment to which token `seen` of the document belongs."""
        layout, config = self.layout, self.packed.config
        pending = seen % layout.segment_length
        start = torch.tensor([seen - pending])
        self.waiting = int(layout.waiting(start))
        chunk = layout.segment_length if self.rotary else 1
        positions = chunk_positions(
            config, layout, seen=start, lengths=torch.tensor([chunk]), chunk=chunk, like=self.packed.weight
        )
        mask = positions.mask[0, 0, : self.committed]
        self.mask = mask.clone() if bool(mask.any()) else None
        if isinstance(positions, RotaryPositions):
            self.angles, width = positions.queries, self.committed + pending
            unturned = self.buffer[:, 0, :, :, :width]
            places = unturned.flatten(0, 2)[:, :, None]  # [layer · head · batch, slot, 1, d_head]
            self.buffer[:, 2, :, :, :width] = rotated(places, positions.slots[:, :width]).view(unturned.shape)
        else:
            self.rows, self.queries = self.packed.rows(layout, start)

    def reach(self, place: int) -> list[Reach]:
        """What the token at `place` of the segment reads and writes, one for each layer of the layout."""
        # Views of one place are made once: a segment later they hold for the next token there.
        if (place, self.waiting) not in self.reaches:
            self.reaches[place, self.waiting] = self._reach(place)
        return self.reaches[place, self.waiting]

    def _reach(self, place: int) -> list[Reach]:
        width, compressed = self.committed + place + 1, self.layout.compressed_length
        *_, n_heads, batch_size, _, _ = self.buffer.shape
        own = self.buffer.select(4, width - 1).unbind(0)
        keys = self.keys.narrow(3, 0, width).unbind(0)
        values = self.values.narrow(2, 0, width).unbind(0)
        scores = self.room[: n_heads * batch_size * width].view(n_heads, batch_size, width)
        shared = (scores.view(n_heads * batch_size, 1, width), scores[:, :, : self.committed], self.scratch)
        views = zip(own, keys, values, strict=True)
        if self.rotary:
            angles = self.angles[:, place : place + 1]
            return [Reach(*each, *shared, angles=angles) for each in views]
        regions = []
        for table, part in zip(self.rows, (scores[:, :, compressed:], scores[:, :, :compressed]), strict=False):
            around, step = divmod(place, table.shape[0])
            first = self.queries // table.shape[0] - 1 - around
            rows = table[step].narrow(3, first, part.shape[2]).unbind(0)
            room = self.apart[: part.numel()].view(part.shape)
            regions.append([(distances, room, part) for distances in rows])
        return [Reach(*each, *shared, rows=rows) for each, rows in zip(views, zip(*regions, strict=True), strict=True)]

    def commit(self, seen: int, compressed: dict[int, Tensor]) -> None:
        """Follow the commit at `seen` tokens, a whole segment; `compressed` is the memory of each layer after it.

        Projections move with their slots; only the slots that are new are projected.
        """
        layout = self.layout
        after = torch.tensor([seen])
        groups = int(new_groups(layout, before=after - layout.segment_length, after=after))
        length = layout.compressed_length
        move(self.buffer, length + layout.segment_length, length, layout.recent_length)
        if new := min(groups, length):
            move(self.buffer, new, 0, length - new)
            for layer in self.layers:
                self.fill(layer, compressed[layer][:, length - new :], length - new)
        self.begin(seen)


def move(buffer: Tensor, source: int, target: int, count: int) -> None:
    """Copy `count` slots of `buffer [..., slot, d_head]` to a place further left; the two may overlap."""
    moved = buffer[..., source : source + count, :]
    buffer[..., target : target + count, :] = moved.clone() if source < target + count else moved
