"""Content of a session's memory, slot by slot: the text that each slot stands for, its age and its attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from ...attention.positions import chunk_positions
from ...data.tokenizers import Tokenizer
from ...errors import CompressiveError
from ...generate import StreamState
from ...memory import Memory
from ...memory.usage import AttentionSums
from ...model import CompressiveTransformer
from ...model.block import Block

TIERS = ("compressed", "recent", "segment")


@torch.no_grad()
def last_attention(model: CompressiveTransformer, memory: Memory, layer: int) -> Tensor | None:
    """Return the attention of the last token that was read.

    Returns:
        Weights of the slots [compressed | recent | segment up to the token], `[slot]`, mean over the
        heads of the layer. None before anything was read, and if the token completed its segment: its slots have moved.
    """
    layout, block, layer_memory = model.layouts[layer], cast(Block, model.blocks[layer]), memory.layers[layer]
    length = int(layout.pending(memory.seen))
    if not length:
        return None
    one = torch.tensor([1])
    positions = chunk_positions(
        model.config, layout, seen=memory.seen - 1, lengths=one, chunk=1, like=model.embedding.weight
    )
    pending = layer_memory.pending[:, :length]
    slots = torch.cat([layer_memory.compressed, layer_memory.recent, pending], dim=1)
    sums = AttentionSums(one)
    # A state in memory is the input of attention, so the token's query can be projected again.
    block.attention(block.attention.project(pending[:, -1:], slots), positions, sums)
    return sums.from_slot(0)[0, :, 0]


def slots_of(model: CompressiveTransformer, tokenizer: Tokenizer, state: StreamState, layer: int) -> dict[str, Any]:
    """Return the filled slots of a layer as JSON data.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        state: State of the session.
        layer: The layer, counted from 0.

    Returns:
        Lengths of the memory, and for "compressed", "recent" and "segment" a list of slots, oldest first:
        "first" and "stop" are the tokens that a slot stands for (-1 is the start of the document), "age" the distance
        of their middle from the last token, "attention" its weight (None: see `last_attention`). If a function keeps
        one state of a group, as most-used does, it is one of these tokens.

    Raises:
        CompressiveError: There is no such layer.
    """
    if not 0 <= layer < model.config.n_layers:
        raise CompressiveError(f"layer ({layer}) must be 0 to {model.config.n_layers - 1}")
    layout, seen = model.layouts[layer], state.seen
    segment = [range(token, token + 1) for token in range(seen - seen % layout.segment_length, seen)]
    tiers = dict(zip(TIERS, (*layout.slot_spans(seen), segment), strict=True))
    attention = last_attention(model, state.memory, layer)
    weights = itertools.repeat(None) if attention is None else iter(attention.tolist())  # of all tiers, in their order
    return {
        "layer": layer,
        "layers": model.config.n_layers,
        "tokens": max(0, seen - 1),
        "segment_length": layout.segment_length,
        "compression": model.config.compression,
        "compression_rate": layout.compression_rate,
        "compressed_length": layout.compressed_length,
        "recent_length": layout.recent_length,
        **{
            tier: [_slot(tokenizer, state, span, weight) for span, weight in zip(spans, weights, strict=False) if span]
            for tier, spans in tiers.items()
        },
    }


def _slot(tokenizer: Tokenizer, state: StreamState, span: range, attention: float | None) -> dict[str, Any]:
    before = state.seen - len(state.tail)
    ids = state.tail[max(0, span.start - before) : max(0, span.stop - before)]
    return {
        "first": span.start - 1,
        "stop": span.stop - 1,
        "text": tokenizer.decode(ids.tolist()),
        "age": state.seen - 1 - (span.start + span.stop - 1) / 2,
        "attention": attention,
    }


def pieces_of(tokenizer: Tokenizer, ids: Iterable[int], nats: Iterable[float]) -> list[tuple[str, float]]:
    """Return a text in pieces of whole characters, with the nats of the tokens of each."""
    decode, pieces, total = tokenizer.decoder(), [], 0.0
    for id, token_nats in zip(ids, nats, strict=True):
        total += token_nats
        if text := decode(id):
            pieces.append((text, total))
            total = 0.0
    if (text := decode.flush()) or total:
        pieces.append((text, total))
    return pieces
