"""One layer of the Compressive Transformer (Rae et al. 2019, Algorithm 1): reading, and the commit of its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
from ..errors import CompressiveError
from ..memory import SlotLayout, append_compressed, evicted_groups, new_groups, next_pending, next_recent, place_segment
from ..memory.usage import AttentionSums, add_received, mean_usage, next_usage


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """What all layers of one layout share while a chunk of at most one segment is read."""

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


@dataclass(frozen=True, eq=False)
class TierStates:
    """The memory of one layer, and what its commit measured."""

    compressed: Tensor
    recent: Tensor
    pending: Tensor
    usage: Tensor
    loss: Tensor
    error: Tensor


class Block(nn.Module):
    """Attention, feed-forward network and compression function of one layer."""

    gradient_checkpointing = False
    """Whether backward computes again what `forward` would keep for it; random numbers are drawn alike."""
    compression_in_graph = False
    """Whether the compression function gets a gradient, of zeros, even where no lane commits."""
    compiled = False
    """Whether `read` goes through torch.compile where there is gradient."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.compression_loss = config.compression_loss
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = build_attention(config, layer)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff), nn.GELU(), nn.Linear(config.d_ff, config.d_model)
        )
        self.dropout = nn.Dropout(config.dropout)
        memory = config.of_layer(layer)
        self.compression = (
            build_compression(
                config.compression, config.d_model, memory.compression_rate, heads=config.compression_heads
            )
            if memory.compressed_length
            else None
        )
        if self.compression is not None and memory.memory_length < self.compression.overlap:
            raise CompressiveError(
                f"memory_length ({memory.memory_length}) must be at least {self.compression.overlap} with compression ="
                f" {config.compression!r}, whose groups hold states that are still in recent memory"
            )
        self.matches_rms = (
            config.compressed_scale == "rms" and self.compression is not None and self.compression.scalable
        )
        self.compression_decoder = (
            Decoder(config.d_model, memory.compression_rate)
            if config.compression_loss == "auto-encoding" and self.learns_to_compress
            else None
        )

    @property
    def learns_to_compress(self) -> bool:
        """Whether the compression function has parameters to train."""
        return self.compression is not None and any(p.requires_grad for p in self.compression.parameters())

    @property
    def uses_usage(self) -> bool:
        """Whether the compression function asks for the usage of what it compresses."""
        return self.compression is not None and self.compression.uses_usage

    def forward(self, hidden: Tensor, tiers: TierStates, chunk: ChunkPlan) -> tuple[Tensor, TierStates]:
        """The next layer's input `[batch, chunk, d_model]`, and the layer's memory after the chunk."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            # The reentrant form would lose the gradient of the compression loss, which lies inside of a dataclass.
            result: tuple[Tensor, TierStates] = checkpoint(
                self._read_and_commit, hidden, tiers, chunk, use_reentrant=False
            )
            return result
        return self._read_and_commit(hidden, tiers, chunk)

    def _read_and_commit(self, hidden: Tensor, tiers: TierStates, chunk: ChunkPlan) -> tuple[Tensor, TierStates]:
        states = self.attention_norm(hidden) if self.pre_norm else hidden
        segment = place_segment(chunk.layout, tiers.pending, states, before=chunk.before, after=chunk.after)
        received = AttentionSums(chunk.after - chunk.before) if self.uses_usage else None
        read = _compiled_read() if self.compiled and torch.is_grad_enabled() else Block.read
        slots = (torch.cat([tiers.compressed, tiers.recent], dim=1), segment)
        hidden, projected = read(self, hidden, states, slots, chunk.positions, received)
        if received is not None:
            sums = add_received(tiers.usage, received.of_slots(chunk.layout.compressed_length))
            tiers = replace(tiers, usage=sums)
        tiers = self.commit(tiers, segment.detach(), projected, chunk)
        if self.compression_in_graph and self.learns_to_compress and torch.is_grad_enabled():
            own = [p for name, p in self.named_parameters() if name.startswith("compression")]
            tiers = replace(tiers, loss=tiers.loss + 0 * torch.stack([p.sum() for p in own]).sum())
        return hidden, tiers

    def read(
        self,
        hidden: Tensor,
        states: Tensor,
        slots: tuple[Tensor, Tensor],
        positions: Positions,
        received: AttentionSums | None,
    ) -> tuple[Tensor, Projected]:
        """The next layer's input `[batch, chunk, d_model]`, and what attention made of memory and segment.

        `states` are what attention reads of `hidden`, both `[batch, chunk, d_model]`; `slots` are memory and segment.
        Tensors alone decide what it does: it is one graph.
        """
        projected = self.attention.project(states, *slots)
        attended = hidden + self.dropout(self.attention(projected, positions, received))
        if self.pre_norm:
            hidden = attended + self.dropout(self.feed_forward(self.feed_forward_norm(attended)))
        else:
            attended = self.attention_norm(attended)
            hidden = self.feed_forward_norm(attended + self.dropout(self.feed_forward(attended)))
        return hidden, projected

    def commit(self, tiers: TierStates, segment: Tensor, projected: Projected | None, chunk: ChunkPlan) -> TierStates:
        """The layer's memory after the chunk; lanes whose segment is incomplete only gain pending states.

        `segment [batch, segment, d_model]` are its states so far; `projected` is what attention made of all slots, and
        may be None where nothing is trained. `tiers.usage`, where the compression function uses it, holds sums for
        [recent | segment] already.
        """
        layout, compressed = chunk.layout, tiers.compressed
        pending = next_pending(layout, segment, chunk.after)
        usage = tiers.usage
        if self.uses_usage:
            usage = next_usage(layout, usage, chunk.complete, chunk.after)
        if not bool(chunk.complete.any()):
            return replace(tiers, pending=pending, usage=usage)
        loss, error = tiers.loss, tiers.error
        states = torch.cat([tiers.recent, segment], dim=1)
        if self.compression is not None:
            counts = chunk.new_groups
            groups = evicted_groups(layout, states, chunk.after, counts, self.compression.overlap)
            if self.uses_usage:
                new = self.compression(groups, mean_usage(layout, tiers.usage, chunk.after, counts))
            else:
                new = self.compression(groups)
            evicted = groups[:, :, : layout.compression_rate]
            if self.matches_rms:
                new = match_rms(new, evicted)
            if new.requires_grad:
                if self.compression_loss == "attention" and projected is not None:
                    loss, error = self._attention_reconstruction(segment, projected, new, counts, chunk)
                if self.compression_decoder is not None:
                    squares = auto_encoding(evicted, new, counts=counts, decode=self.compression_decoder)
                    loss, error = mean_and_relative(*squares)
            # Detached, unless the task loss is to reach f_c through what it wrote.
            kept = new if self.compression_loss == "bptt" else new.detach()
            compressed = append_compressed(compressed, kept.to(compressed.dtype), counts)
        recent = next_recent(layout, states, chunk.complete)
        return TierStates(compressed, recent, pending, usage, loss, error)

    def _attention_reconstruction(
        self, segment: Tensor, projected: Projected, new: Tensor, counts: Tensor, chunk: ChunkPlan
    ) -> tuple[Tensor, Tensor]:
        """The loss of Algorithm 2 and its relative error.

        Reading has projected what was evicted, and a segment that is read at once, with the very same weights.
        """
        attention, layout = self.attention, chunk.layout
        if bool((layout.pending(chunk.before) == 0).all()):
            queries = attention.content_queries(projected.queries.detach()[:, : segment.shape[1]])
        else:
            queries = attention.frozen_queries(segment)
        slots = projected.keys_values.detach()[:, layout.compressed_length :]
        evicted = evicted_groups(layout, slots, chunk.after, counts).flatten(1, 2)
        pair = (attention.content_keys_values(evicted), attention.frozen_keys_values(new))
        return mean_and_relative(*attention_reconstruction(queries, *pair, counts=counts))


@cache
def _compiled_read() -> Callable[..., tuple[Tensor, Projected]]:
    """`Block.read` compiled, one function for all blocks: those of equal sizes share what was compiled."""
    return torch.compile(Block.read)
