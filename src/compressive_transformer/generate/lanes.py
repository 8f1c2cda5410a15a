"""Decoding lanes of any ages together, one token each in one pass; lanes join and leave between two steps."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import rotated
from ..errors import CompressiveError
from ..memory import Memory
from ..model import CompressiveTransformer
from ..model.block import TierStates
from .lane_slots import Lane, LaneReach, LaneSlots
from .layers import PackedLayer, PackedModel


class LaneDecoder:
    """Steps lanes that stand anywhere in their segments, all in one pass; logits and memories are the model's own.

    Where `CachedDecoder` is made for a batch that stays together, lanes come and go here, at places from 0 on,
    and when a lane leaves, the last one takes its place. Weights are copied when the decoder is made. Nothing has a
    gradient.
    """

    def __init__(self, model: CompressiveTransformer) -> None:
        """A decoder without lanes. Raises CompressiveError for a model with layers that are not its own."""
        with torch.no_grad():
            self._packed = PackedModel(model, "full")
            self._groups = [LaneSlots(self._packed, layout) for layout in dict.fromkeys(model.layouts)]
        self.model = model
        self._lanes: list[Lane] = []
        config = model.config
        self._pending = self._packed.weight.new_zeros(config.n_layers, 1, config.segment_length, config.d_model)

    @property
    def batch_size(self) -> int:
        """Number of lanes."""
        return len(self._lanes)

    @torch.no_grad()
    def join(self, memory: Memory) -> int:
        """The place of a new lane, the last one, that goes on from `memory` of one lane."""
        self.model.check_memory(memory, 1)
        place, lane = self.batch_size, Lane(memory.detach(), self.model.config.segment_length)
        if place == self._pending.shape[1]:
            self._pending = torch.cat([self._pending, torch.zeros_like(self._pending)], dim=1)
            for group in self._groups:
                group.grow()
        begun = lane.begun
        for layer, states in enumerate(memory.pending):
            self._pending[layer, place, :begun] = states[0, :begun]
        for group in self._groups:
            group.take(place, lane, [self._pending[layer, place, :begun] for layer in group.layers])
        self._lanes.append(lane)
        return place

    def leave(self, place: int) -> Memory:
        """What the lane at `place` remembers, one lane; the last lane takes its place."""
        self._check(place)
        lane, last = self._lanes[place], self._lanes.pop()
        memory = self._memory(lane, place)
        if lane is not last:
            self._lanes[place] = last
            self._pending[:, place] = self._pending[:, self.batch_size]
            for group in self._groups:
                group.copy(self.batch_size, place)
        return memory

    def memory(self, place: int) -> Memory:
        """What the lane at `place` remembers now, one lane; later steps do not change it."""
        self._check(place)
        return self._memory(self._lanes[place], place)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, vocab_size]` after reading one more token of each lane, `tokens [batch]`."""
        if tokens.shape != (self.batch_size,) or tokens.dtype != torch.int64 or not self.batch_size:
            raise CompressiveError(
                f"tokens must be int64 [batch = {self.batch_size}], not empty, got {tokens.dtype} {list(tokens.shape)}"
            )
        seen = torch.tensor([lane.seen for lane in self._lanes])
        reached = {layer: reach for group in self._groups for layer, reach in group.reach(seen).items()}
        hidden = self.model.embedding(tokens[:, None])[:, 0]
        states = []
        for layer, packed in enumerate(self._packed.layers):
            hidden, state, weights = _step(packed, hidden, reached[layer])
            states.append(state)
            if packed.block.uses_usage:
                self._receive(layer, weights)
        places = seen % self.model.config.segment_length
        self._pending[:, torch.arange(self.batch_size), places] = torch.stack(states)
        for place, lane in enumerate(self._lanes):
            lane.seen += 1
            if not lane.begun:
                self._commit(place, lane)
        return self._packed.logits(hidden)

    def _receive(self, layer: int, weights: Tensor) -> None:
        """Add the mean over heads of `weights [batch, head, slot]` to what slots received."""
        for lane, received in zip(self._lanes, weights, strict=True):
            own = received[:, lane.compressed[layer].shape[1] :].to(lane.usage[layer].dtype).mean(0)
            lane.usage[layer][0, : len(own), 0] += own

    def _commit(self, place: int, lane: Lane) -> None:
        zero = self._pending.new_zeros(())
        usages = lane.usage or [zero] * len(lane.recent)
        pending = self._pending[:, place : place + 1]
        kept = zip(lane.compressed, lane.recent, pending, usages, strict=True)
        tiers = self._packed.commit([TierStates(*own, zero, zero) for own in kept], pending, torch.tensor([lane.seen]))
        lane.compressed = [tier.compressed for tier in tiers]
        lane.recent = [tier.recent for tier in tiers]
        if lane.usage:
            lane.usage = [lane.padded(tier.usage, lane.segment_length) for tier in tiers]
        for group in self._groups:
            group.commit(place, lane)

    def _memory(self, lane: Lane, place: int) -> Memory:
        begun = lane.begun
        widths = [states.shape[1] + begun for states in lane.recent]
        return Memory(
            seen=torch.tensor([lane.seen]),
            compressed=tuple(lane.compressed),
            recent=tuple(lane.recent),
            pending=tuple(self._pending[:, place : place + 1, :begun].clone().unbind(0)),
            usage=tuple(sums[:, :width].clone() for sums, width in zip(lane.usage, widths, strict=bool(lane.usage))),
        )

    def _check(self, place: int) -> None:
        if not 0 <= place < self.batch_size:
            raise CompressiveError(f"place ({place}) must be that of one of the {self.batch_size} lanes, from 0 on")


def _step(packed: PackedLayer, hidden: Tensor, reach: LaneReach) -> tuple[Tensor, Tensor, Tensor]:
    """The next layer's input and the state that memory keeps, `[batch, d_model]`; weights `[batch, head, slot]`."""
    state = packed.attention_norm(hidden) if packed.block.pre_norm else hidden
    made = packed.project(state).unflatten(1, (3, packed.n_heads, packed.d_head)).to(hidden.dtype)
    queries, keys_values = made[:, 0], made[:, 1:]
    lanes, slots = reach.own
    if reach.angles is not None:
        turned = rotated(made[:, :2].flatten(1, 2)[:, None], reach.angles)[:, 0].unflatten(1, (2, -1))
        queries, keys_values = turned[:, 0], torch.cat([keys_values, turned[:, 1:]], dim=1)
    reach.buffer[:, lanes, :, slots] = keys_values
    content = queries if packed.biases is None else queries + packed.biases[0, :, 0]
    (batch_size, heads, _), width = queries.shape, reach.buffer.shape[3]
    keys, values = (reach.buffer[kind].flatten(0, 1) for kind in (-1 if reach.angles is not None else 0, 1))
    scores = torch.bmm(content.flatten(0, 1)[:, None], keys.transpose(1, 2)).view(batch_size, heads, width)
    for at, (rows, index, region) in enumerate(reach.rows):
        assert packed.biases is not None
        shifted = queries + packed.biases[1 + at % (len(packed.biases) - 1), :, 0]
        distances = torch.bmm(shifted.transpose(0, 1), rows)  # [head, batch, row]
        scores[:, :, region] += distances.gather(2, index.expand(heads, -1, -1)).transpose(0, 1)
    weights = torch.softmax(scores + reach.mask, dim=-1)
    mixed = torch.bmm(weights.view(batch_size * heads, 1, width), values).view(batch_size, -1)
    return packed.finish(hidden, mixed), state, weights
