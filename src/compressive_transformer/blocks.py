"""One layer of the Compressive Transformer (Rae et al. 2019, Algorithm 1): reading, and the commit of its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .attention import RelativeAttention
from .compression import attention_reconstruction, build_compression
from .config import ModelConfig
from .memory import (
    SlotLayout,
    append_compressed,
    evicted_groups,
    new_groups,
    next_pending,
    next_recent,
    place_segment,
)
from .positions import Positions


@dataclass(frozen=True, eq=False)
class Chunk:
    """What all layers of one layout share while a chunk of at most one segment is read."""

    layout: SlotLayout
    before: Tensor
    """Tokens seen before the chunk `[batch]`."""
    after: Tensor
    """Tokens seen after it `[batch]`."""
    positions: Positions

    @property
    def complete(self) -> Tensor:
        """Lanes whose segment the chunk completes `[batch]`."""
        return self.layout.pending(self.after) < self.layout.pending(self.before) + (self.after - self.before)


@dataclass(frozen=True, eq=False)
class Tiers:
    """The memory of one layer, and what its commit measured."""

    compressed: Tensor
    recent: Tensor
    pending: Tensor
    loss: Tensor
    error: Tensor


class Block(nn.Module):
    """Attention, feed-forward network and compression function of one layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.reconstructs = config.compression_loss == "attention"
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = RelativeAttention(config, layer)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff), nn.GELU(), nn.Linear(config.d_ff, config.d_model)
        )
        self.dropout = nn.Dropout(config.dropout)
        memory = config.of_layer(layer)
        self.compression = (
            build_compression(config.compression, config.d_model, memory.compression_rate)
            if memory.compressed_length
            else None
        )

    def forward(self, hidden: Tensor, tiers: Tiers, chunk: Chunk) -> tuple[Tensor, Tiers]:
        """The next layer's input `[batch, chunk, d_model]`, and the layer's memory after the chunk."""
        states = self.attention_norm(hidden) if self.pre_norm else hidden
        segment = place_segment(chunk.layout, tiers.pending, states, before=chunk.before, after=chunk.after)
        slots = torch.cat([tiers.compressed, tiers.recent, segment], dim=1)
        attended = hidden + self.dropout(self.attention(states, slots, chunk.positions))
        if self.pre_norm:
            hidden = attended + self.dropout(self.feed_forward(self.feed_forward_norm(attended)))
        else:
            attended = self.attention_norm(attended)
            hidden = self.feed_forward_norm(attended + self.dropout(self.feed_forward(attended)))
        return hidden, self._commit(tiers, slots.detach(), chunk)

    def _commit(self, tiers: Tiers, slots: Tensor, chunk: Chunk) -> Tiers:
        """The layer's memory after the chunk; lanes whose segment is incomplete only gain pending states."""
        layout, compressed = chunk.layout, tiers.compressed
        states = slots[:, layout.compressed_length :]  # [batch, recent + segment, d_model]
        segment = states[:, layout.recent_length :]
        pending = next_pending(layout, segment, chunk.after)
        if not bool(chunk.complete.any()):
            return replace(tiers, pending=pending)
        loss, error = tiers.loss, tiers.error
        if self.compression is not None:
            evicted = evicted_groups(layout, states, chunk.after)
            counts = new_groups(layout, before=chunk.before, after=chunk.after)
            new = self.compression(evicted)
            if self.reconstructs and new.requires_grad:
                loss, error = attention_reconstruction(
                    self.attention.frozen_queries(segment),
                    evicted,
                    new,
                    counts=counts,
                    project=self.attention.frozen_keys_values,
                )
            compressed = append_compressed(compressed, new.detach().to(compressed.dtype), counts)
        recent = next_recent(layout, states, chunk.complete)
        return Tiers(compressed, recent, pending, loss, error)
