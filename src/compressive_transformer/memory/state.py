"""Memory that one segment leaves for the next: tensors only, no parameters."""

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
class LayerMemory:
    """Both tiers of memory of one layer, and the pending states of its incomplete segment."""

    compressed: Tensor
    """`[batch, compressed_length, d_model]`, oldest slot first."""
    recent: Tensor
    """`[batch, recent_length, d_model]`, oldest slot first."""
    pending: Tensor
    """`[batch, pending, d_model]`; at least as wide as the lane with most pending states needs."""
    usage: Tensor | None = None
    """Attention received so far, `[batch, recent + pending, 1]`; None where f_c does not ask for it."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field name, without a usage that is None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> LayerMemory:
        """Return the memory with `change` applied to each tensor."""
        return LayerMemory(**{name: change(value) for name, value in self.tensors().items()})

    def pad(self, count: int) -> LayerMemory:
        """Return the memory with room for `count` more pending states, filled with zeros."""
        usage = None if self.usage is None else pad_slots(self.usage, count)
        return replace(self, pending=pad_slots(self.pending, count), usage=usage)


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory of a batch of lanes, layer by layer, outside of any graph.

    A state is what the attention of its layer read: the layer's input, normed first in a pre-norm model. With
    `compression_loss = "bptt"` compressed states stay in the graph of what compressed them until `detach`.
    Methods return a new memory; nothing is changed in place.

    Args:
        seen: Tokens since the lane's document began, `[batch]`, int64 on the CPU, since it steers which kernels run.
        layers: One `LayerMemory` a layer, on the model's device.

    Example:
        >>> memory = model.empty_memory(batch_size=2)
        >>> memory = model(tokens, memory).memory
        >>> memory.layers[0].recent.shape  # [batch, recent_length, d_model]
    """

    seen: Tensor
    layers: tuple[LayerMemory, ...]

    @property
    def batch_size(self) -> int:
        """Number of lanes."""
        return self.seen.shape[0]

    def reset(self, starts: Tensor) -> Memory:
        """Return the memory with some lanes emptied, because a document begins there.

        Args:
            starts: Lanes to empty, `[batch]`, bool.

        Raises:
            CompressiveError: `starts` has another shape or dtype.
        """
        if starts.shape != self.seen.shape or starts.dtype != torch.bool:
            raise CompressiveError(
                f"starts must be bool [batch = {self.batch_size}], got {starts.dtype} {list(starts.shape)}"
            )
        if not bool(starts.any()):
            return self
        seen = torch.where(starts.to(self.seen.device), torch.zeros_like(self.seen), self.seen)
        return replace(self._map(lambda states: _zero_lanes(states, starts)), seen=seen)

    def select(self, indices: Tensor) -> Memory:
        """Return the memory of some lanes, in the order given.

        Args:
            indices: Lanes, `[new batch]`, int64; a lane may be repeated.

        Raises:
            CompressiveError: An index is out of range, or `indices` has another shape or dtype.
        """
        if indices.ndim != 1 or indices.dtype != torch.int64:
            raise CompressiveError(f"indices must be int64 [lanes], got {indices.dtype} {list(indices.shape)}")
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.batch_size:
            raise CompressiveError(f"indices must lie in 0 .. {self.batch_size - 1}, got {indices.tolist()}")
        selected = self._map(lambda states: states[indices.to(states.device)])
        return replace(selected, seen=self.seen[indices.to(self.seen.device)])

    def detach(self) -> Memory:
        """Return the same memory outside of any graph."""
        return self._map(lambda states: states.detach())

    def finite(self) -> Tensor:
        """Return True for each lane whose states are all finite, `[batch]` on the CPU."""
        states = [tensor for layer in self.layers for tensor in layer.tensors().values()]
        return torch.stack([tensor.isfinite().flatten(1).all(1) for tensor in states]).all(0).cpu()

    def to(self, *args: Any, **kwargs: Any) -> Memory:
        """Return the memory with its states on another device or in another dtype, as `torch.Tensor.to` does."""
        return self._map(lambda states: states.to(*args, **kwargs))

    def state_dict(self) -> dict[str, Tensor]:
        """Return named tensors, `seen`, `compressed.0`, `recent.0`, ..., from which `from_state_dict` rebuilds it."""
        layers = enumerate(self.layers)
        named = {f"{name}.{at}": tensor for at, layer in layers for name, tensor in layer.tensors().items()}
        return {"seen": self.seen, **named}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Memory:
        """Return the memory that `state_dict` described.

        Raises:
            CompressiveError: Tensors are missing or unknown.
        """
        layers = range(max(1, sum(name.startswith("recent.") for name in state)))
        expected = {"seen", *(f"{tier}.{layer}" for layer in layers for tier in ("compressed", "recent", "pending"))}
        if not expected <= set(state) <= expected | {f"usage.{layer}" for layer in layers}:
            raise CompressiveError(
                f"not the state of a memory: expected tensors {sorted(expected)}, got {sorted(state)}"
            )
        return cls(state["seen"], tuple(_layer_from(state, layer) for layer in layers))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        return Memory(self.seen, tuple(layer.map(change) for layer in self.layers))


def empty_memory(
    config: ModelConfig, batch_size: int, *, usage: Sequence[bool], device: torch.device, dtype: torch.dtype
) -> Memory:
    """Return the memory of `batch_size` lanes that have read nothing.

    `usage` says for each layer if it counts the attention that states receive.
    """
    precise = torch.promote_types(dtype, torch.float32)  # sums over many tokens

    def states(length: int) -> Tensor:
        return torch.zeros(batch_size, length, config.d_model, device=device, dtype=dtype)

    def layer(layout: SlotLayout, counts: bool) -> LayerMemory:
        sums = torch.zeros(batch_size, layout.recent_length, 1, device=device, dtype=precise) if counts else None
        return LayerMemory(states(layout.compressed_length), states(layout.recent_length), states(0), sums)

    layouts = [SlotLayout.of(config, number) for number in range(config.n_layers)]
    seen = torch.zeros(batch_size, dtype=torch.int64, device="cpu")
    return Memory(seen, tuple(layer(layout, counts) for layout, counts in zip(layouts, usage, strict=True)))


def join(memories: Sequence[Memory]) -> Memory:
    """Return one memory with the lanes of all, in their order; pending states are as wide as the widest needs."""
    width = max(memory.layers[0].pending.shape[1] for memory in memories)
    states = []
    for memory in memories:
        layers = tuple(layer.pad(width - layer.pending.shape[1]) for layer in memory.layers)
        states.append(replace(memory, layers=layers).state_dict())
    return Memory.from_state_dict({name: torch.cat([state[name] for state in states]) for name in states[0]})


def _layer_from(state: Mapping[str, Tensor], layer: int) -> LayerMemory:
    memory = LayerMemory(*(state[f"{tier}.{layer}"] for tier in ("compressed", "recent", "pending")))
    usage = state.get(f"usage.{layer}")
    # Files of earlier versions hold an empty usage for layers that count nothing.
    counts = usage is not None and (usage.shape[1] > 0 or memory.recent.shape[1] + memory.pending.shape[1] == 0)
    return replace(memory, usage=usage) if counts else memory


def pad_slots(states: Tensor, count: int) -> Tensor:
    """Return `states [batch, slot, ...]` with `count` slots of zeros behind them."""
    return functional.pad(states, (0, 0, 0, count))


def _zero_lanes(states: Tensor, lanes: Tensor) -> Tensor:
    # masked_fill rather than a product: what is thrown away may hold NaN.
    return states.masked_fill(lanes.to(states.device)[:, None, None], 0.0)
