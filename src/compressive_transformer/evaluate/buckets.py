"""Scores of parts of a text: tokens by position in the document, words by their frequency in training."""

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


class TokenSpans(NamedTuple):
    """The places of tokens and words in the text of a document, in characters."""

    text: str
    """The decoded document."""
    starts: NDArray[np.int64]
    """The first character that each token completes `[tokens]`."""
    bytes: NDArray[np.int64]
    """UTF-8 bytes of the characters that each token completes `[tokens]`."""
    words: tuple[str, ...]
    """The words, separated by whitespace as `str.split` does."""
    word_starts: NDArray[np.int64]
    """First character of each word `[words]`."""
    word_ends: NDArray[np.int64]
    """End of each word, exclusive `[words]`."""

    @classmethod
    def from_ids(cls, tokenizer: Tokenizer, ids: NDArray[np.int64]) -> TokenSpans:
        """Return the spans of a document with the tokens `ids [tokens]`, for any tokenizer."""
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
        """Return the token with which each word begins `[words]`."""
        return np.searchsorted(self.starts, self.word_starts, side="right") - 1

    def word_of_tokens(self) -> NDArray[np.int64]:
        """Return the word of each token `[tokens]`: that of its first character, or the next word after it.

        Whitespace before a word counts as a part of it, as in the tokens of GPT-2; whitespace after the last word
        belongs to that word. A text without words raises IndexError.
        """
        return np.searchsorted(self.word_ends, self.starts, side="right").clip(max=len(self.words) - 1)


class Assignment(NamedTuple):
    """The buckets of a split, and the rule that assigns the tokens and words of a document to them."""

    labels: tuple[str, ...]
    """The name of each bucket, in order."""
    assign: Callable[[TokenSpans], tuple[NDArray[np.int64], NDArray[np.int64]]]
    """Returns the bucket of each token `[tokens]` and of each word `[words]`."""


@dataclass(frozen=True, eq=False)
class Buckets(ABC):
    """A way to divide the tokens and words of a corpus; `evaluate(..., by=[...])` scores each bucket."""

    name: ClassVar[str]
    """Name in the result."""
    corpus: Corpus
    """The corpus whose splits are scored."""

    @abstractmethod
    def assignment(self, split: Split) -> Assignment:
        """Return the buckets for a split of the corpus."""


@dataclass(frozen=True, eq=False)
class ByPosition(Buckets):
    """Buckets by the number of tokens before a token in its document, with borders at powers of two.

    They show the cold start, and the gain as memory fills. A word counts where it begins.

    Args:
        corpus: The corpus whose splits are scored.
    """

    name = "by_position"

    def assignment(self, split: Split) -> Assignment:
        """Return as many buckets as the longest document of the split needs: 0, 1, 2–3, 4–7, ..."""
        longest = max(document.tokens for document in split.documents)
        count = (longest - 1).bit_length()
        labels = ["0", "1", *(f"{2**power:,}–{2 ** (power + 1) - 1:,}" for power in range(1, count))]
        borders = 2 ** np.arange(count)

        def assign(spans: TokenSpans) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            tokens = np.searchsorted(borders, np.arange(len(spans.starts)), side="right")
            return tokens, tokens[spans.token_of_words()]

        return Assignment(tuple(labels[: count + 1]), assign)


