"""One layer of the Compressive Transformer (Rae et al. 2019, Algorithm 1): read the segment, then commit its states.

`tests/reference.py` has the same in plain loops over tokens and slots; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..attention import Projected, build_attention
from ..attention.positions import Positions
from ..compression import (
    Decoder,
    attention_reconstruction,
    auto_encoding,
    build_compression,
    match_rms,
    mean_and_relative,
)
from ..config import ModelConfig
from ..memory import (
    AttentionSums,
    LayerMemory,
    SlotLayout,
    add_received,
    append_compressed,
    evicted_groups,
    mean_usage,
    new_groups,
    next_pending,
    next_recent,
    next_usage,
    place_segment,
)


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Ages, places and positions of a chunk of at most one segment, the same in all layers of one layout."""

    layout: SlotLayout
    before: Tensor
    """Tokens seen before the chunk `[batch]`."""
    after: Tensor
    """Tokens seen after it `[batch]`."""
    positions: Positions

    @cached_property
    def complete(self) -> Tensor:
        """Lanes whose segment the chunk completes `[batch]`."""
        return self.layout.pending(self.after) < self.layout.pending(self.before) + (self.after - self.before)

    @cached_property
    def new_groups(self) -> Tensor:
        """Groups of each lane that the chunk's commit compresses `[batch]`."""
        return new_groups(self.layout, before=self.before, after=self.after)


class CompressionLoss(NamedTuple):
    """Loss that trains f_c in one commit; scalars."""

    loss: Tensor
    relative_error: Tensor
    """Squared error / squared target, without gradient."""


