"""Masks of attention: which slots of [compressed | recent | segment] a query may read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from ..memory import SlotLayout


def slot_mask(config: ModelConfig, layout: SlotLayout, seen: Tensor, queries: int, width: int, like: Tensor) -> Tensor:
    """Return 0 where a query may read a slot, else -inf, `[1 or batch, query, slot]`.

    A query reads filled slots of memory, and its segment up to its own token. The segment has `width` places; lanes
    have seen `seen [batch]` tokens before the first query. One row stands for all lanes where they agree.
    """
    compressed, recent = layout.filled(seen)
    if config.empty_slots == "zeros":
        compressed = torch.full_like(seen, layout.compressed_length)
        recent = layout.memory_length + layout.waiting(seen)
    state = torch.stack([compressed, recent, layout.pending(seen)], dim=1)  # [batch, 3]
    if bool((state == state[0]).all()):
        state = state[:1]
    filled_compressed, filled_recent, pending = state[:, :, None, None].unbind(1)
    lanes, places = state.shape[0], torch.arange(queries)[:, None]
    readable = torch.cat(
        [
            (_age(layout.compressed_length) < filled_compressed).expand(lanes, queries, -1),
            (_age(layout.recent_length) < filled_recent).expand(lanes, queries, -1),
            torch.arange(width) <= pending + places,
        ],
        dim=2,
    )
    mask = torch.zeros(readable.shape, dtype=like.dtype).masked_fill(~readable, float("-inf"))
    return mask.to(like.device)


def _age(slots: int) -> Tensor:
    return slots - 1 - torch.arange(slots)
