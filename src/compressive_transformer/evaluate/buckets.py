"""Which tokens count together: by place in the document, by how often their word occurs in training."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data import Corpus, Split
from ..data.lanes import Segment
from ..data.tokenizers import Tokenizer
from ..errors import CompressiveError
from .result import Score

BORDERS = (10_000, 1_000, 100)
"""Occurrences of a word in training that divide Table 7 of the paper."""


class Pieces(NamedTuple):
    """Where the tokens and the words of a document lie in its text, counted in characters."""

    text: str
    starts: NDArray[np.int64]
    """The first character that each token completes `[tokens]`."""
    bytes: NDArray[np.int64]
    """UTF-8 bytes of the characters that each token completes `[tokens]`."""
    words: tuple[str, ...]
    """Separated by whitespace, as `str.split` does."""
    word_starts: NDArray[np.int64]
    word_ends: NDArray[np.int64]
    """First character of each word, and the one after it `[words]`."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: NDArray[np.int64]) -> Pieces:
        """The pieces of a document with the tokens `ids [tokens]`, under any tokenizer."""
        decoder = tokenizer.decoder()
        pieces = [decoder(id) for id in ids.tolist()]
        pieces[-1] += decoder.flush()
        text = "".join(pieces)
        sizes = np.array([len(piece) for piece in pieces], np.int64)
        words = list(re.finditer(r"\S+", text))
        return cls(
            text=text,
            starts=np.cumsum(sizes) - sizes,
            bytes=np.array([len(piece.encode()) for piece in pieces], np.int64),
            words=tuple(word.group() for word in words),
            word_starts=np.array([word.start() for word in words], np.int64),
            word_ends=np.array([word.end() for word in words], np.int64),
        )

    def token_of_words(self) -> NDArray[np.int64]:
        """The token with which each word begins `[words]`."""
        return np.searchsorted(self.starts, self.word_starts, side="right") - 1

    def word_of_tokens(self) -> NDArray[np.int64]:
        """The word that each token belongs to `[tokens]`: that of its first character, or the next word after it.

        So the whitespace before a word counts as a part of it, as it does in the tokens of GPT-2 and its like; only
        what follows the last word belongs to the word before. Raises IndexError for a text without words.
        """
        return np.searchsorted(self.word_ends, self.starts, side="right").clip(max=len(self.words) - 1)


class Assignment(NamedTuple):
    """The buckets of a split, and which of them each token and each word of a document falls into."""

    labels: tuple[str, ...]
    places: Callable[[Pieces], tuple[NDArray[np.int64], NDArray[np.int64]]]
    """The bucket of each token `[tokens]` and of each word `[words]`."""


@dataclass(frozen=True, eq=False)
class Buckets(ABC):
    """A way to divide the tokens and the words of a corpus; `evaluate(..., by=[...])` scores each bucket."""

    name: ClassVar[str]
    """What the result calls it."""
    corpus: Corpus

    @abstractmethod
    def of(self, split: Split) -> Assignment:
        """The buckets for a split of the corpus."""


@dataclass(frozen=True, eq=False)
class ByPosition(Buckets):
    """Buckets by the number of tokens before a token in its document, borders at powers of two.

    Shows the cold start and what memory gains as it fills. A word counts where it begins.
    """

    name = "by_position"

    def of(self, split: Split) -> Assignment:
        """As many buckets as the longest document of the split needs: 0, 1, 2–3, 4–7, ..."""
        longest = max(document.tokens for document in split.documents)
        count = (longest - 1).bit_length()
        labels = ["0", "1", *(f"{2**power:,}–{2 ** (power + 1) - 1:,}" for power in range(1, count))]
        borders = 2 ** np.arange(count)

        def places(pieces: Pieces) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            tokens = np.searchsorted(borders, np.arange(len(pieces.starts)), side="right")
            return tokens, tokens[pieces.token_of_words()]

        return Assignment(tuple(labels[: count + 1]), places)


