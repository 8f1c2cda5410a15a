"""Scores of a split: each document is read from its start, each token is predicted once."""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Callable, Generator, Sequence
from importlib.metadata import version
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import digest
from ..config import PerLayer
from ..config.toml import to_dict
from ..data import Split
from ..model import CompressiveTransformer, with_lengths
from .buckets import Buckets, Tally
from .reading import ReadSegment, read_split
from .result import Evaluation, Score


def evaluate(
    model: CompressiveTransformer,
    split: Split,
    *,
    batch_size: int = 8,
    by: Sequence[Buckets] = (),
    rank: int = 0,
    world: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Score each document of a split, read from its start with memory; each token is predicted once.

    Args:
        model: The model; nothing is dropped out while it is scored.
        split: The documents.
        batch_size: Documents that are read side by side, over all processes. The result does not depend on it.
        by: Parts of the text to score too, see `ByPosition` and `ByFrequency`.
        rank: Number of this process, which reads its share of the documents. All processes return the whole result.
        world: Number of processes.
        progress: Called after each segment with the number of tokens that were scored.

    Returns:
        Scores of the split, of its documents and of its parts. For other memory lengths see `sweep`.

    Raises:
        CompressiveError: The split was prepared with another tokenizer than the model's, `batch_size` is less than the
            number of processes, or a part is made for another corpus.
    """
    reading = read_split(model, split, batch_size=batch_size, rank=rank, world=world, with_targets=True)
    tallies = [Tally(buckets, split) for buckets in by]
    nats = score_documents(split, reading, tallies=tallies, progress=progress)
    if world > 1:
        for sums in (nats, *(tally.sums for tally in tallies)):
            total = sums.to(model.embedding.weight.device)
            torch.distributed.all_reduce(total)
            sums.copy_(total)
    return evaluation_of(model, split, nats, tallies)


def sweep(
    model: CompressiveTransformer,
    split: Split,
    *,
    memory_lengths: Sequence[PerLayer] = (),
    compressed_lengths: Sequence[PerLayer] = (),
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> list[Evaluation]:
    """Score the same network with several memory lengths (Tables 8 and 9 of the paper).

    Args:
        model: The model. A model trained without compressed memory cannot get one, see `with_lengths`.
        split: The documents.
        memory_lengths: Lengths of recent memory (slots), each one number or one for each layer; empty for the model's.
        compressed_lengths: Lengths of compressed memory, in the same form.
        batch_size: Documents that are read side by side.
        progress: Called after each segment with the number of tokens that were scored.

    Returns:
        One evaluation for each memory length with each compressed length, compressed lengths varying fastest.

    Raises:
        CompressiveError: A length does not fit the model (before anything is read), or as `evaluate`.
    """
    kinds = {"memory_length": memory_lengths, "compressed_length": compressed_lengths}
    given = {name: lengths for name, lengths in kinds.items() if lengths}
    models = [with_lengths(model, **dict(zip(given, lengths, strict=True))) for lengths in product(*given.values())]
    return [evaluate(changed, split, batch_size=batch_size, progress=progress) for changed in models]


def score_documents(
    split: Split,
    reading: Generator[ReadSegment, None, None],
    *,
    tallies: Sequence[Tally] = (),
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the nats of each document `[documents]`, 0 for those that other processes read; add them to `tallies`."""
    nats = torch.zeros(len(split.documents), dtype=torch.float64)
    with contextlib.closing(reading):  # restores the mode of the model when `progress` raises
        for segment, memory, output in reading:
            assert output.nats is not None
            scored, busy = output.nats.detach().cpu(), segment.documents >= 0
            nats.index_add_(0, segment.documents[busy], scored.sum(1)[busy])
            for tally in tallies:
                tally.add(segment, memory.seen, scored)
            if progress is not None:
                progress(segment.total_targets)
    return nats


def evaluation_of(
    model: CompressiveTransformer, split: Split, nats: Tensor, tallies: Sequence[Tally], **conditions: Any
) -> Evaluation:
    """Return the evaluation with `nats [documents]` and tallies; conditions of model and split are added."""
    scores = [
        (document.title, Score(lost, *_counts(split, number)))
        for number, (document, lost) in enumerate(zip(split.documents, nats.tolist(), strict=True))
    ]
    total = Score(
        nats=math.fsum(score.nats for _, score in scores),
        tokens=sum(score.tokens for _, score in scores),
        words=sum(score.words for _, score in scores),
        bytes=sum(score.bytes for _, score in scores),
    )
    conditions = {
        **conditions,
        "split": split.name,
        "corpus_fingerprint": split.fingerprint,
        "lossless": split.lossless,
        "benchmark": _benchmark(split),
        "averaging": "sums over all documents: exp(nats / words), nats / ln 2 / bytes",
        "model": to_dict(model.config),
        "weights_sha256": digest(model.state_dict()),
        "precision": str(model.embedding.weight.dtype).removeprefix("torch."),
        "device": model.embedding.weight.device.type,
        "versions": {
            "compressive-transformer": version("compressive-transformer"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    return Evaluation(total, tuple(scores), conditions, {tally.name: tally.scores() for tally in tallies})


def _counts(split: Split, number: int) -> tuple[int, int, int]:
    """Return the tokens, words and bytes of a document that are scored."""
    document = split.documents[number]
    if split.targets is None:
        return document.tokens, document.words, document.bytes
    targets = split.count_targets(number)
    return targets, 0, targets  # such corpora are raw bytes


def _benchmark(split: Split) -> str | None:
    """Return the published data set that scores of the split can be compared on, if there is one."""
    if split.official:
        return f"{split.official}, the official {split.name} split"
    return (
        f"{split.benchmark}, but not an official split: not comparable with published figures"
        if split.benchmark
        else None
    )
