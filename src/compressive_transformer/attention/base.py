"""Projections that every form of attention shares, and their use as constants in Algorithm 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import ModelConfig

WeightsCallback = Callable[[Tensor], None]
"""Callback for attention weights, called with those of one head after another, `[batch, query, slot]`, detached."""


class Projected(NamedTuple):
    """Projections of states, before heads and positions; the compression loss reads them too."""

    queries: Tensor
    """`[batch, query, d_model]`."""
    keys_values: Tensor
    """`[batch, slot, 2 * d_model]`: keys, then values."""


class Attention(nn.Module):
    """Projections of multi-head attention; a subclass adds how scores depend on positions.

    Each call projects hidden states again, so a slot is always read at the place where it stands now.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.d_head = config.d_model // config.n_heads
        self.query = nn.Linear(config.d_model, config.d_model, bias=False)
        self.key_value = nn.Linear(config.d_model, 2 * config.d_model, bias=False)
        self.output = nn.Linear(config.d_model, config.d_model, bias=False)

    def project(self, states: Tensor, *slots: Tensor) -> Projected:
        """Return queries of `states [batch, query, d_model]`, keys and values of slots `[batch, slot, d_model]`.

        Slots come in several tensors, so that backward does not compute a gradient for those that want none.
        """
        return Projected(self.query(states), torch.cat([self.key_value(part) for part in slots], dim=1))

    def keys_values(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of slots, `[batch, slot, head, d_head]` each."""
        return self._split(self.key_value(slots))

    def content_queries(self, queries: Tensor) -> Tensor:
        """Return scaled queries `[batch, head, query, d_head]` of projected ones, for Algorithm 2.

        That loss compares what attention finds by content: neither queries nor keys know positions there, and
        none is rotated.
        """
        return self._scaled(self._heads(queries), queries).transpose(1, 2)

    def content_keys_values(self, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[batch, head, slot, d_head]` of projected ones, for Algorithm 2."""
        keys, values = self._split(keys_values)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def frozen_queries(self, states: Tensor) -> Tensor:
        """Return `content_queries` of states, without any gradient."""
        return self.content_queries(functional.linear(states, self.query.weight).detach())

    def frozen_keys_values(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return `content_keys_values` of slots; only `slots` take gradient."""
        return self.content_keys_values(functional.linear(slots, self.key_value.weight.detach()))

    def _split(self, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = keys_values.chunk(2, dim=-1)
        return self._heads(keys), self._heads(values)

    def _heads(self, states: Tensor) -> Tensor:
        heads: Tensor = states.unflatten(-1, (self.n_heads, self.d_head))
        return heads

    def _scaled(self, queries: Tensor, like: Tensor) -> Tensor:
        scale: float = self.d_head**-0.5
        return (queries * scale).to(like.dtype)


@torch.no_grad()
def report_weights(on_weights: WeightsCallback, queries: Tensor, keys: Tensor, mask: Tensor) -> None:
    """Compute the weights that fused kernels do not return; `[batch, head, place, d_head]`, queries scaled."""
    for head in torch.softmax(queries @ keys.transpose(2, 3) + mask, dim=-1).unbind(1):
        on_weights(head)
