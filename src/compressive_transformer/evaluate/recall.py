"""Distant recall: how often a model predicts what it read far back, by distance and by the memory that holds it."""

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
"""Number of ranges of distance."""
REACHES = (
    "segment or recent memory",
    "compressed memory, one group",
    "compressed memory, two groups",
    "beyond reach of one layer",
)
"""The memory that holds an answer. Two groups: the answer and the key before it are in different groups."""


class Answer(NamedTuple):
    """Tokens of a document that stood in it before, after the same key."""

    first: int
    """Position of the first token in the document."""
    stop: int
    """Position after the last token."""
    distance: int
    """Distance to the last occurrence (tokens)."""


@dataclass(frozen=True)
class AnswerGroup:
    """A group of answers, and how many of them are right."""

    label: str
    """Name of the group."""
    answers: int
    """Number of answers."""
    right: int
    """Number of answers of which the model predicted every token."""

    @property
    def accuracy(self) -> float | None:
        """Fraction of answers that are right; None without answers."""
        return self.right / self.answers if self.answers else None

    def to_dict(self) -> dict[str, Any]:
        """Return counts and accuracy as plain values."""
        return {**asdict(self), "accuracy": self.accuracy}


@dataclass(frozen=True)
class Recall:
    """The accuracy of a model on the answers of a split. `print` shows a table."""

    total: AnswerGroup
    """All answers."""
    chance: float
    """Accuracy of a random guess."""
    by_reach: tuple[AnswerGroup, ...]
    """Answers by the memory that holds the last occurrence at prediction, in the layer where it is nearest."""
    by_distance: tuple[AnswerGroup, ...]
    """Answers by distance to the last occurrence, in ranges of equal width (tokens)."""
    documents: tuple[AnswerGroup, ...]
    """Answers of each document, in the order of the split."""
    conditions: dict[str, Any]
    """The split, the corpus and the model's config."""

    @property
    def accuracy(self) -> float:
        """Fraction of answers of which every token is the likeliest, given all tokens before it."""
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
        """Return everything as plain values, ready for JSON."""
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
    """Measure how often the likeliest tokens are the answers of a recall corpus.

    Each document is read from its start with memory; an answer is right if each of its tokens is the likeliest after
    all tokens before it.

    Args:
        model: The model.
        split: A split of a corpus made from `recall:` or `passkey:`.
        batch_size: Documents that are read side by side. The result does not depend on it.

    Returns:
        Accuracy in total, by memory, by distance and by document.

    Raises:
        CompressiveError: The split has no answers, was prepared with another tokenizer than the model's, or
            `batch_size` is less than 1.
    """
    reading = read_split(model, split, batch_size=batch_size)
    answers = answers_of(split)
    right = count_right(answers, _predicted(split, reading))
    return _summary(model.config, split, answers, right)


def answers_of(split: Split) -> list[list[Answer]]:
    """Return the answers of each document: runs of targets that stood in it before, after the same token.

    Raises:
        CompressiveError: There are none.
    """
    answers = [_answers_in(split, split.read(number)) for number in range(len(split.documents))]
    if not any(answers):
        raise CompressiveError(
            f"split {split.name} has no answers: distant recall needs a corpus made from recall: or passkey:"
        )
    return answers


def count_right(answers: Sequence[Sequence[Answer]], predicted: Sequence[NDArray[np.bool_]]) -> list[list[bool]]:
    """Return True for each right answer of each document; `predicted[document] [tokens]`: the token was likeliest."""
    return [
        [bool(hits[answer.first : answer.stop].all()) for answer in asked]
        for asked, hits in zip(answers, predicted, strict=True)
    ]


def reach_of(config: ModelConfig, answer: Answer) -> int:
    """Return the index in `REACHES` of the memory that holds the last occurrence of an answer when it is predicted.

    Segments begin at multiples of `segment_length`, as documents do. Of layers that differ the nearest counts.
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
        key_and_answer = (int(ids[first - 1]) if first else split.start_id, *ids[first:stop].tolist())
        if key_and_answer in last:
            answers.append(Answer(first, stop, first - last[key_and_answer]))
        last[key_and_answer] = first
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
    right_answers = np.array([value for of_document in right for value in of_document])
    distances = np.array([answer.distance for answer in asked])
    reaches = np.array([reach_of(config, answer) for answer in asked])
    least, width = int(distances.min()), int(np.ptp(distances)) + 1
    borders = [least + width * number // RANGES for number in range(RANGES + 1)]
    documents = zip(split.documents, right, strict=True)
    return Recall(
        total=_group("total", right_answers),
        chance=float(np.mean([len(split.targets or ()) ** (answer.first - answer.stop) for answer in asked])),
        by_reach=tuple(_group(label, right_answers[reaches == number]) for number, label in enumerate(REACHES)),
        by_distance=tuple(
            _group(f"{low:,}–{high - 1:,}", right_answers[(low <= distances) & (distances < high)])
            for low, high in pairwise(borders)
            if low < high
        ),
        documents=tuple(_group(document.title, np.array(of_document)) for document, of_document in documents),
        conditions={"split": split.name, "corpus_fingerprint": split.fingerprint, "model": to_dict(config)},
    )


def _group(label: str, right_answers: NDArray[np.bool_]) -> AnswerGroup:
    return AnswerGroup(label, len(right_answers), int(right_answers.sum()))
