"""Words as tokens, as WikiText is read: whatever whitespace separates, and one token for each end of a line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from .base import Decoder, PieceDecoder, Tokenizer

UNKNOWN, LINE_END = "<unk>", "<eos>"
WORDS_FILE = {"compressive_transformer": "words", "version": 1}


class WordTokenizer(Tokenizer):
    """A fixed list of words; all others become `<unk>`.

    Text comes back in WikiText's own layout, " one two \\n": it is lossless for text that stands in this layout and
    holds known words only.
    """

    def __init__(self, words: Sequence[str]) -> None:
        """`words` in the order of their ids, `<unk>` and `<eos>` among them, none twice."""
        self._words = tuple(words)
        self._ids = {word: id for id, word in enumerate(self._words)}
        if len(self._ids) != len(self._words) or not {UNKNOWN, LINE_END} <= self._ids.keys():
            raise CompressiveError(
                f"the words of a vocabulary must differ, {UNKNOWN} and {LINE_END} must be among them"
            )
        self.vocab_size = len(self._words) + 1
        self._pieces = [*(" \n" if word == LINE_END else f" {word}" for word in self._words), ""]

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids `[tokens]` of the words of a text, and of each end of a line in it."""
        unknown = self._ids[UNKNOWN]
        return np.fromiter((self._ids.get(word, unknown) for word in _words(text)), dtype=np.int64)

    def measure(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """Words and bytes; an end of a line is a word, as perplexities on WikiText count it."""
        return len(ids), len(self.decode(ids).encode())

    def _decode(self, ids: NDArray[np.int64]) -> str:
        return "".join(map(self._pieces.__getitem__, ids))

    def decoder(self) -> Decoder:
        """A decoder that gives a word with each id."""
        return PieceDecoder(self._pieces)

    def to_json(self) -> str:
        """The list of words."""
        return json.dumps({**WORDS_FILE, "words": self._words}, ensure_ascii=False, indent=0) + "\n"


def train_words(texts: Iterable[str]) -> WordTokenizer:
    """All words of `texts`, the most frequent first, as adaptive softmax needs them."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_words(text))
    words = [word for word, _ in counts.most_common()]
    return WordTokenizer([*words, *(word for word in (LINE_END, UNKNOWN) if word not in counts)])


def _words(text: str) -> Iterator[str]:
    """Each word and each end of a line."""
    *lines, rest = text.split("\n")
    for line in lines:
        yield from line.split()
        yield LINE_END
    yield from rest.split()
