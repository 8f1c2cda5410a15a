"""Contrast of two series of nats on the same text: by word, by place, by frequency of words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from ...evaluate import ByFrequency
from ...evaluate.buckets import TokenSpans

WORDS = 15
"""Number of words listed on each side."""
FIRST_BORDER = 64
"""Bytes of the first bucket by position; each further border is twice as far."""


class Reading(NamedTuple):
    """Text as one tokenizer divides it, and the nats of its tokens `[tokens]`."""

    pieces: TokenSpans
    nats: NDArray[np.float64]

    def of_words(self) -> NDArray[np.float64]:
        """Return the nats of each word `[words]`, with the whitespace before it (`TokenSpans.word_of_tokens`)."""
        words = len(self.pieces.words)
        if not words:
            return np.zeros(0)
        return np.bincount(self.pieces.word_of_tokens(), weights=self.nats, minlength=words).astype(np.float64)

    def bytes_of_words(self) -> NDArray[np.int64]:
        """Return the UTF-8 bytes of each word `[words]`, counted alike."""
        if not self.pieces.words:
            return np.zeros(0, np.int64)
        words = self.pieces.word_of_tokens()
        return np.bincount(words, weights=self.pieces.bytes, minlength=len(self.pieces.words)).astype(np.int64)


@dataclass(frozen=True)
class Word:
    """Word of the text, and its bits in each of two readings."""

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
class WordBucket:
    """Words of the text that share a property."""

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
    """Two readings of one text, word by word; differences are second − first, positive where the first is better.

    Words are separated by whitespace. All nats of the text count for some word, whatever the tokenizers.
    """

    first_better: tuple[Word, ...]
    """The 15 words with the largest difference, the largest first; none with 0 or less."""
    second_better: tuple[Word, ...]
    """The 15 words with the smallest difference, the smallest first; none with 0 or more."""
    by_position: tuple[WordBucket, ...]
    """By the bytes before a word, borders at 64 times powers of two."""
    by_frequency: tuple[WordBucket, ...] | None
    """By occurrences of a word in a training split; None without one."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""

        def rows(entries: Sequence[Word | WordBucket]) -> list[dict[str, Any]]:
            return [{**asdict(entry), "difference": entry.difference} for entry in entries]

        return {
            "first_better": rows(self.first_better),
            "second_better": rows(self.second_better),
            "by_position": rows(self.by_position),
            "by_frequency": None if self.by_frequency is None else rows(self.by_frequency),
        }


def contrast(first: Reading, second: Reading, frequency: ByFrequency | None = None) -> Contrast:
    """Return the contrast of two readings of one text; tokenizers may differ, since nats are summed over words.

    Raises CompressiveError if the texts differ, as they do where a tokenizer is lossy.
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
        assignment = frequency.text_assignment([first.pieces.text])
        if first.pieces.words:
            by_frequency = tuple(_buckets(assignment.labels, assignment.assign(first.pieces)[1], sizes, *bits))
    order = np.argsort(bits[0] - bits[1], kind="stable")  # largest difference first
    listed = [[_word(first.pieces, index, *bits) for index in side[:WORDS].tolist()] for side in (order, order[::-1])]
    return Contrast(
        first_better=tuple(word for word in listed[0] if word.difference > 0),
        second_better=tuple(word for word in listed[1] if word.difference < 0),
        by_position=tuple(_buckets(labels, places, sizes, *bits)),
        by_frequency=by_frequency,
    )


def different_texts() -> CompressiveError:
    """Return the error for two models that do not read the same text."""
    return CompressiveError(
        "the two models do not read the same text, since one tokenizer is lossy: "
        "compare models with lossless tokenizers, such as bytes and bpe"
    )


def _word(pieces: TokenSpans, index: int, first: NDArray[np.float64], second: NDArray[np.float64]) -> Word:
    return Word(pieces.words[index], int(pieces.word_starts[index]), float(first[index]), float(second[index]))


def _labels(borders: Sequence[int]) -> list[str]:
    lows = [0, *borders]
    return [f"{low:,}–{max(2 * low, FIRST_BORDER) - 1:,}" for low in lows]


def _buckets(
    labels: Sequence[str],
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
    first: NDArray[np.float64],
    second: NDArray[np.float64],
) -> Iterator[WordBucket]:
    """Yield the buckets that hold words."""
    for place, label in enumerate(labels):
        chosen = places == place
        if size := int(sizes[chosen].sum()):
            bits = float(first[chosen].sum() / size), float(second[chosen].sum() / size)
            yield WordBucket(label, int(chosen.sum()), size, *bits)
