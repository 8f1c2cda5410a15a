"""A split cut down to the beginnings of its documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..data import Split
from ..data.tokenizers import Tokenizer
from ..errors import CompressiveError

LONG_ENOUGH = 16_384
"""Tokens of a document after which its cold start, with memory still empty, weighs little."""


def truncate_split(split: Split, tokenizer: Tokenizer, tokens: int) -> Split:
    """The split cut down to about `tokens` tokens: the beginnings of documents spread evenly over it.

    Rather fewer documents than short pieces: each keeps `LONG_ENOUGH` tokens where it has them, so that most are
    predicted with full memory. Words and bytes are counted anew, on the text that is left. Raises CompressiveError
    for less than one token.
    """
    if tokens < 1:
        raise CompressiveError(f"tokens ({tokens}) must be 1 or more")
    if tokens >= sum(document.tokens for document in split.documents):
        return split
    count = min(len(split.documents), max(1, tokens // LONG_ENOUGH))
    share = -(-tokens // count)
    documents = []
    for index in range(0, len(split.documents) * count, len(split.documents)):
        document = split.documents[index // count]
        if document.tokens > share:
            kept = _whole_characters(tokenizer, split.read(index // count, 0, share))
            words, size = tokenizer.measure(kept)
            document = replace(document, tokens=len(kept), words=words, bytes=size)
        documents.append(document)
    return replace(split, documents=tuple(documents))


def _whole_characters(tokenizer: Tokenizer, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens without those of a character that the end cuts in two."""
    kept = len(tokens)
    # UTF-8 takes at most four bytes a character, so at most three tokens are the beginning of one.
    while tokenizer.decode(tokens[:kept]).endswith("\N{REPLACEMENT CHARACTER}") and kept > max(1, len(tokens) - 3):
        kept -= 1
    return tokens[:kept]
