"""The one loop in which texts are scored: each document from its beginning, each token once."""

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
    """The score of each document of `split`, read from its beginning with memory, each token predicted once.

    The result does not depend on `batch_size`, the number of documents that are read side by side. `by` asks for scores
    of parts of the text too, see `ByPosition` and `ByFrequency`. For other memory lengths see `with_lengths` and
    `sweep`. Process `rank` of `world` reads its share, and all of them get the whole result. `progress` is told how
    many tokens were scored.

    Raises CompressiveError where the split was made with another tokenizer than the model's, and where `batch_size` is
    less than the number of processes.
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
    """The same network scored with each of some memory lengths (Tables 8 and 9 of the paper).

    Every memory length with every compressed length, in this order, each one number or one for each layer; without
    any of one kind the model's own stays.
    A network trained without compressed memory cannot get one, see `with_lengths`.
    """
    kinds = {"memory_length": memory_lengths, "compressed_length": compressed_lengths}
    asked = {name: lengths for name, lengths in kinds.items() if lengths}
    models = [with_lengths(model, **dict(zip(asked, lengths, strict=True))) for lengths in product(*asked.values())]
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
    """What `nats [documents]` and tallies amount to, and the conditions under which they came about."""
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
        "benchmark": _standing(split),
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
    """Tokens, words and bytes of what is scored of a document."""
    document = split.documents[number]
    if split.targets is None:
        return document.tokens, document.words, document.bytes
    targets = split.count_targets(number)
    return targets, 0, targets  # such corpora are bytes as they are


def _standing(split: Split) -> str | None:
    """What a score on the split can be compared with, where it comes from published data."""
    if split.official:
        return f"{split.official}, the official {split.name} split"
    return (
        f"{split.benchmark}, but not an official split: not comparable with published figures"
        if split.benchmark
        else None
    )
