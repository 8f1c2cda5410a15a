"""Places of hidden states in memory, as a function of how many tokens were seen: no tensors of states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..config import ModelConfig


@dataclass(frozen=True)
class SlotLayout:
    """Places of hidden states in memory, as a function of `seen` alone.

    With E = committed tokens beyond `memory_length`, floor(E / c) groups of c states have been compressed.
    The E mod c states that do not fill a group yet wait at the old end of recent memory: none is ever lost.
    """

    segment_length: int
    memory_length: int
    compressed_length: int
    compression_rate: int

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> SlotLayout:
        """Return the layout of one layer of a model, counted from 0."""
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
        """Return the tokens of the incomplete segment `[batch]`."""
        return seen % self.segment_length

    def segment_width(self, *, before: Tensor, after: Tensor) -> int:
        """Return how many places of the segment attention reads between two counts of tokens `[batch]`.

        The furthest lane fills them; at least one, since attention over nothing is NaN.
        """
        return max(1, int((self.pending(before) + after - before).max()))

    def compressed_groups(self, seen: Tensor) -> Tensor:
        """Return the groups that were compressed since the document began `[batch]`."""
        if not self.compressed_length:
            return torch.zeros_like(seen)
        return self._evicted(seen) // self.compression_rate

    def waiting(self, seen: Tensor) -> Tensor:
        """Return the states that wait in recent memory for their group to fill `[batch]`."""
        if not self.compressed_length:
            return torch.zeros_like(seen)
        return self._evicted(seen) % self.compression_rate

    def filled(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the filled slots of compressed and of recent memory, `[batch]` each."""
        compressed = self.compressed_groups(seen).clamp(max=self.compressed_length)
        committed = seen - self.pending(seen)
        return compressed, torch.minimum(committed, self.memory_length + self.waiting(seen))

    def slot_spans(self, seen: int) -> tuple[list[range], list[range]]:
        """Return the tokens that each slot stands for, counted from the document's start.

        Args:
            seen: Tokens since the document began.

        Returns:
            One range a slot, for compressed and for recent memory, oldest first; an unfilled slot has an empty range.
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
