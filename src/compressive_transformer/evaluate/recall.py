"""Distant recall: how often a model knows again what it read far back, and by which memory it could."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import ModelConfig
from ..config.toml import to_dict
from ..data import Split
from ..errors import CompressiveError
from ..memory import SlotLayout
from ..model import CompressiveTransformer
from .reading import ReadSegment, read_split

RANGES = 4
"""Buckets by distance."""
REACHES = (
    "segment or recent memory",
    "compressed memory, one group",
    "compressed memory, two groups",
    "beyond reach of one layer",
)
"""Two groups: an answer begins the group after that of the token before it, by which it is found."""


class Answer(NamedTuple):
    """Tokens that were read before after the same key, and that a model is to know now."""

    first: int
    """Place of the first in its document."""
    stop: int
    """The place after the last."""
    distance: int
    """Tokens back to where they were read last."""


@dataclass(frozen=True)
class Bucket:
    """Some of the answers."""

    label: str
    answers: int
    right: int
    """Answers of which the model predicted every token."""

    @property
    def accuracy(self) -> float | None:
        """Share of answers that are right; None without answers."""
        return self.right / self.answers if self.answers else None

    def to_dict(self) -> dict[str, Any]:
        """Counts and accuracy as plain values."""
        return {**asdict(self), "accuracy": self.accuracy}


@dataclass(frozen=True)
class Recall:
    """How often a model's likeliest tokens were the answers of a split."""

    total: Bucket
    chance: float
    """Accuracy of a guess among all that an answer of its length can be."""
    by_reach: tuple[Bucket, ...]
    """By the memory that holds the last occurrence when its answer is predicted, in the layer where it is nearest."""
    by_distance: tuple[Bucket, ...]
    """By distance to the last occurrence, in ranges of equal width (tokens)."""
    documents: tuple[Bucket, ...]
    """Each document of the split, in order."""
    conditions: dict[str, Any]
    """The split, the corpus and the model's config."""

    @property
    def accuracy(self) -> float:
        """Share of answers of which every token is the likeliest, given all that stands before it."""
        return self.total.right / self.total.answers

    def __str__(self) -> str:
        lines = [
            f"{self.conditions['split']}: {self.total.answers:,} answers in {len(self.documents)} documents",
            f"accuracy          {self.accuracy:.4f}   (chance {self.chance:.4f})",
        ]
        for title, buckets in (("held in", self.by_reach), ("distance", self.by_distance)):
            lines += ["", f"{title:<28}{'answers':>10}{'accuracy':>10}"]
            for bucket in buckets:
                accuracy = "–" if bucket.accuracy is None else f"{bucket.accuracy:.4f}"
                lines.append(f"{bucket.label:<28}{bucket.answers:>10,}{accuracy:>10}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        parts = {name: getattr(self, name) for name in ("by_reach", "by_distance", "documents")}
        return {
            "accuracy": self.accuracy,
            "answers": self.total.answers,
            "right": self.total.right,
            "chance": self.chance,
            "conditions": self.conditions,
            **{name: [bucket.to_dict() for bucket in buckets] for name, buckets in parts.items()},
        }


def recall_accuracy(model: CompressiveTransformer, split: Split, *, batch_size: int = 32) -> Recall:
    """How often the likeliest tokens are the answers of a split of a recall corpus.

    Each document is read from its beginning with memory; an answer is right where each of its tokens is the
    likeliest after all that stands before it. The result does not depend on `batch_size`, the number of documents that
    are read side by side.

    Raises CompressiveError for a corpus without answers, and for one of another tokenizer than the model's.
    """
    reading = read_split(model, split, batch_size=batch_size)
    answers = answers_of(split)
    right = count_right(answers, _predicted(split, reading))
    return _summary(model.config, split, answers, right)


def answers_of(split: Split) -> list[list[Answer]]:
    """The answers of each document, told from its tokens alone.

    They are the runs of targets that stood in the document before, after the same token. Raises CompressiveError where
    there is none.
    """
    answers = [_answers_in(split, split.read(number)) for number in range(len(split.documents))]
    if not any(answers):
        raise CompressiveError(
            f"split {split.name} has no answers: distant recall is measured on a corpus made from recall: or passkey:"
        )
    return answers


def count_right(answers: Sequence[Sequence[Answer]], predicted: Sequence[NDArray[np.bool_]]) -> list[list[bool]]:
    """Whether each answer of each document is right; `predicted[document] [tokens]`: the token was the likeliest."""
    return [
        [bool(hits[answer.first : answer.stop].all()) for answer in asked]
        for asked, hits in zip(answers, predicted, strict=True)
    ]


def reach_of(config: ModelConfig, answer: Answer) -> int:
    """The place in `REACHES` of what holds an answer's last occurrence when it is predicted.

    Segments begin at multiples of `segment_length`, since documents do. Of layers that differ the nearest counts.
    """
    # The token at place p is the input of place p + 1, and so of that number among the states of its document.
    state, segment = answer.first - answer.distance + 1, answer.first // config.segment_length
    committed = torch.tensor(segment * config.segment_length)
    reaches = []
    for layout in {SlotLayout.of(config, layer) for layer in range(config.n_layers)}:
        compressed, recent = map(int, layout.filled(committed))
        first, rate = int(committed) - recent, layout.compression_rate
        if state >= first:
            reaches.append(0)
        elif state >= first - rate * compressed:
            reaches.append(1 if state % rate else 2)
        else:
            reaches.append(3)
    return min(reaches)


def _answers_in(split: Split, ids: NDArray[np.int64]) -> list[Answer]:
    if not split.targets:
        return []
    last: dict[tuple[int, ...], int] = {}
    answers = []
    # 1 where a run begins, -1 after its end.
    borders = np.diff(split.is_target(ids).astype(np.int8), prepend=0, append=0)
    for first, stop in zip(np.flatnonzero(borders == 1).tolist(), np.flatnonzero(borders == -1).tolist(), strict=True):
        said = (int(ids[first - 1]) if first else split.start_id, *ids[first:stop].tolist())
        if said in last:
            answers.append(Answer(first, stop, first - last[said]))
        last[said] = first
    return answers


def _predicted(split: Split, reading: Iterable[ReadSegment]) -> list[NDArray[np.bool_]]:
    """Return for each document which of its tokens were the likeliest `[tokens]`."""
    hits = [np.zeros(document.tokens, dtype=bool) for document in split.documents]
    for segment, memory, output in reading:
        likeliest = output.logits.argmax(-1).cpu().numpy()
        lanes = zip(segment.documents.tolist(), memory.seen.tolist(), segment.lengths.tolist(), likeliest, strict=True)
        for document, first, length, tokens in lanes:
            if length:
                stop = first + length
                hits[document][first:stop] = tokens[:length] == split.read(document, first, stop)
    return hits


def _summary(
    config: ModelConfig, split: Split, answers: Sequence[Sequence[Answer]], right: Sequence[Sequence[bool]]
) -> Recall:
    asked = [answer for of_document in answers for answer in of_document]
    known = np.array([value for of_document in right for value in of_document])
    distances = np.array([answer.distance for answer in asked])
    reaches = np.array([reach_of(config, answer) for answer in asked])
    least, width = int(distances.min()), int(np.ptp(distances)) + 1
    borders = [least + width * number // RANGES for number in range(RANGES + 1)]
    documents = zip(split.documents, right, strict=True)
    return Recall(
        total=_bucket("total", known),
        chance=float(np.mean([len(split.targets or ()) ** (answer.first - answer.stop) for answer in asked])),
        by_reach=tuple(_bucket(label, known[reaches == number]) for number, label in enumerate(REACHES)),
        by_distance=tuple(
            _bucket(f"{low:,}–{high - 1:,}", known[(low <= distances) & (distances < high)])
            for low, high in pairwise(borders)
            if low < high
        ),
        documents=tuple(_bucket(document.title, np.array(of_document)) for document, of_document in documents),
        conditions={"split": split.name, "corpus_fingerprint": split.fingerprint, "model": to_dict(config)},
    )


def _bucket(label: str, known: NDArray[np.bool_]) -> Bucket:
    return Bucket(label, len(known), int(known.sum()))
