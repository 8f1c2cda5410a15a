"""Decoding one token at a time with cached projections: the model's own numbers, without computing them again."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CompressiveError
from ..memory import Memory, join, pad_slots
from ..model import CompressiveTransformer
from ..model.block import TierStates
from .kv_cache import Slots
from .layers import PackedModel
from .packed import Precision


class CachedDecoder:
    """Steps the lanes of a memory token by token; logits and memory are those of the model in evaluation mode.

    It keeps projected keys and values of all slots in buffers of fixed size, written in place, and a copy of the
    weights in the form that is fastest for a few rows. When the model's weights change, build a new decoder: this one
    would mix old and new. Nothing has a gradient.

    Lanes of one age step together; of a batch with several ages each age takes a pass of its own.
    """

    def __init__(self, model: CompressiveTransformer, memory: Memory, precision: Precision = "full") -> None:
        """A decoder that goes on from `memory`, which may be in the midst of a segment.

        precision: "full" has the model's weights and gives its numbers, "bf16" and "int8" round the weights of all
        large products and the states that go into them; what is read at the start and what a commit compresses is
        projected in full precision all the same. Raises CompressiveError for another one, for "int8" off the CPU,
        where memory does not fit the model, and for a model with layers that are not its own (see `is_plain`).
        """
        self.model = model
        self.precision = precision
        with torch.no_grad():
            self._packed = PackedModel(model, precision)
        self.restart(memory)

    def restart(self, memory: Memory) -> None:
        """Go on from another memory, of any number of lanes."""
        self.model.check_memory(memory, memory.batch_size)
        ages = memory.seen.unique().tolist()
        self._indices = [(memory.seen == age).nonzero().squeeze(1) for age in ages]
        self._order = torch.cat(self._indices).argsort()
        with torch.no_grad():
            self._lanes = [_Lanes(self._packed, memory.select(indices)) for indices in self._indices]

    def select(self, indices: Tensor) -> None:
        """Go on with the lanes `indices [new batch]` (int64), in that order; a lane may be repeated.

        Where each place keeps its age, as in a beam search, projections move with their lanes; else they are made anew.
        Raises CompressiveError for lanes that there are not.
        """
        seen = self.seen
        chosen = Memory(seen, (), (), ()).select(indices)
        if not torch.equal(chosen.seen, seen):
            self.restart(self.memory.select(indices))
            return
        for lanes, places in zip(self._lanes, self._indices, strict=True):
            lanes.select(torch.searchsorted(places, indices.cpu()[places]))

    @property
    def batch_size(self) -> int:
        """Number of lanes."""
        return sum(map(len, self._indices))

    @property
    def seen(self) -> Tensor:
        """Tokens since the document of each lane began `[batch]`."""
        return torch.cat([torch.full((lanes.batch_size,), lanes.seen) for lanes in self._lanes])[self._order]

    @property
    def memory(self) -> Memory:
        """What the lanes remember now; later steps do not change it."""
        memories = [lanes.memory() for lanes in self._lanes]
        return memories[0] if len(memories) == 1 else join(memories).select(self._order)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, vocab_size]` after reading one more token of each lane, `tokens [batch]`."""
        if tokens.shape != (self.batch_size,) or tokens.dtype not in (torch.int64, torch.int32):
            raise CompressiveError(
                f"tokens must be integers [batch = {self.batch_size}], got {tokens.dtype} {list(tokens.shape)}"
            )
        if len(self._lanes) == 1:
            return self._lanes[0].step(tokens)
        logits = [lanes.step(tokens[at]) for lanes, at in zip(self._lanes, self._indices, strict=True)]
        return torch.cat(logits)[self._order.to(tokens.device)]


