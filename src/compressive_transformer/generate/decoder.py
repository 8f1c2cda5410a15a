"""Decoding token by token with a KV cache: the model's logits and memory, without projecting anything twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from ..errors import CompressiveError
from ..memory import LayerMemory, Memory, pad_slots
from ..model import CompressiveTransformer
from .kv_cache import KVCache
from .layers import PackedModel
from .packed import Precision


class CachedDecoder:
    """Decoder that reads one token of each lane at a time; lanes may have any ages, join and leave.

    Logits and memory are those of the model in evaluation mode. Keys and values of all slots are kept in buffers of
    fixed size, and the weights are copied into the form that is fastest for a few rows: build a new decoder when the
    model's weights change. Nothing has a gradient.

    Args:
        model: The model.
        memory: Memory to continue from, which may be in mid-segment; by default there are no lanes until `join`.
        precision: "full" keeps the model's numbers; "bf16" and "int8" round the weights of all large products and the
            states that enter them. States that are read at the start or compressed by a commit are projected in full
            precision all the same.

    Raises:
        CompressiveError: The precision is unknown, or "int8" off the CPU; memory does not fit the model; or a layer is
            not plain, for example an adapter (see `has_plain_layers`).
    """

    def __init__(
        self, model: CompressiveTransformer, memory: Memory | None = None, precision: Precision = "full"
    ) -> None:
        self.model = model
        self.precision = precision
        self._segment_length = model.config.segment_length
        with torch.no_grad():
            self._packed = PackedModel(model, precision)
        self._seen: list[int] = []
        self._caches: list[KVCache] = []
        self.restart(model.empty_memory(1) if memory is None else memory)
        if memory is None:
            self._seen = []

    @torch.no_grad()
    def restart(self, memory: Memory) -> None:
        """Continue from another memory, with any number of lanes."""
        self.model.check_memory(memory, memory.batch_size)
        if not self._caches or self._capacity != memory.batch_size:
            sizes = (self.model.config.n_layers, memory.batch_size, self._segment_length, self.model.config.d_model)
            self._pending = self._packed.weight.new_zeros(sizes)
            # Written in place by later steps: never a caller's tensors.
            self._layers = [self._padded(layer).map(torch.clone) for layer in memory.detach().layers]
            layouts = dict.fromkeys(self.model.layouts)
            self._caches = [KVCache(self._packed, layout, memory.batch_size) for layout in layouts]
        self._seen = memory.seen.tolist()
        self._take(slice(0, self.batch_size), memory)

    @torch.no_grad()
    def join(self, memory: Memory) -> int:
        """Add a lane that continues from `memory`, which has one lane; return its place, the last one."""
        self.model.check_memory(memory, 1)
        place = self.batch_size
        if place == self._capacity:  # make room for twice as many
            self._gather(torch.arange(2 * place).clamp(max=place - 1))
        self._seen.append(int(memory.seen))
        self._take(slice(place, place + 1), memory)
        return place

    @torch.no_grad()
    def leave(self, place: int) -> Memory:
        """Remove the lane at `place` and return its memory; the last lane moves there."""
        memory = self.lane(place)
        last = self._seen.pop()
        if place < self.batch_size:
            self._seen[place] = last
            self._pending[:, place] = self._pending[:, self.batch_size]
            for layer in self._layers:
                for tensor in layer.tensors().values():
                    tensor[place] = tensor[self.batch_size]
            for cache in self._caches:
                cache.copy(self.batch_size, place)
        return memory

    @torch.no_grad()
    def select(self, indices: Tensor) -> None:
        """Continue with the lanes `indices [new batch]` (int64), in that order; a lane may be repeated.

        Raises:
            CompressiveError: There is no such lane.
        """
        self._seen = Memory(self.seen, ()).select(indices).seen.tolist()
        if not torch.equal(indices.cpu(), torch.arange(self._capacity)):
            self._gather(indices)

    @property
    def batch_size(self) -> int:
        """Number of lanes."""
        return len(self._seen)

    @property
    def seen(self) -> Tensor:
        """Tokens since the document of each lane began `[batch]`."""
        return torch.tensor(self._seen, dtype=torch.int64)

    @property
    def memory(self) -> Memory:
        """Memory of all lanes now; later steps do not change it."""
        return self._copy(slice(0, self.batch_size))

    def lane(self, place: int) -> Memory:
        """Return the memory of the lane at `place`, one lane; later steps do not change it."""
        if not 0 <= place < self.batch_size:
            raise CompressiveError(f"place ({place}) must be that of one of the {self.batch_size} lanes, from 0 on")
        return self._copy(slice(place, place + 1))

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of each lane.

        Args:
            tokens: Token ids, `[batch]`.

        Returns:
            Logits of the next token, `[batch, vocab_size]`.

        Raises:
            CompressiveError: There are no lanes, or `tokens` has another shape or dtype.
        """
        batch = self.batch_size
        if tokens.shape != (batch,) or tokens.dtype not in (torch.int64, torch.int32) or not batch:
            raise CompressiveError(
                f"tokens must be integers [batch = {batch}], got {tokens.dtype} {list(tokens.shape)}"
            )
        views = {
            layer: view
            for cache in self._caches
            for layer, view in zip(cache.layers, cache.views(self._seen), strict=True)
        }
        hidden = self.model.embedding(tokens.contiguous()[:, None])[:, 0]
        states = []
        for number, (layer, memory) in enumerate(zip(self._packed.layers, self._layers, strict=True)):
            hidden, state, weights = layer.step(hidden, views[number])
            states.append(state)
            if memory.usage is not None:
                received = weights.view(batch, -1, weights.shape[2]).to(memory.usage.dtype).mean(1)
                received = received[:, memory.compressed.shape[1] :, None]
                memory.usage[:batch, : received.shape[1]].add_(received)
        self._write_pending(torch.stack(states))
        self._seen = [seen + 1 for seen in self._seen]
        for lanes, seen in self._runs(
            place for place, seen in enumerate(self._seen) if not seen % self._segment_length
        ):
            self._commit(lanes, seen)
        return self._packed.logits(hidden)

    @property
    def _capacity(self) -> int:
        return self._pending.shape[1]

    def _runs(self, places: Iterable[int]) -> Iterator[tuple[slice, int]]:
        """Yield neighbors of one age among `places` as a slice, and their age."""
        for (seen, _), run in groupby(enumerate(places), lambda pair: (self._seen[pair[1]], pair[1] - pair[0])):
            neighbors = [place for _, place in run]
            yield slice(neighbors[0], neighbors[-1] + 1), seen

    def _padded(self, layer: LayerMemory) -> LayerMemory:
        """Return a layer's memory with usage for a whole segment, and without its pending states."""
        usage = layer.usage
        if usage is not None:
            usage = pad_slots(usage, layer.recent.shape[1] + self._segment_length - usage.shape[1])
        return LayerMemory(layer.compressed, layer.recent, layer.pending[:, :0], usage)

    def _take(self, lanes: slice, memory: Memory) -> None:
        """Write the memory of new lanes to their places."""
        for states, layer in zip(self._pending, memory.layers, strict=True):
            width = min(layer.pending.shape[1], self._segment_length)
            states[lanes, :width], states[lanes, width:] = layer.pending[:, :width], 0
        self._write(lanes, memory.layers)
        for run, seen in self._runs(range(lanes.start, lanes.stop)):
            for cache in self._caches:
                cache.fill(run, seen, self._states(run))

    def _write(self, lanes: slice, layers: Iterable[LayerMemory]) -> None:
        """Write compressed and recent memory and usage of some lanes."""
        for target, layer in zip(self._layers, layers, strict=True):
            source = self._padded(layer).tensors()
            for name, tensor in target.tensors().items():
                tensor[lanes] = source[name]

    def _states(self, lanes: slice) -> list[LayerMemory]:
        """Return views of the memory of some lanes, layer by layer, with a whole segment of pending states."""
        return [
            replace(layer.map(lambda tensor: tensor[lanes]), pending=pending[lanes])
            for layer, pending in zip(self._layers, self._pending, strict=True)
        ]

    def _copy(self, lanes: slice) -> Memory:
        """Return a copy of the memory of some lanes, with as many pending states as they need."""
        seen = self.seen[lanes]
        width = int((seen % self._segment_length).max()) if len(seen) else 0
        layers = []
        for layer in self._states(lanes):
            usage = None if layer.usage is None else layer.usage[:, : layer.recent.shape[1] + width]
            layers.append(replace(layer, pending=layer.pending[:, :width], usage=usage).map(torch.clone))
        return Memory(seen, tuple(layers))

    def _gather(self, lanes: Tensor) -> None:
        """Bring lanes `[new capacity]` to new places, one after another."""
        device = self._pending.device
        self._pending = self._pending[:, lanes.to(device)]
        self._layers = [layer.map(lambda tensor: tensor[lanes.to(device)]) for layer in self._layers]
        for cache in self._caches:
            cache.gather(lanes.to(device))

    def _write_pending(self, states: Tensor) -> None:
        """Write the states `[layer, batch, d_model]` of one token a lane."""
        places = [seen % self._segment_length for seen in self._seen]
        if len(set(places)) == 1:
            self._pending[:, : len(places), places[0]] = states
        else:
            self._pending[:, torch.arange(len(places)), torch.tensor(places)] = states

    def _commit(self, lanes: slice, seen: int) -> None:
        """Commit the segment of some lanes of one age: the blocks do it with hidden states, projections follow."""
        committed = self._packed.commit(self._states(lanes), torch.full((lanes.stop - lanes.start,), seen))
        self._write(lanes, committed)
        self._pending[:, lanes] = 0
        for cache in self._caches:
            cache.commit(lanes, seen, committed)