class Block(nn.Module):
    """Attention, feed-forward network and compression function of one layer."""

    compiled = False
    """True if `transform` runs through torch.compile where there is gradient."""

    def __init__(self, config: ModelConfig, layer: int, attention: str = "auto") -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.compression_loss = config.compression_loss
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = build_attention(config, layer, attention)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff), nn.GELU(), nn.Linear(config.d_ff, config.d_model)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.compression = build_compression(config, layer)
        self.matches_rms = (
            config.compressed_scale == "rms" and self.compression is not None and not self.compression.selects
        )
        self.compression_decoder = (
            Decoder(config.d_model, config.of_layer(layer).compression_rate)
            if config.compression_loss == "auto-encoding" and self.learns_to_compress
            else None
        )

    @property
    def learns_to_compress(self) -> bool:
        """True if the compression function has parameters to train."""
        return self.compression is not None and any(p.requires_grad for p in self.compression.parameters())

    @property
    def uses_usage(self) -> bool:
        """True if the compression function asks for the usage of the states that it compresses."""
        return self.compression is not None and self.compression.uses_usage

    def forward(
        self, hidden: Tensor, memory: LayerMemory, plan: ChunkPlan
    ) -> tuple[Tensor, LayerMemory, CompressionLoss | None]:
        """Read a chunk, then commit the segments that it completes (Algorithm 1).

        Args:
            hidden: Input of the layer, `[batch, chunk, d_model]`.
            memory: Memory of the layer before the chunk.
            plan: Ages and positions of the chunk.

        Returns:
            The next layer's input `[batch, chunk, d_model]`, the layer's memory after the chunk, and the loss of the
            commit, None where nothing was compressed or f_c has no gradient.
        """
        states = self.attention_norm(hidden) if self.pre_norm else hidden
        segment = place_segment(plan.layout, memory.pending, states, before=plan.before, after=plan.after)
        hidden, projected, usage = self.read(hidden, states, memory, segment, plan)
        memory, loss = self.commit(replace(memory, usage=usage), segment.detach(), projected, plan)
        return hidden, memory, loss

    def read(
        self, hidden: Tensor, states: Tensor, memory: LayerMemory, segment: Tensor, plan: ChunkPlan
    ) -> tuple[Tensor, Projected, Tensor | None]:
        """Return the next layer's input, the projections of all slots, and the usage of [recent | segment]."""
        sums = AttentionSums(plan.after - plan.before) if self.uses_usage else None
        slots = (torch.cat([memory.compressed, memory.recent], dim=1), segment)
        transform = _compiled_transform() if self.compiled and torch.is_grad_enabled() else Block.transform
        hidden, projected = transform(self, hidden, states, slots, plan.positions, sums)
        if sums is None or memory.usage is None:
            return hidden, projected, None
        return hidden, projected, add_received(memory.usage, sums.from_slot(plan.layout.compressed_length))

    def transform(
        self,
        hidden: Tensor,
        states: Tensor,
        slots: tuple[Tensor, Tensor],
        positions: Positions,
        on_weights: AttentionSums | None,
    ) -> tuple[Tensor, Projected]:
        """Return the next layer's input `[batch, chunk, d_model]`, and the projections of memory and segment.

        Tensors alone decide what it does, so torch.compile makes one graph of it. `states` are what attention reads of
        `hidden`, both `[batch, chunk, d_model]`; `slots` are memory and segment.
        """
        projected = self.attention.project(states, *slots)
        attended = hidden + self.dropout(self.attention(projected, positions, on_weights))
        if self.pre_norm:
            hidden = attended + self.dropout(self.feed_forward(self.feed_forward_norm(attended)))
        else:
            attended = self.attention_norm(attended)
            hidden = self.feed_forward_norm(attended + self.dropout(self.feed_forward(attended)))
        return hidden, projected

    def commit(
        self, memory: LayerMemory, segment: Tensor, projected: Projected | None, plan: ChunkPlan
    ) -> tuple[LayerMemory, CompressionLoss | None]:
        """Return the memory after the chunk, and the compression loss; lanes in mid-segment only gain pending states.

        `segment [batch, segment, d_model]` holds its states so far; `projected` are the projections of all slots, None
        where nothing is trained. `memory.usage`, where f_c uses it, belongs to [recent | segment] already.
        """
        layout = plan.layout
        pending, usage = next_pending(layout, segment, plan.after), None
        if self.uses_usage and memory.usage is not None:
            usage = next_usage(layout, memory.usage, plan.complete, plan.after)
        if not bool(plan.complete.any()):
            return replace(memory, pending=pending, usage=usage), None
        states = torch.cat([memory.recent, segment], dim=1)
        recent = next_recent(layout, states, plan.complete)
        if self.compression is None:
            return LayerMemory(memory.compressed, recent, pending, usage), None
        evicted, new = self.compress(states, memory.usage, plan)
        loss = self.reconstruction_loss(segment, projected, evicted, new, plan) if new.requires_grad else None
        # Detached, unless the task loss is to reach f_c through what it wrote.
        stored = new if self.compression_loss == "bptt" else new.detach()
        compressed = append_compressed(memory.compressed, stored.to(memory.compressed.dtype), plan.new_groups)
        return LayerMemory(compressed, recent, pending, usage), loss

    def compress(self, states: Tensor, usage: Tensor | None, plan: ChunkPlan) -> tuple[Tensor, Tensor]:
        """Return evicted groups `[batch, group, rate, d_model]` and compressed states `[batch, group, d_model]`."""
        assert self.compression is not None
        counts = plan.new_groups
        groups = evicted_groups(plan.layout, states, plan.after, counts, self.compression.overlap)
        if self.uses_usage and usage is not None:
            new = self.compression(groups, mean_usage(plan.layout, usage, plan.after, counts))
        else:
            new = self.compression(groups)
        evicted = groups[:, :, : plan.layout.compression_rate]
        return evicted, match_rms(new, evicted) if self.matches_rms else new

    def reconstruction_loss(
        self, segment: Tensor, projected: Projected | None, evicted: Tensor, new: Tensor, plan: ChunkPlan
    ) -> CompressionLoss | None:
        """Return the loss that the config names, Algorithm 2 or auto-encoding; None for "bptt" and "none"."""
        if self.compression_loss == "attention" and projected is not None:
            squares = self._attention_reconstruction(segment, projected, new, plan)
        elif self.compression_decoder is not None:
            squares = auto_encoding(evicted, new, counts=plan.new_groups, decode=self.compression_decoder)
        else:
            return None
        return CompressionLoss(*mean_and_relative(*squares))

    def _attention_reconstruction(
        self, segment: Tensor, projected: Projected, new: Tensor, plan: ChunkPlan
    ) -> tuple[Tensor, Tensor]:
        """Return squared error and squared target of Algorithm 2.

        Reading has projected the evicted states, and a segment that is read in one call, with the very same weights.
        """
        attention, layout, counts = self.attention, plan.layout, plan.new_groups
        if bool((layout.pending(plan.before) == 0).all()):
            queries = attention.content_queries(projected.queries.detach()[:, : segment.shape[1]])
        else:
            queries = attention.frozen_queries(segment)
        slots = projected.keys_values.detach()[:, layout.compressed_length :]
        evicted = evicted_groups(layout, slots, plan.after, counts).flatten(1, 2)
        pair = (attention.content_keys_values(evicted), attention.frozen_keys_values(new))
        return attention_reconstruction(queries, *pair, counts=counts)


@cache
def _compiled_transform() -> Callable[..., tuple[Tensor, Projected]]:
    """Return `Block.transform` compiled, one function for all blocks: those of equal sizes share the result."""
    return torch.compile(Block.transform)
