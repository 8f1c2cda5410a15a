"""What one segment leaves for the next: tensors only, no parameters.

Slots sit at fixed places, newest last, so that key positions are constants and shapes are static. One number
a lane, `seen`, says which slots are filled and which tokens each of them stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .config import ModelConfig
from .errors import CompressiveError


@dataclass(frozen=True)
class SlotLayout:
    """Where hidden states stand in memory, as a function of `seen` alone.

    With E = committed tokens beyond `memory_length`, floor(E / c) groups of c states have been compressed.
    The E mod c states that do not fill a group yet wait at the old end of recent memory: none is ever lost.
    """

    segment_length: int
    memory_length: int
    compressed_length: int
    compression_rate: int

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> SlotLayout:
        """The layout that a model's lengths give in one layer, counted from 0."""
        return cls(config.segment_length, *config.of_layer(layer))

    @cached_property
    def waiting_length(self) -> int:
        """Most states that ever wait for their group to fill, 0 to c - 1."""
        if not self.compressed_length:
            return 0
        rate = self.compression_rate
        return max((commits * self.segment_length - self.memory_length) % rate for commits in range(rate))

    @property
    def recent_length(self) -> int:
        """Slots of recent memory, those of waiting states included."""
        return self.memory_length + self.waiting_length

    @property
    def groups_per_commit(self) -> int:
        """Most groups that one commit compresses."""
        if not self.compressed_length:
            return 0
        return (self.waiting_length + self.segment_length) // self.compression_rate

    def pending(self, seen: Tensor) -> Tensor:
        """Tokens of the incomplete segment `[batch]`."""
        return seen % self.segment_length

    def segment_width(self, *, before: Tensor, after: Tensor) -> int:
        """Places of the segment that attention reads between two counts of tokens `[batch]`.

        As many as the lane that comes furthest fills, and one at least, since attention over nothing is NaN.
        """
        return max(1, int((self.pending(before) + after - before).max()))

    def compressed_groups(self, seen: Tensor) -> Tensor:
        """Groups that were compressed since the document began `[batch]`."""
        if not self.compressed_length:
            return torch.zeros_like(seen)
        return self._evicted(seen) // self.compression_rate

    def waiting(self, seen: Tensor) -> Tensor:
        """States that wait in recent memory for their group to fill `[batch]`."""
        if not self.compressed_length:
            return torch.zeros_like(seen)
        return self._evicted(seen) % self.compression_rate

    def filled(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Filled slots of compressed and of recent memory, `[batch]` each."""
        compressed = self.compressed_groups(seen).clamp(max=self.compressed_length)
        committed = seen - self.pending(seen)
        return compressed, torch.minimum(committed, self.memory_length + self.waiting(seen))

    def slot_spans(self, seen: int) -> tuple[list[range], list[range]]:
        """The tokens, counted from the document's start, that each slot stands for.

        One range a slot of compressed and of recent memory, oldest first; an empty range for an unfilled one.
        """
        age = torch.tensor(seen)
        groups = int(self.compressed_groups(age))
        committed = seen - int(self.pending(age))
        rate = self.compression_rate
        firsts = [rate * (groups - self.compressed_length + slot) for slot in range(self.compressed_length)]
        compressed = [range(first, first + rate) if first >= 0 else range(0) for first in firsts]
        filled = int(self.filled(age)[1])
        tokens = [committed - self.recent_length + slot for slot in range(self.recent_length)]
        recent = [range(token, token + 1) if token >= committed - filled else range(0) for token in tokens]
        return compressed, recent

    def _evicted(self, seen: Tensor) -> Tensor:
        return (seen - self.pending(seen) - self.memory_length).clamp(min=0)


@dataclass(frozen=True, eq=False)
class Memory:
    """Both tiers of memory and the pending states of each lane, one tensor a layer, outside of any graph.

    A state is what the attention of its layer read: the layer's input, normed first in a pre-norm model. With
    `compression_loss = "bptt"` compressed states stay in the graph of what compressed them until `detach`.
    Methods return a new memory; nothing is changed in place. `seen` stays on the CPU, since it steers which
    kernels run; the states stay where the model is.
    """

    seen: Tensor
    """Tokens since the lane's document began `[batch]`, int64 on the CPU."""
    compressed: tuple[Tensor, ...]
    """`[batch, compressed_length, d_model]` a layer."""
    recent: tuple[Tensor, ...]
    """`[batch, recent_length, d_model]` a layer."""
    pending: tuple[Tensor, ...]
    """`[batch, pending, d_model]` a layer; at least as wide as the lane with most pending states needs."""
    usage: tuple[Tensor, ...] = ()
    """Attention received so far, `[batch, recent + pending, 1]` a layer; none where f_c does not ask for it."""

    @property
    def batch(self) -> int:
        """Number of lanes."""
        return self.seen.shape[0]

    def reset(self, starts: Tensor) -> Memory:
        """The memory in which the lanes marked in `starts [batch]` (bool) are empty: a document begins."""
        if starts.shape != self.seen.shape or starts.dtype != torch.bool:
            raise CompressiveError(
                f"starts must be bool [batch = {self.batch}], got {starts.dtype} {list(starts.shape)}"
            )
        if not bool(starts.any()):
            return self
        seen = torch.where(starts.to(self.seen.device), torch.zeros_like(self.seen), self.seen)
        return replace(self._map(lambda states: _zero_lanes(states, starts)), seen=seen)

    def select(self, indices: Tensor) -> Memory:
        """The memory of the lanes `indices [new batch]` (int64), in that order; a lane may be repeated."""
        if indices.ndim != 1 or indices.dtype != torch.int64:
            raise CompressiveError(f"indices must be int64 [lanes], got {indices.dtype} {list(indices.shape)}")
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.batch:
            raise CompressiveError(f"indices must lie in 0 .. {self.batch - 1}, got {indices.tolist()}")
        picked = self._map(lambda states: states[indices.to(states.device)])
        return replace(picked, seen=self.seen[indices.to(self.seen.device)])

    def detach(self) -> Memory:
        """The same memory outside of any graph."""
        return self._map(lambda states: states.detach())

    def to(self, *args: Any, **kwargs: Any) -> Memory:
        """The memory with its states on another device or in another dtype, as `torch.Tensor.to`."""
        return self._map(lambda states: states.to(*args, **kwargs))

    def state_dict(self) -> dict[str, Tensor]:
        """Named tensors from which `from_state_dict` makes this memory again."""
        tiers = {
            "compressed": self.compressed,
            "recent": self.recent,
            "pending": self.pending,
            "usage": self.usage,
        }
        named = {f"{tier}.{layer}": states for tier, all_ in tiers.items() for layer, states in enumerate(all_)}
        return {"seen": self.seen, **named}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Memory:
        """The memory that `state_dict` described. Raises CompressiveError where tensors are missing."""
        layers = max(1, sum(name.startswith("recent.") for name in state))
        usage = ("usage",) if any(name.startswith("usage.") for name in state) else ()
        names = ("compressed", "recent", "pending", *usage)
        tiers = [[f"{tier}.{layer}" for layer in range(layers)] for tier in names]
        expected = {"seen", *(name for names in tiers for name in names)}
        if set(state) != expected:
            raise CompressiveError(
                f"not the state of a memory: expected tensors {sorted(expected)}, got {sorted(state)}"
            )
        return cls(state["seen"], *(tuple(state[name] for name in names) for names in tiers))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        return Memory(
            seen=self.seen,
            compressed=tuple(map(change, self.compressed)),
            recent=tuple(map(change, self.recent)),
            pending=tuple(map(change, self.pending)),
            usage=tuple(map(change, self.usage)),
        )


def empty_memory(
    config: ModelConfig, batch: int, *, usage: Sequence[bool], device: torch.device, dtype: torch.dtype
) -> Memory:
    """The memory of `batch` lanes in which nothing has been read yet.

    `usage` says of each layer whether it keeps count of the attention that states receive.
    """
    layouts = [SlotLayout.of(config, layer) for layer in range(config.n_layers)]
    precise = torch.promote_types(dtype, torch.float32)  # sums over many tokens
    counted = [layout.recent_length * kept for layout, kept in zip(layouts, usage, strict=True)] if any(usage) else []

    def states(lengths: list[int]) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(batch, length, config.d_model, device=device, dtype=dtype) for length in lengths)

    return Memory(
        seen=torch.zeros(batch, dtype=torch.int64, device="cpu"),
        compressed=states([layout.compressed_length for layout in layouts]),
        recent=states([layout.recent_length for layout in layouts]),
        pending=states([0] * config.n_layers),
        usage=tuple(torch.zeros(batch, length, 1, device=device, dtype=precise) for length in counted),
    )