@dataclass(frozen=True, eq=False)
class ByFrequency(Buckets):
    """Buckets by how often a word occurs in the training split (Table 7 of the paper), the most frequent first.

    Words are separated by whitespace. All nats of a token count for one word (see `TokenSpans.word_of_tokens`), those
    of a document without words for the rarest bucket.

    Args:
        corpus: The corpus whose splits are scored.
        borders: Smallest numbers of occurrences of all buckets but the last, falling; small corpora need smaller ones.

    Raises:
        CompressiveError: Borders are not falling or less than 1, or the tokenizer of the corpus loses text.
    """

    name = "by_frequency"
    borders: tuple[int, ...] = BORDERS
    """Smallest numbers of occurrences of all buckets but the last, falling."""

    def __post_init__(self) -> None:
        borders = list(self.borders)
        if not borders or borders != sorted(set(borders), reverse=True) or borders[-1] < 1:
            raise CompressiveError(
                f"borders {borders} must be numbers of occurrences in falling order, the last at least 1"
            )
        if not self.corpus.lossless:
            raise CompressiveError(
                "words by frequency need a lossless tokenizer, but the tokenizer of this corpus loses text: "
                "prepare it with bytes or bpe"
            )

    def assignment(self, split: Split) -> Assignment:
        """Read the whole training split, a document at a time, and return the buckets of the words of `split`."""
        return self.text_assignment(
            self.corpus.tokenizer.decode(split.read(number)) for number in range(len(split.documents))
        )

    def text_assignment(self, texts: Iterable[str]) -> Assignment:
        """Return the buckets of the words of any texts."""
        tokenizer, train = self.corpus.tokenizer, self.corpus.train
        counts = dict.fromkeys((word for text in texts for word in text.split()), 0)
        for number in range(len(train.documents)):
            for word, count in Counter(tokenizer.decode(train.read(number)).split()).items():
                if word in counts:
                    counts[word] += count
        rising = np.array(self.borders[::-1])

        def assign(spans: TokenSpans) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            occurrences = np.array([counts[word] for word in spans.words], np.int64)
            words = len(rising) - np.searchsorted(rising, occurrences, side="right")
            rarest = np.full(len(spans.starts), len(rising))
            return words[spans.word_of_tokens()] if spans.words else rarest, words

        return Assignment(self._labels(), assign)

    def _labels(self) -> tuple[str, ...]:
        first, last = self.borders[0], self.borders[-1]
        between = (f"{low:,}–{high - 1:,}" for high, low in zip(self.borders, self.borders[1:], strict=False))
        return f"≥ {first:,}", *between, f"< {last:,}"


class Tally:
    """Nats, tokens, words and bytes of each bucket, summed while the documents of a split are read."""

    def __init__(self, buckets: Buckets, split: Split) -> None:
        """Start at 0. Raises CompressiveError if the split is not one of the buckets' corpus."""
        if split.fingerprint != buckets.corpus.fingerprint:
            raise CompressiveError(
                f"{buckets.name} is for corpus {buckets.corpus.path}, but the split {split.name} is of another corpus:"
                " create it with the corpus whose split is scored"
            )
        self.name = buckets.name
        self._split, self._tokenizer = split, buckets.corpus.tokenizer
        self._assignment = buckets.assignment(split)
        self.sums = torch.zeros(4, len(self._assignment.labels), dtype=torch.float64)
        """Nats, tokens, words and bytes of this process, one tensor to all-reduce `[4, bucket]`."""
        self._nats, self._tokens, self._words, self._bytes = self.sums  # views
        self._token_buckets: dict[int, Tensor] = {}  # by lane, of the document that it reads

    def add(self, segment: Segment, firsts: Tensor, nats: Tensor) -> None:
        """Add `nats [batch, segment]` of a segment whose lanes begin at tokens `firsts [batch]` of their documents."""
        for lane, (document, first, length) in enumerate(
            zip(segment.documents.tolist(), firsts.tolist(), segment.lengths.tolist(), strict=True)
        ):
            if document >= 0:
                if not first:
                    self._token_buckets[lane] = self._count(document)
                self._nats.index_add_(0, self._token_buckets[lane][first : first + length], nats[lane, :length])

    def scores(self) -> tuple[tuple[str, Score], ...]:
        """Return label and score of each bucket."""
        rows = zip(self._assignment.labels, self.sums.T.tolist(), strict=True)
        return tuple((label, Score(nats, *map(int, counts))) for label, (nats, *counts) in rows)

    def _count(self, document: int) -> Tensor:
        """Count the tokens, words and bytes of a document; return the bucket of each token."""
        ids = self._split.read(document)
        spans = TokenSpans.from_ids(self._tokenizer, ids)
        tokens, words = map(torch.from_numpy, self._assignment.assign(spans))
        scored = torch.from_numpy(self._split.is_target(ids)).double()
        self._tokens.index_add_(0, tokens, scored)
        self._bytes.index_add_(0, tokens, scored * torch.from_numpy(spans.bytes))
        if self._split.targets is None:
            self._words.index_add_(0, words, torch.ones(len(words), dtype=torch.float64))
        return tokens
