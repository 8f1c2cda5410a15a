"""The loop in which a model reads documents: a segment of each lane at a time, without dropout, with memory."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.positions import PositionCache
from ..data import Segment, Split
from ..data.lanes import Lanes
from ..errors import CompressiveError
from ..memory import Memory
from ..model import IGNORE_INDEX, CompressiveTransformer, Output, evaluation_mode


class ReadSegment(NamedTuple):
    """A segment of each lane that a model has read."""

    segment: Segment
    """Tokens, targets and documents, on the CPU."""
    memory: Memory
    """Memory before the segment, empty in lanes that start a document."""
    output: Output
    """Logits and memory after it; nats of the targets, if they were asked for."""


def read_split(
    model: CompressiveTransformer,
    split: Split,
    *,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    with_targets: bool = False,
) -> Generator[ReadSegment, None, None]:
    """Read each document of a split from its start; see `read_segments` for what the iterator does.

    Args:
        model: The model.
        split: The documents.
        batch_size: Documents that are read side by side, over all processes.
        rank: Number of this process, which reads its share of the documents.
        world: Number of processes.
        with_targets: True to get the nats of targets. With an adaptive vocabulary there are no logits then.

    Returns:
        An iterator over the segments.

    Raises:
        CompressiveError: The split was prepared with another tokenizer than the model's, or `batch_size` is less than
            the number of processes.
    """
    split.check_token_ids(model.config.vocab_size)
    if batch_size < world:
        raise CompressiveError(f"batch_size ({batch_size}) must be at least the number of processes ({world})")
    # More lanes than documents would only be idle.
    share = min(batch_size, len(split.documents) + world - 1) // world
    lanes = Lanes(split, batch_size=share * world, length=model.config.segment_length, rank=rank, world=world)
    return read_segments(model, lanes, with_targets=with_targets)


def read_segments(
    model: CompressiveTransformer, segments: Iterable[Segment], *, with_targets: bool = False, gradient: bool = False
) -> Generator[ReadSegment, None, None]:
    """Read segments with memory, one after another, each when the iterator is asked for it.

    The model is in evaluation mode until the iterator ends, and in its former mode afterwards. A `for` loop over the
    call ends it in any case, also by `break` or an error; an iterator that has a name needs `contextlib.closing`:

        for segment, memory, output in read_segments(model, segments):
            ...

    Args:
        model: The model. Without `gradient` its weights must stay the same until the iterator ends.
        segments: Segments of the same lanes, for example `lanes(split, ...)`; memory is reset where they say so.
        with_targets: True to get the nats of targets. With an adaptive vocabulary there are no logits then.
        gradient: True to record the gradient of each segment; it does not reach earlier segments.

    Yields:
        The segment, the memory before it, and the output.
    """
    device = model.embedding.weight.device
    memory, cache = None, None if gradient else PositionCache()
    with evaluation_mode(model):
        for segment in segments:
            memory = model.empty_memory(len(segment.starts)) if memory is None else memory.reset(segment.starts)
            with torch.set_grad_enabled(gradient):
                targets = segment.targets.to(device) if with_targets else None
                output = model(segment.tokens.to(device), memory, segment.lengths, targets, position_cache=cache)
            yield ReadSegment(segment, memory, output)
            memory = output.memory.detach()


def text_segments(
    tokens: Tensor, targets: Tensor, *, lengths: Tensor, segment_length: int, documents: Tensor | None = None
) -> Iterator[Segment]:
    """Yield the segments of texts in memory, one text per lane, each the start of a document.

    Args:
        tokens: Inputs, `[batch, tokens]`: the start id and all tokens of a text but the last.
        targets: Tokens to predict, `[batch, tokens]`; -100 for those that are not scored.
        lengths: Lengths of the texts (tokens), `[batch]`.
        segment_length: Length of a segment (tokens).
        documents: Number of the text in each lane, `[batch]`, -1 for a lane without a text; by default 0, 1, ...
    """
    documents = torch.arange(len(tokens)) if documents is None else documents
    pieces = zip(tokens.split(segment_length, 1), targets.split(segment_length, 1), strict=True)
    for number, (inputs, wanted) in enumerate(pieces):
        yield Segment(
            tokens=inputs,
            targets=wanted,
            starts=torch.full((len(tokens),), number == 0),
            lengths=(lengths - number * segment_length).clamp(0, inputs.shape[1]),
            documents=documents,
            total_targets=int((wanted != IGNORE_INDEX).sum()),
        )
