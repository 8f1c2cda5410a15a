"""What a session's memory holds, slot by slot: the text that each slot stands for, and who attends to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from ...attention.positions import chunk_positions
from ...data.tokenizers import Tokenizer
from ...errors import CompressiveError
from ...memory import Memory
from ...memory.usage import AttentionSums
from ...model import CompressiveTransformer
from ...model.block import Block
from .state import State


@torch.no_grad()
def last_attention(model: CompressiveTransformer, memory: Memory, layer: int) -> Tensor | None:
    """Attention of the last token that was read to each slot, `[slot]`, a mean over the heads of a layer.

    Slots are [compressed | recent | segment up to the token itself]. None where the token completed its segment, since
    the slots that it attended to have moved; and before anything was read.
    """
    layout, block = model.layouts[layer], cast(Block, model.blocks[layer])
    run_job = int(layout.pending(memory.seen))
    if not run_job:
        return None
    one = torch.tensor([1])
    places = chunk_positions(
        model.config, layout, seen=memory.seen - 1, lengths=one, chunk=1, like=model.embedding.weight
    )
    pending = memory.layers[layer].pending[:, :run_job]
    slots = torch.cat([memory.layers[layer].compressed, memory.layers[layer].recent, pending], dim=1)
    received = AttentionSums(one)
    # A state in memory is what attention read of its token, so its query is made from it once more.
    block.attention(block.attention.project(pending[:, -1:], slots), places, received)
    return received.from_slot(0)[0, :, 0]


def slots_of(model: CompressiveTransformer, tokenizer: Tokenizer, state: State, layer: int) -> dict[str, Any]:
    """Return the filled slots of a layer, counted from 0, oldest first, ready for JSON.

    first, stop: the tokens of the text that a slot stands for; -1 is the start, which stands before the text. Where one
        state of a group is kept as it is, as most-used does, it is one of these.
    age: tokens from the middle of these to the last one that was read.
    attention: share that the last token gives it, a mean over heads; None as `last_attention` says.

    Raises CompressiveError for a layer that there is not.
    """
    if not 0 <= layer < model.config.n_layers:
        raise CompressiveError(f"layer ({layer}) must be 0 to {model.config.n_layers - 1}")
    layout, seen = model.layouts[layer], state.seen
    run_job = seen % layout.segment_length
    compressed, recent = layout.slot_spans(seen)
    segment = [range(token, token + 1) for token in range(seen - run_job, seen)]
    attention = last_attention(model, state.memory, layer)
    weights = [None] * (len(compressed) + len(recent) + run_job) if attention is None else attention.tolist()
    ids, before = state.tail.tolist(), seen - len(state.tail)

    def describe(spans: list[range], first: int) -> list[dict[str, Any]]:
        return [
            {
                "first": span.start - 1,
                "stop": span.stop - 1,
                "text": tokenizer.decode(ids[max(0, span.start - before) : max(0, span.stop - before)]),
                "age": seen - 1 - (span.start + span.stop - 1) / 2,
                "attention": weight,
            }
            for span, weight in zip(spans, weights[first:], strict=False)
            if span
        ]

    return {
        "layer": layer,
        "layers": model.config.n_layers,
        "tokens": max(0, seen - 1),
        "segment_length": layout.segment_length,
        "compression": model.config.compression,
        "compression_rate": layout.compression_rate,
        "compressed_length": layout.compressed_length,
        "recent_length": layout.recent_length,
        "compressed": describe(compressed, 0),
        "recent": describe(recent, len(compressed)),
        "segment": describe(segment, len(compressed) + len(recent)),
    }


def pieces_of(tokenizer: Tokenizer, ids: Iterable[int], nats: Iterable[float]) -> list[tuple[str, float]]:
    """Text in pieces of whole characters, and the nats of the tokens of each."""
    decode, pieces, sum_ = tokenizer.decoder(), [], 0.0
    for id, own in zip(ids, nats, strict=True):
        sum_ += own
        if text := decode(id):
            pieces.append((text, sum_))
            sum_ = 0.0
    if (text := decode.flush()) or sum_:
        pieces.append((text, sum_))
    return pieces
