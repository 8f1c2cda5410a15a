"""The one loop in which texts are scored: each document from its beginning, each token once."""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from ..attention.positions import PositionCache
from ..config import PerLayer
from ..config.toml import to_dict
from ..data import Split
from ..data.lanes import Lanes
from ..errors import CompressiveError
from ..model import CompressiveTransformer, with_lengths
from .buckets import Buckets, Tally
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
    if batch_size < world:
        raise CompressiveError(f"batch_size ({batch_size}) must be at least the number of processes ({world})")
    # More lanes than documents would only be idle.
    share = min(batch_size, len(split.documents) + world - 1) // world
    lanes = Lanes(split, batch_size=share * world, length=model.config.segment_length, rank=rank, world=world)
    tallies = [Tally(buckets, split) for buckets in by]
    nats = score_documents(model, split, lanes, tallies=tallies, progress=progress)
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


class Learner(Protocol):
    """What changes a model while it is scored."""

    def begin(self) -> None:
        """A document begins."""

    def learn(self, loss: Tensor) -> None:
        """Take in a segment that was scored, by its mean nats a token."""


def score_documents(
    model: CompressiveTransformer,
    split: Split,
    lanes: Lanes,
    *,
    tallies: Sequence[Tally] = (),
    learner: Learner | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Nats of each document `[documents]`, 0 for those that other processes read; also counted into `tallies`.

    With a `learner` each segment is scored first and learnt from then, which makes sense for a single lane. The
    model is left in the mode in which it came.
    """
    split.check_token_ids(model.config.vocab_size)
    nats = torch.zeros(len(split.documents), dtype=torch.float64)
    device = model.embedding.weight.device
    memory = None
    distances = PositionCache() if learner is None else None  # what learns changes what projects them
    with _scoring(model):
        for segment in lanes:
            memory = model.empty_memory(len(segment.starts)) if memory is None else memory.reset(segment.starts)
            if learner is not None and bool(segment.starts.any()):
                learner.begin()
            with torch.set_grad_enabled(learner is not None):
                tokens, targets = segment.tokens.to(device), segment.targets.to(device)
                output = model(tokens, memory, segment.lengths, targets, position_cache=distances)
                loss = output.nats.sum() / max(segment.total_targets, 1)
            scored, reading = output.nats.detach().cpu(), segment.documents >= 0
            nats.index_add_(0, segment.documents[reading], scored.sum(1)[reading])
            for tally in tallies:
                tally.add(segment, memory.seen, scored)
            if learner is not None:
                learner.learn(loss)
            memory = output.memory.detach()
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
        "parameters_sha256": _fingerprint(model),
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


@contextlib.contextmanager
def _scoring(model: CompressiveTransformer) -> Iterator[None]:
    """Nothing is dropped inside; the mode is set back afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _fingerprint(model: CompressiveTransformer) -> str:
    """sha256 of all parameters with their names: says which weights were scored."""
    digest = hashlib.sha256()
    for name, parameter in model.state_dict().items():
        digest.update(name.encode())
        digest.update(parameter.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
