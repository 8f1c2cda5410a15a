"""What a call of the model is given, checked: tokens, lengths, targets."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CompressiveError
from .embedding import IGNORE_INDEX


def checked_lengths(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """`lengths [batch]` on the CPU, the whole chunk of `tokens [batch, chunk]` where nothing is said."""
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32) or 0 in tokens.shape:
        raise CompressiveError(
            f"tokens must be integers [batch, chunk] with at least one of each, got {tokens.dtype} {list(tokens.shape)}"
        )
    batch_size, chunk = tokens.shape
    if lengths is None:
        return torch.full((batch_size,), chunk)
    if lengths.shape != (batch_size,) or lengths.dtype != torch.int64:
        raise CompressiveError(
            f"lengths must be int64 [batch = {batch_size}], got {lengths.dtype} {list(lengths.shape)}"
        )
    lengths = lengths.cpu()
    if not 0 <= int(lengths.min()) <= int(lengths.max()) <= chunk:
        raise CompressiveError(f"lengths must lie in 0 .. {chunk}, the chunk's length, got {lengths.tolist()}")
    return lengths


def check_token_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise CompressiveError unless all are ids of the vocabulary, where that can be seen without waiting."""
    # Elsewhere than on the CPU the look would wait for the device; there the embedding itself refuses, less clearly.
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise CompressiveError(
            f"tokens and targets must be ids of 0 .. {vocab_size - 1}, got {int(ids.min())} .. {int(ids.max())}; "
            "encode text with the tokenizer that the model was trained with"
        )


def checked_targets(tokens: Tensor, targets: Tensor | None, lengths: Tensor) -> Tensor | None:
    """`targets [batch, chunk]` with those of padding ignored."""
    if targets is None:
        return None
    if targets.shape != tokens.shape or targets.dtype != torch.int64:
        raise CompressiveError(
            f"targets must be int64 {list(tokens.shape)} as the tokens, got {targets.dtype} {list(targets.shape)}"
        )
    padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
    return targets.masked_fill(padding.to(targets.device), IGNORE_INDEX)
