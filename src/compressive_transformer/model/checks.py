"""Checks of what a call of the model is given: tokens, lengths, targets, memory. Evaluation mode for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import CompressiveError
from ..memory import LayerMemory, Memory, SlotLayout
from .embedding import IGNORE_INDEX


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the `with` block, and restore the mode of the module afterwards, after errors too."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def checked_lengths(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """Return `lengths [batch]` on the CPU; without them the whole chunk of `tokens [batch, chunk]`."""
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32) or 0 in tokens.shape:
        raise CompressiveError(
            f"tokens must be integers [batch, chunk] with at least one of each, got {tokens.dtype} {list(tokens.shape)}"
        )
    batch, chunk = tokens.shape
    if lengths is None:
        return torch.full((batch,), chunk)
    if lengths.shape != (batch,) or lengths.dtype != torch.int64:
        raise CompressiveError(f"lengths must be int64 [batch = {batch}], got {lengths.dtype} {list(lengths.shape)}")
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
    """Return `targets [batch, chunk]` with those of padding ignored."""
    if targets is None:
        return None
    if targets.shape != tokens.shape or targets.dtype != torch.int64:
        raise CompressiveError(
            f"targets must be int64 {list(tokens.shape)} as the tokens, got {targets.dtype} {list(targets.shape)}"
        )
    padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
    return targets.masked_fill(padding.to(targets.device), IGNORE_INDEX)


def check_memory(config: ModelConfig, memory: Memory, *, batch_size: int, like: Tensor, usage: list[bool]) -> None:
    """Raise CompressiveError unless `memory` belongs to a model of this config and has `batch_size` lanes.

    `like` has the model's dtype and device; `usage` says for each layer if it counts attention.
    """
    way_out = f"start from model.empty_memory({batch_size})"
    if len(memory.layers) != config.n_layers:
        raise CompressiveError(
            f"memory does not fit: it must have {config.n_layers} layers, got {len(memory.layers)}; {way_out}"
        )
    seen = memory.seen
    if seen.shape != (batch_size,) or seen.dtype != torch.int64 or bool((seen < 0).any()):
        raise CompressiveError(
            f"memory does not fit: seen must be int64 [batch = {batch_size}], 0 or more, "
            f"got {seen.dtype} {list(seen.shape)}; {way_out}"
        )
    for number, (layer, counts) in enumerate(zip(memory.layers, usage, strict=True)):
        wrong = _wrong_states(config, layer, seen, number, like) or _wrong_usage(layer, number, counts)
        if wrong:
            raise CompressiveError(f"memory does not fit: {wrong}; {way_out}")


def _wrong_states(config: ModelConfig, layer: LayerMemory, seen: Tensor, number: int, like: Tensor) -> str:
    layout = SlotLayout.of(config, number)
    states = (layer.compressed, layer.recent, layer.pending)
    for tensor in states:
        # Autocast leaves states of a lower precision than parameters, which are read without a cast.
        fits = tensor.is_floating_point() and torch.promote_types(tensor.dtype, like.dtype) == like.dtype
        if not fits or tensor.device != like.device:
            return (
                f"the model is {like.dtype} on {like.device}, states are {tensor.dtype} on {tensor.device}, "
                "move them with memory.to(...)"
            )
    shapes = [tuple(tensor.shape) for tensor in states]
    lengths = (layout.compressed_length, layout.recent_length, int(layout.pending(seen).max()))
    expected = [(len(seen), length, config.d_model) for length in lengths]
    wide_enough = shapes[2] == (len(seen), *shapes[2][1:2], config.d_model) and shapes[2][1] >= lengths[2]
    if shapes[:2] == expected[:2] and wide_enough:
        return ""
    return (
        f"compressed, recent and pending states of layer {number} must be {expected}, "
        f"[batch, slot, d_model] each, got {shapes}"
    )


def _wrong_usage(layer: LayerMemory, number: int, counts: bool) -> str:
    expected = (len(layer.recent), layer.recent.shape[1] + layer.pending.shape[1], 1) if counts else None
    shape = None if layer.usage is None else tuple(layer.usage.shape)
    if shape == expected:
        return ""
    return (
        f"usage of layer {number} must be {expected}, [batch, slot, 1], got {shape}; the compression function decides"
    )