def place_segment(layout: SlotLayout, pending: Tensor, states: Tensor, *, before: Tensor, after: Tensor) -> Tensor:
    """The segment so far `[batch, width, d_model]`: pending states, each lane's new `states` right behind.

    `before` and `after [batch]` are the tokens seen before and after `states [batch, chunk, d_model]`, which
    complete at most one segment. The segment is as wide as the lane that has come furthest; what lies beyond
    a lane's own states is padding.
    """
    begin = layout.pending(before)
    width = layout.segment_width(before=before, after=after)
    first = int(begin[0])
    if bool((begin == first).all()):
        return states[:, :width] if first == 0 else torch.cat([pending[:, :first], states[:, : width - first]], 1)
    held = pending.shape[1]
    places = torch.arange(width).expand(len(begin), -1)
    new = (held + places - begin[:, None]).clamp(max=held + states.shape[1] - 1)
    return _gather(torch.cat([pending, states], dim=1), torch.where(places < begin[:, None], places, new))


def next_pending(layout: SlotLayout, segment: Tensor, seen: Tensor) -> Tensor:
    """Pending states `[batch, pending, d_model]` at `seen [batch]` tokens, zero beyond each lane's own."""
    filled = layout.pending(seen)
    width = int(filled.max())
    beyond = torch.arange(width) >= filled[:, None]
    return segment[:, :width].masked_fill(beyond[:, :, None].to(segment.device), 0.0)


