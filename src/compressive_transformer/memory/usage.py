"""Usage: the mean attention that a state received while it could be read, for functions that ask (most-used).

A state can be read from its own token on until it is evicted. Its usage is the mean of its attention weights over
all heads and all those tokens. Memory carries the sums, `[batch, slot, 1]` a layer as if they were states one number
wide; how many tokens they are sums over follows from the places of the slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .commit import evicted_groups, next_pending, next_recent
from .layout import SlotLayout


class AttentionSums:
    """Sums of the attention that each slot receives from a chunk of tokens, as a mean over heads.

    It is a callback for attention, called with the weights of one head after another.
    """

    def __init__(self, lengths: Tensor) -> None:
        """Start at zero; lane b reads `lengths[b]` tokens, later rows of weights are padding."""
        self.lengths = lengths
        self.heads = 0
        self.sums: Tensor | float = 0.0

    def __call__(self, weights: Tensor) -> None:
        """Add one head's `weights [batch, query, slot]`."""
        weights = weights.detach()
        # Sums over hundreds of tokens lose too much in half precision.
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        real = torch.arange(weights.shape[1]) < self.lengths[:, None]
        self.sums = self.sums + torch.bmm(real[:, None].to(weights.device, weights.dtype), weights)
        self.heads += 1

    def from_slot(self, first: int) -> Tensor:
        """Return the sums `[batch, slot, 1]` of the slots from place `first` on."""
        assert isinstance(self.sums, Tensor)
        return (self.sums[:, :, first:] / self.heads).transpose(1, 2)


def add_received(usage: Tensor, received: Tensor) -> Tensor:
    """Return the sums `[batch, recent + segment, 1]` after a chunk; `usage` belongs to [recent | pending] before it."""
    slots = received.shape[1]
    # Places of a lane beyond its pending states hold 0 so far.
    return functional.pad(usage, (0, 0, 0, slots - usage.shape[1])) + received


def mean_usage(layout: SlotLayout, sums: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
    """Return the usage of the evicted states, `[batch, group, compression_rate]`, -inf in padding.

    `sums [batch, recent + segment, 1]` belong to the states of `evicted_groups`, of which a lane's newest
    `counts [batch]` groups are real.
    """
    slots = sums.shape[1]
    # The newest state was read by its own token alone, the one before it by two, and so on.
    tokens = slots - torch.arange(slots, device=sums.device)
    groups = evicted_groups(layout, sums / tokens[:, None], seen, counts).squeeze(-1)
    padding = torch.arange(groups.shape[1]) < groups.shape[1] - counts[:, None]
    return groups.masked_fill(padding[:, :, None].to(groups.device), float("-inf"))


def next_usage(layout: SlotLayout, sums: Tensor, complete: Tensor, seen: Tensor) -> Tensor:
    """Return the part of `sums [batch, recent + segment, 1]` that belongs to the next [recent | pending]."""
    recent = next_recent(layout, sums, complete)
    pending = next_pending(layout, sums[:, layout.recent_length :], seen)
    return torch.cat([recent, pending], dim=1)
