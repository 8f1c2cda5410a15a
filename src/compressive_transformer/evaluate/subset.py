"""A split reduced to the beginnings of documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..data import Split
from ..data.tokenizers import Tokenizer
from ..errors import CompressiveError

LONG_DOCUMENT = 16_384
"""Length of a document (tokens) in which the cold start, while memory is empty, weighs little."""


def truncate_split(split: Split, tokenizer: Tokenizer, tokens: int) -> Split:
    """Return a split with about `tokens` tokens: the beginnings of documents spread evenly over the split.

    It prefers few documents to short ones: each keeps 16,384 tokens if it has them, so that most are predicted with
    full memory. Words and bytes are those of the remaining text.

    Args:
        split: The split to reduce; it is returned unchanged if it is short enough.
        tokenizer: The tokenizer of its corpus.
        tokens: Approximate number of tokens of the result.

    Raises:
        CompressiveError: `tokens` is less than 1.
    """
    if tokens < 1:
        raise CompressiveError(f"tokens ({tokens}) must be 1 or more")
    if tokens >= sum(document.tokens for document in split.documents):
        return split
    count = min(len(split.documents), max(1, tokens // LONG_DOCUMENT))
    share = -(-tokens // count)
    documents = []
    for index in range(0, len(split.documents) * count, len(split.documents)):
        document = split.documents[index // count]
        if document.tokens > share:
            ids = _whole_characters(tokenizer, split.read(index // count, 0, share))
            words, size = tokenizer.measure(ids)
            document = replace(document, tokens=len(ids), words=words, bytes=size)
        documents.append(document)
    return replace(split, documents=tuple(documents))


def _whole_characters(tokenizer: Tokenizer, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens without the incomplete character at their end, if there is one."""
    length = len(tokens)
    # UTF-8 takes at most four bytes a character, so at most three tokens are the beginning of one.
    while tokenizer.decode(tokens[:length]).endswith("\N{REPLACEMENT CHARACTER}") and length > max(1, len(tokens) - 3):
        length -= 1
    return tokens[:length]
