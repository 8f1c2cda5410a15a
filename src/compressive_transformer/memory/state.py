"""What one segment leaves for the next: tensors only, no parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..config import ModelConfig
from ..errors import CompressiveError
from .layout import SlotLayout


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
    def batch_size(self) -> int:
        """Number of lanes."""
        return self.seen.shape[0]

    def reset(self, starts: Tensor) -> Memory:
        """The memory in which the lanes marked in `starts [batch]` (bool) are empty: a document begins."""
        if starts.shape != self.seen.shape or starts.dtype != torch.bool:
            raise CompressiveError(
                f"starts must be bool [batch = {self.batch_size}], got {starts.dtype} {list(starts.shape)}"
            )
        if not bool(starts.any()):
            return self
        seen = torch.where(starts.to(self.seen.device), torch.zeros_like(self.seen), self.seen)
        return replace(self._map(lambda states: _zero_lanes(states, starts)), seen=seen)

    def select(self, indices: Tensor) -> Memory:
        """The memory of the lanes `indices [new batch]` (int64), in that order; a lane may be repeated."""
        if indices.ndim != 1 or indices.dtype != torch.int64:
            raise CompressiveError(f"indices must be int64 [lanes], got {indices.dtype} {list(indices.shape)}")
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.batch_size:
            raise CompressiveError(f"indices must lie in 0 .. {self.batch_size - 1}, got {indices.tolist()}")
        picked = self._map(lambda states: states[indices.to(states.device)])
        return replace(picked, seen=self.seen[indices.to(self.seen.device)])

    def detach(self) -> Memory:
        """The same memory outside of any graph."""
        return self._map(lambda states: states.detach())

    def finite(self) -> Tensor:
        """Whether all that a lane remembers is finite, `[batch]` on the CPU."""
        tiers = (*self.compressed, *self.recent, *self.pending, *self.usage)
        return torch.stack([states.isfinite().flatten(1).all(1) for states in tiers]).all(0).cpu()

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
    config: ModelConfig, batch_size: int, *, usage: Sequence[bool], device: torch.device, dtype: torch.dtype
) -> Memory:
    """The memory of `batch_size` lanes in which nothing has been read yet.

    `usage` says of each layer whether it keeps count of the attention that states receive.
    """
    layouts = [SlotLayout.of(config, layer) for layer in range(config.n_layers)]
    precise = torch.promote_types(dtype, torch.float32)  # sums over many tokens
    counted = [layout.recent_length * kept for layout, kept in zip(layouts, usage, strict=True)] if any(usage) else []

    def states(lengths: list[int]) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(batch_size, length, config.d_model, device=device, dtype=dtype) for length in lengths)

    return Memory(
        seen=torch.zeros(batch_size, dtype=torch.int64, device="cpu"),
        compressed=states([layout.compressed_length for layout in layouts]),
        recent=states([layout.recent_length for layout in layouts]),
        pending=states([0] * config.n_layers),
        usage=tuple(torch.zeros(batch_size, length, 1, device=device, dtype=precise) for length in counted),
    )


def join(memories: Sequence[Memory]) -> Memory:
    """One memory with the lanes of all, in their order; pending states are as wide as the widest needs."""
    width = max(memory.pending[0].shape[1] for memory in memories)
    # A layer that keeps no count has no slots for it in any of them.
    counted = [any(own.shape[1] for own in layers) for layers in zip(*(m.usage for m in memories), strict=True)]
    states = []
    for memory in memories:
        missing = width - memory.pending[0].shape[1]
        pending = tuple(pad_slots(own, missing) for own in memory.pending)
        usage = tuple(pad_slots(own, missing * kept) for own, kept in zip(memory.usage, counted, strict=True))
        states.append(replace(memory, pending=pending, usage=usage).state_dict())
    return Memory.from_state_dict({name: torch.cat([state[name] for state in states]) for name in states[0]})


def pad_slots(states: Tensor, count: int) -> Tensor:
    """`states [batch, slot, ...]` with `count` slots of zeros behind them."""
    return functional.pad(states, (0, 0, 0, count))


def _zero_lanes(states: Tensor, lanes: Tensor) -> Tensor:
    # masked_fill rather than a product: what is thrown away may hold NaN.
    return states.masked_fill(lanes.to(states.device)[:, None, None], 0.0)
