"""Distant recall in text: sentences with the number of a key, repeated far apart, hidden in books."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ...errors import CompressiveError
from .recall import DOCUMENTS, SEED, free_places, occurrences
from .source import WHOLE, RawDocument, Source

LENGTH = 8_192
"""Length of a document (tokens, which are bytes)."""
# Of one length, so that distances between numbers are those between sentences.
NAMES = ("Alice", "Clara", "Edgar", "Frank", "Helen", "Louis", "Maria", "Peter")
SENTENCE = " The key of {name} is {number:04}. "
SIZE = len(SENTENCE.format(name=NAMES[0], number=0))
NUMBERS = 10_000


def passkey(setting: str, open_text: Callable[[str], Source]) -> Source:
    """Return text with hidden keys; `setting` is "SOURCE:MIN-MAX", or that and ":N" for N training documents.

    See `passkey_document`. `open_text` opens SOURCE, whose splits are kept; without splits N counts all documents.
    Raises CompressiveError for distances that do not fit into a document, and for a source that is not text.
    """
    found = re.fullmatch(r"(.+?):(\d+)-(\d+)(?::(\d+))?", setting)
    if not found:
        raise CompressiveError(
            f"passkey:{setting} must be passkey:SOURCE:MIN-MAX, a source of text and two distances in tokens, for"
            " example passkey:books:200-2000; a third number after a colon counts the training documents"
        )
    least, greatest, train = int(found[2]), int(found[3]), int(found[4] or DOCUMENTS["train"])
    if not SIZE <= least <= greatest <= LENGTH - SIZE or not train:
        raise CompressiveError(
            f"passkey:{setting}: distances must rise from {SIZE}, the length of a sentence, to at most"
            f" {LENGTH - SIZE} tokens, the room in a document; there must be training documents"
        )
    text = open_text(found[1])
    if text.tokenizer:
        raise CompressiveError(f"passkey:{setting}: keys can be hidden in text only, and {text.name} is not text")
    counts = {**DOCUMENTS, "train": train, WHOLE: train}
    return Source(
        f"passkey:{text.name}:{least}-{greatest}",
        {
            split: partial(_documents, read, stream, counts[split], least, greatest)
            for stream, (split, read) in enumerate(text.parts.items())
        },
        holdout=text.holdout,
        reading=f"text without its digits, in pieces of {LENGTH:,} bytes, with sentences that give numbers of"
        f" {len(NAMES)} keys, each again after {least} to {greatest} tokens; digits are the only targets",
        split_rule=f"{text.rule}; the first {', '.join(f'{counts[split]:,} of {split}' for split in text.parts)}",
        tokenizer="bytes",
        targets=tuple(sorted(b"0123456789")),
    )


def _documents(
    read: Callable[[], Iterator[RawDocument]], stream: int, count: int, least: int, greatest: int
) -> Iterator[RawDocument]:
    made = 0
    for book in read():
        content = re.sub(rb"[0-9]", b"", book.content.encode() if isinstance(book.content, str) else book.content)
        for begin in range(0, len(content) - LENGTH + 1, LENGTH):
            if made == count:
                return
            random = np.random.default_rng([SEED, stream, made])
            piece = passkey_document(random, content[begin : begin + LENGTH], least=least, greatest=greatest)
            yield RawDocument(f"{book.title}, {begin:,}", piece, book.place, words=0)
            made += 1
    if not made:
        raise CompressiveError(
            f"passkey: needs texts of at least {LENGTH:,} bytes without digits, and none has that many"
        )


def passkey_document(random: np.random.Generator, text: bytes, *, least: int, greatest: int) -> bytes:
    """Return a document of `LENGTH` tokens: the beginning of `text`, which has no digits, with sentences inserted.

    Each key has a different number of four digits. Its sentence recurs `least` to `greatest` tokens after its last
    occurrence, uniformly among the free places, until none is free.
    """
    free = free_places(LENGTH, greatest)
    numbers = random.choice(NUMBERS, size=len(NAMES), replace=False)
    sentences = {
        place: SENTENCE.format(name=name, number=number).encode()
        for name, number in zip(NAMES, numbers, strict=True)
        for place in occurrences(random, free, least, greatest, last=LENGTH - SIZE, room=SIZE)
    }
    document, read = b"", 0
    for place in sorted(sentences):
        gap = place - len(document)
        document += text[read : read + gap] + sentences[place]
        read += gap
    return document + text[read : read + LENGTH - len(document)]