def evicted_groups(layout: SlotLayout, states: Tensor, seen: Tensor, counts: Tensor, overlap: int = 0) -> Tensor:
    """Groups that leave recent memory at a commit, newest last: `[batch, group, compression_rate + overlap, d_model]`.

    `states [batch, recent + segment, d_model]` are recent memory and the complete segment, `seen [batch]`
    counts the segment too. Of a lane, only the newest `counts [batch]` groups are real; the others are zeros.
    """
    stops = states.shape[1] - layout.memory_length - layout.waiting(seen) + overlap
    count, rate = layout.groups_per_commit, layout.compression_rate
    groups = _window(states, stops, count * rate + overlap).unfold(1, rate + overlap, rate).transpose(2, 3)
    if bool((counts == count).all()):
        return groups
    padding = torch.arange(count) < count - counts[:, None]
    return groups.masked_fill(padding[:, :, None, None].to(groups.device), 0.0)


def new_groups(layout: SlotLayout, *, before: Tensor, after: Tensor) -> Tensor:
    """Groups that fill while `seen` goes from `before [batch]` to `after [batch]`, at most one commit."""
    return layout.compressed_groups(after) - layout.compressed_groups(before)


def append_compressed(compressed: Tensor, new: Tensor, counts: Tensor) -> Tensor:
    """Compressed memory `[batch, slot, d_model]` with the newest `counts [batch]` states of `new` added."""
    length, added = compressed.shape[1], new.shape[1]
    joined = torch.cat([compressed, new], dim=1)
    if bool((counts == added).all()):
        return joined[:, added:].clone()
    age = length - 1 - torch.arange(length)  # 0 is the newest slot
    kept = age - counts[:, None]
    places = torch.where(kept < 0, length + added - 1 - age, length - 1 - kept)
    return _gather(joined, places)


def next_recent(layout: SlotLayout, states: Tensor, complete: Tensor) -> Tensor:
    """Recent memory after a commit of the lanes in `complete [batch]`; `states` as in `evicted_groups`."""
    stops = layout.recent_length + layout.segment_length * complete.long()
    return _window(states, stops, layout.recent_length).clone()


def _window(states: Tensor, stops: Tensor, length: int) -> Tensor:
    """The `length` states before place `stops [batch]` of each lane; before the first one, that one again."""
    first = int(stops[0]) - length
    if first >= 0 and bool((stops == stops[0]).all()):
        return states.narrow(1, first, length)
    return _gather(states, (stops[:, None] - length + torch.arange(length)).clamp(min=0))


def _gather(states: Tensor, places: Tensor) -> Tensor:
    lanes = torch.arange(states.shape[0], device=states.device)[:, None]
    return states[lanes, places.to(states.device)]


def _zero_lanes(states: Tensor, lanes: Tensor) -> Tensor:
    # masked_fill rather than a product: what is thrown away may hold NaN.
    return states.masked_fill(lanes.to(states.device)[:, None, None], 0.0)