@dataclass(frozen=True, eq=False)
class ByFrequency(Buckets):
    """Buckets by how often a word occurs in the training split (Table 7 of the paper), the most frequent first.

    Words are what whitespace separates. All nats of a token count for one word (see `Pieces.word_of_tokens`), those
    of a document without any words for the rarest.
    """

    name = "by_frequency"
    borders: tuple[int, ...] = BORDERS
    """Occurrences from which on a word is in the next bucket, falling; small corpora need smaller ones."""

    def __post_init__(self) -> None:
        borders = list(self.borders)
        if not borders or borders != sorted(set(borders), reverse=True) or borders[-1] < 1:
            raise CompressiveError(
                f"borders {borders} must be whole numbers of occurrences, falling, the last at least 1"
            )
        if not self.corpus.lossless:
            raise CompressiveError(
                "words by frequency need a lossless tokenizer, and that of this corpus loses text: "
                "prepare it with bytes or bpe"
            )

    def of(self, split: Split) -> Assignment:
        """Reads the whole training split, a document at a time, to count the words that `split` has."""
        return self.of_texts(self.corpus.tokenizer.decode(split.read(number)) for number in range(len(split.documents)))

    def of_texts(self, texts: Iterable[str]) -> Assignment:
        """The same for any texts."""
        tokenizer, train = self.corpus.tokenizer, self.corpus.train
        counts = dict.fromkeys((word for text in texts for word in text.split()), 0)
        for number in range(len(train.documents)):
            for word, count in Counter(tokenizer.decode(train.read(number)).split()).items():
                if word in counts:
                    counts[word] += count
        rising = np.array(self.borders[::-1])

        def places(pieces: Pieces) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            occurrences = np.array([counts[word] for word in pieces.words], np.int64)
            words = len(rising) - np.searchsorted(rising, occurrences, side="right")
            rarest = np.full(len(pieces.starts), len(rising))
            return words[pieces.word_of_tokens()] if pieces.words else rarest, words

        return Assignment(self._labels(), places)

    def _labels(self) -> tuple[str, ...]:
        first, last = self.borders[0], self.borders[-1]
        between = (f"{low:,}–{high - 1:,}" for high, low in zip(self.borders, self.borders[1:], strict=False))
        return f"≥ {first:,}", *between, f"< {last:,}"


class Tally:
    """Nats, tokens, words and bytes of each bucket, summed while the documents of a split are read."""

    def __init__(self, buckets: Buckets, split: Split) -> None:
        """Raises CompressiveError where the split is not one of the corpus that the buckets are made for."""
        if split.fingerprint != buckets.corpus.fingerprint:
            raise CompressiveError(
                f"{buckets.name} is made for corpus {buckets.corpus.path} and the split {split.name} is of another:"
                " make it with the corpus whose split is scored"
            )
        self.name = buckets.name
        self._split, self._tokenizer = split, buckets.corpus.tokenizer
        self._assignment = buckets.of(split)
        self.sums = torch.zeros(len(self._assignment.labels), 4, dtype=torch.float64)
        """`[bucket, nats | tokens | words | bytes]`, of this process."""
        self._places: dict[int, Tensor] = {}  # by lane, the bucket of each token of the document that it reads

    def add(self, segment: Segment, firsts: Tensor, nats: Tensor) -> None:
        """Count a segment: `nats [lane, segment]` of its targets, which stand at `firsts [lane]` in their documents."""
        for lane, (number, first, length) in enumerate(
            zip(segment.documents.tolist(), firsts.tolist(), segment.lengths.tolist(), strict=True)
        ):
            if number >= 0:
                if not first:
                    self._begin(lane, number)
                places = self._places[lane][first : first + length]
                self.sums[:, 0].index_add_(0, places, nats[lane, :length])

    def scores(self) -> tuple[tuple[str, Score], ...]:
        """Label and score of each bucket."""
        rows = zip(self._assignment.labels, self.sums.tolist(), strict=True)
        return tuple((label, Score(nats, *map(int, counts))) for label, (nats, *counts) in rows)

    def _begin(self, lane: int, number: int) -> None:
        ids = self._split.read(number)
        pieces = Pieces.of(self._tokenizer, ids)
        of_tokens, of_words = (torch.from_numpy(places) for places in self._assignment.places(pieces))
        self._places[lane] = of_tokens
        scored = torch.from_numpy(self._split.is_target(ids)).double()
        self.sums[:, 1].index_add_(0, of_tokens, scored)
        self.sums[:, 3].index_add_(0, of_tokens, scored * torch.from_numpy(pieces.bytes))
        if self._split.targets is None:
            self.sums[:, 2].index_add_(0, of_words, torch.ones(len(of_words), dtype=torch.float64))
