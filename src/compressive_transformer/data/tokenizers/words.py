"""Words as tokens, as in WikiText: split at whitespace, with one token for each end of a line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from .base import PieceDecoder, TextDecoder, Tokenizer

UNKNOWN, LINE_END = "<unk>", "<eos>"
WORDS_FILE = {"compressive_transformer": "words", "version": 1}


class WordTokenizer(Tokenizer):
    """A fixed list of words; all others become `<unk>`.

    Text is decoded to WikiText's layout, " one two \\n". It is lossless for text of known words in this layout.
    """

    def __init__(self, words: Sequence[str]) -> None:
        """Set the words in the order of their ids, `<unk>` and `<eos>` among them, none twice."""
        self._words = tuple(words)
        self._ids = {word: id for id, word in enumerate(self._words)}
        if len(self._ids) != len(self._words) or not {UNKNOWN, LINE_END} <= self._ids.keys():
            raise CompressiveError(
                f"the words of a vocabulary must differ, {UNKNOWN} and {LINE_END} must be among them"
            )
        self.vocab_size = len(self._words) + 1
        self._pieces = [*(" \n" if word == LINE_END else f" {word}" for word in self._words), ""]

    def _encode(self, text: str) -> NDArray[np.int64]:
        unknown = self._ids[UNKNOWN]
        return np.fromiter((self._ids.get(word, unknown) for word in _words(text)), dtype=np.int64)

    def measure(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """Return words and bytes; an end of a line is a word, as in perplexities on WikiText."""
        return len(ids), len(self.decode(ids).encode())

    def _decode(self, ids: NDArray[np.int64]) -> str:
        return "".join(map(self._pieces.__getitem__, ids))

    def decoder(self) -> TextDecoder:
        """Return a decoder that returns a word for each id."""
        return PieceDecoder(self._pieces)

    def to_json(self) -> str:
        """Return the list of words."""
        return json.dumps({**WORDS_FILE, "words": self._words}, ensure_ascii=False, indent=0) + "\n"


def train_words(texts: Iterable[str]) -> WordTokenizer:
    """Return a tokenizer of all words of `texts`, the most frequent first, as adaptive softmax needs them."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_words(text))
    words = [word for word, _ in counts.most_common()]
    return WordTokenizer([*words, *(word for word in (LINE_END, UNKNOWN) if word not in counts)])


def _words(text: str) -> Iterator[str]:
    """Yield each word and each end of a line."""
    *lines, rest = text.split("\n")
    for line in lines:
        yield from line.split()
        yield LINE_END
    yield from rest.split()
