"""One document to tokens as they lie on disk, and its counts."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from ..errors import CompressiveError
from .corpus import DTYPES
from .sources.source import Text
from .tokenizers import Tokenizer


class Encoded(NamedTuple):
    """A document of a split, encoded."""

    split: str
    title: str
    content: bytes
    """Its tokens as they lie on disk."""
    tokens: int
    words: int
    size: int
    """Bytes of the text."""
    lossless: bool
    """Whether it comes back from its tokens as it was."""
    read: int
    """Bytes on disk that were read for it, where they are counted."""
    digest: bytes
    """`digest_of` the document."""


def dtype_of(tokenizer: Tokenizer) -> str:
    """The name of the type that tokens have on disk."""
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def encode(tokenizer: Tokenizer, split: str, text: Text) -> Encoded:
    """The tokens and counts of a document. Raises CompressiveError, with its place, where it has none."""
    try:
        ids = tokenizer.encode(text.text)
    except CompressiveError as error:
        raise CompressiveError(f"{text.place}: {error}") from error
    if not ids.size:
        raise CompressiveError(f"{text.place} gives no tokens with this tokenizer: take it out")
    words, size = text.measure()
    return Encoded(
        split,
        text.title,
        content=ids.astype(DTYPES[dtype_of(tokenizer)]).tobytes(),
        tokens=len(ids),
        words=words,
        size=size,
        lossless=isinstance(text.text, bytes) or tokenizer.decode(ids) == text.text,
        read=text.read,
        digest=digest_of(split, text),
    )


def digest_of(split: str, text: Text) -> bytes:
    """A sha256 of all that the corpus takes from a document."""
    content = text.text if isinstance(text.text, bytes) else text.text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(repr((split, text.title, text.words, len(content))).encode() + content).digest()
