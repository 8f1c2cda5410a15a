"""Where one series of nats is lower than another on the same text: by word, by place, by how frequent words are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from ...evaluate import ByFrequency
from ...evaluate.buckets import Pieces

WORDS = 15
"""Words that are listed on each side."""
FIRST_BORDER = 64
"""Bytes of the first bucket by position; each further border is twice as far."""


class Reading(NamedTuple):
    """A text as one tokenizer divides it, and the nats of its tokens `[tokens]`."""

    pieces: Pieces
    nats: NDArray[np.float64]

    def of_words(self) -> NDArray[np.float64]:
        """Nats of each word `[words]`, those of the whitespace before it included (`Pieces.word_of_tokens`)."""
        words = len(self.pieces.words)
        if not words:
            return np.zeros(0)
        return np.bincount(self.pieces.word_of_tokens(), weights=self.nats, minlength=words).astype(np.float64)

    def bytes_of_words(self) -> NDArray[np.int64]:
        """UTF-8 bytes of each word `[words]`, counted alike."""
        if not self.pieces.words:
            return np.zeros(0, np.int64)
        words = self.pieces.word_of_tokens()
        return np.bincount(words, weights=self.pieces.bytes, minlength=len(self.pieces.words)).astype(np.int64)


@dataclass(frozen=True)
class Word:
    """A word of the text, and the bits that it takes in each of two readings."""

    text: str
    place: int
    """Its first character in the text, from 0."""
    first: float
    """Bits in the first reading."""
    second: float

    @property
    def difference(self) -> float:
        """second − first, in bits."""
        return self.second - self.first


@dataclass(frozen=True)
class Bucket:
    """Some words of the text."""

    label: str
    words: int
    bytes: int
    """UTF-8 bytes of the words and of the whitespace before them."""
    first: float
    """Bits per byte in the first reading."""
    second: float

    @property
    def difference(self) -> float:
        """second − first, in bits per byte."""
        return self.second - self.first


@dataclass(frozen=True)
class Contrast:
    """Two readings of one text, word by word: differences are second − first, above zero where the first is better.

    Words are what whitespace separates, and all nats of the text count for some word, whatever the tokenizers.
    """

    first_better: tuple[Word, ...]
    """The 15 words with the largest difference, the largest first; none with 0 or less."""
    second_better: tuple[Word, ...]
    """The 15 words with the smallest difference, the smallest first; none with 0 or more."""
    by_position: tuple[Bucket, ...]
    """By the bytes before a word, borders at 64 times powers of two."""
    by_frequency: tuple[Bucket, ...] | None
    """By how often a word occurs in a training split; None where none was given."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""

        def rows(entries: Sequence[Word | Bucket]) -> list[dict[str, Any]]:
            return [{**asdict(entry), "difference": entry.difference} for entry in entries]

        return {
            "first_better": rows(self.first_better),
            "second_better": rows(self.second_better),
            "by_position": rows(self.by_position),
            "by_frequency": None if self.by_frequency is None else rows(self.by_frequency),
        }


def contrast(first: Reading, second: Reading, frequency: ByFrequency | None = None) -> Contrast:
    """How two readings of one text differ. Tokenizers may differ, since nats are summed over words.

    Raises CompressiveError where the texts differ, as they do where a tokenizer loses some of it.
    """
    if first.pieces.text != second.pieces.text:
        raise different_texts()
    bits = first.of_words() / math.log(2), second.of_words() / math.log(2)
    sizes = first.bytes_of_words()
    before = np.cumsum(sizes) - sizes
    borders = FIRST_BORDER * 2 ** np.arange(max(0, int(before[-1:].sum()) // FIRST_BORDER).bit_length())
    places = np.searchsorted(borders, before, side="right")
    labels = _labels(borders.tolist())
    by_frequency = None
    if frequency is not None:
        assignment = frequency.of_texts([first.pieces.text])
        if first.pieces.words:
            by_frequency = tuple(_buckets(assignment.labels, assignment.places(first.pieces)[1], sizes, *bits))
    order = np.argsort(bits[0] - bits[1], kind="stable")  # largest difference first
    listed = [[_word(first.pieces, at, *bits) for at in side[:WORDS].tolist()] for side in (order, order[::-1])]
    return Contrast(
        first_better=tuple(word for word in listed[0] if word.difference > 0),
        second_better=tuple(word for word in listed[1] if word.difference < 0),
        by_position=tuple(_buckets(labels, places, sizes, *bits)),
        by_frequency=by_frequency,
    )


def different_texts() -> CompressiveError:
    """What to raise where two models cannot be compared on a text, since they do not read the same one."""
    return CompressiveError(
        "the two models do not read the same text, since the tokenizer of one loses some of it: "
        "compare models with lossless tokenizers, as bytes and bpe are"
    )


def _word(pieces: Pieces, at: int, first: NDArray[np.float64], second: NDArray[np.float64]) -> Word:
    return Word(pieces.words[at], int(pieces.word_starts[at]), float(first[at]), float(second[at]))


def _labels(borders: Sequence[int]) -> list[str]:
    lows = [0, *borders]
    return [f"{low:,}–{max(2 * low, FIRST_BORDER) - 1:,}" for low in lows]


def _buckets(
    labels: Sequence[str],
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
    first: NDArray[np.float64],
    second: NDArray[np.float64],
) -> Iterator[Bucket]:
    """The buckets that hold any words."""
    for place, label in enumerate(labels):
        own = places == place
        if size := int(sizes[own].sum()):
            yield Bucket(label, int(own.sum()), size, float(first[own].sum() / size), float(second[own].sum() / size))