class _Lanes:
    """Lanes of one age: their hidden states, as memory has them, and the projections of these."""

    def __init__(self, packed: PackedModel, memory: Memory) -> None:
        self.packed = packed
        self.model = packed.model
        self.seen = int(memory.seen[0])
        self.batch_size = memory.batch_size
        self.segment_length = packed.config.segment_length
        memory = memory.detach()
        self.compressed, self.recent = list(memory.compressed), list(memory.recent)
        begun = self.seen % self.segment_length
        self.pending = packed.weight.new_zeros(
            packed.config.n_layers, self.batch_size, self.segment_length, packed.config.d_model
        )
        self.pending[:, :, :begun] = torch.stack([states[:, :begun] for states in memory.pending])
        self.usage = [
            pad_slots(sums, layer.block.uses_usage * (recent.shape[1] + self.segment_length - sums.shape[1]))
            for layer, sums, recent in zip(packed.layers, memory.usage, memory.recent, strict=bool(memory.usage))
        ]
        self.slots = [Slots(packed, layout, self.batch_size) for layout in dict.fromkeys(self.model.layouts)]
        for slots in self.slots:
            for layer in slots.layers:
                states = [self.compressed[layer], self.recent[layer], self.pending[layer, :, :begun]]
                slots.fill(layer, torch.cat(states, dim=1), 0)
            slots.begin(self.seen)

    def memory(self) -> Memory:
        begun = self.seen % self.segment_length
        usage = zip(self.packed.layers, self.usage, self.recent, strict=bool(self.usage))
        return Memory(
            seen=torch.full((self.batch_size,), self.seen),
            compressed=tuple(self.compressed),
            recent=tuple(self.recent),
            pending=tuple(self.pending[:, :, :begun].clone().unbind(0)),
            usage=tuple(
                sums[:, : layer.block.uses_usage * (recent.shape[1] + begun)].clone() for layer, sums, recent in usage
            ),
        )

    def select(self, places: Tensor) -> None:
        """Lane b goes on from what lane `places[b]` has read; memory that was handed out stays as it was."""
        if torch.equal(places, torch.arange(self.batch_size)):
            return
        places = places.to(self.pending.device)
        self.compressed, self.recent, self.usage = (
            [states[places] for states in tier] for tier in (self.compressed, self.recent, self.usage)
        )
        self.pending = self.pending[:, places]
        for slots in self.slots:
            slots.buffer.copy_(slots.buffer[:, :, :, places])  # in place, where views into it are kept

    def step(self, tokens: Tensor) -> Tensor:
        place = self.seen % self.segment_length
        reached = {
            layer: (reach, slots.mask)
            for slots in self.slots
            for layer, reach in zip(slots.layers, slots.reach(place), strict=True)
        }
        hidden = self.model.embedding(tokens.contiguous()[:, None])[:, 0]
        states = []
        for layer, packed in enumerate(self.packed.layers):
            hidden, state, weights = packed.step(hidden, *reached[layer])
            states.append(state)
            if packed.block.uses_usage:
                self._receive(layer, weights)
        torch.stack(states, out=self.pending[:, :, place])
        self.seen += 1
        if place + 1 == self.segment_length:
            self._commit()
        return self.packed.logits(hidden)

    def _receive(self, layer: int, weights: Tensor) -> None:
        """Add the mean over heads of `weights [head · batch, 1, slot]` to what slots received."""
        sums = self.usage[layer]
        received = weights.view(-1, self.batch_size, weights.shape[2]).to(sums.dtype).mean(0)
        received = received[:, self.compressed[layer].shape[1] :, None]
        sums[:, : received.shape[1]] += received

    def _commit(self) -> None:
        """The commit of the blocks themselves, on hidden states; then projections follow."""
        zero = self.pending.new_zeros(())
        kept = zip(self.compressed, self.recent, self.usage or [zero] * len(self.recent), strict=True)
        tiers = [
            TierStates(compressed, recent, pending, usage, zero, zero)
            for (compressed, recent, usage), pending in zip(kept, self.pending, strict=True)
        ]
        committed = self.packed.commit(tiers, self.pending, torch.full((self.batch_size,), self.seen))
        self.compressed = [tier.compressed for tier in committed]
        self.recent = [tier.recent for tier in committed]
        self.usage = [
            pad_slots(tier.usage, layer.block.uses_usage * self.segment_length)
            for tier, layer in zip(committed, self.packed.layers, strict=True)
            if self.usage
        ]
        for slots in self.slots:
            slots.commit(self.seen, {layer: self.compressed[layer] for layer in slots.layers})
