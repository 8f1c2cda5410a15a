"""Distant recall: generated documents in which each answer requires memory of something far back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from .source import RawDocument, Source

LENGTH = 1_280
"""Length of a document (tokens, which are bytes)."""
KEYS = b"ABCDEFGH"
VALUES = b"0123456789IJKLMNOPQRSTqrstuvwxyz"
FILLER = b"abcdefghijklmnop"
SPACING = 6
"""Least number of filler tokens between two occurrences of any keys."""
DOCUMENTS = {"train": 3_000, "validation": 32, "test": 64}
SEED = 0


def recall(setting: str) -> Source:
    """Return keys and values among filler; `setting` is "MIN-MAX", or that and ":N" for N training documents.

    See `recall_document`. Each document has its random stream, so a larger N does not change the first ones. Raises
    CompressiveError for distances that do not fit into a document.
    """
    found = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", setting)
    if not found:
        raise CompressiveError(
            f"recall:{setting} must be recall:MIN-MAX, two distances in tokens, for example recall:75-140; a third"
            " number after a colon counts the training documents"
        )
    least, greatest, train = int(found[1]), int(found[2]), int(found[3] or DOCUMENTS["train"])
    if not 2 + SPACING <= least <= greatest < LENGTH or not train:
        raise CompressiveError(
            f"recall:{setting}: distances must rise from {2 + SPACING} to less than {LENGTH} tokens, the length"
            " of a document; there must be training documents"
        )
    counts = {**DOCUMENTS, "train": train}
    return Source(
        f"recall:{least}-{greatest}",
        {
            split: partial(_documents, split, number, count, least, greatest)
            for number, (split, count) in enumerate(counts.items())
        },
        holdout=0,
        reading=f"{len(KEYS)} keys with values amid filler, each again after {least} to {greatest} tokens; values are"
        " the only targets",
        split_rule=", ".join(f"{count:,} for {split}" for split, count in counts.items()),
        tokenizer="bytes",
        targets=tuple(sorted(VALUES)),
    )


def _documents(split: str, stream: int, count: int, least: int, greatest: int) -> Iterator[RawDocument]:
    for number in range(count):
        content = recall_document(np.random.default_rng([SEED, stream, number]), least=least, greatest=greatest)
        yield RawDocument(f"{split} {number}", content, f"recall {split} {number}", words=0)


def recall_document(random: np.random.Generator, *, least: int, greatest: int) -> bytes:
    """Return a document of `LENGTH` tokens: filler, and keys each followed by its value.

    A key has one value in a document. It recurs `least` to `greatest` tokens after its last occurrence, uniformly among
    the free places, until none is free.
    """
    document = np.frombuffer(FILLER, np.uint8)[random.integers(len(FILLER), size=LENGTH)]
    free = free_places(LENGTH, greatest)
    for key in KEYS:
        value = VALUES[random.integers(len(VALUES))]
        for place in occurrences(random, free, least, greatest, last=LENGTH - 2, room=2 + SPACING):
            document[place : place + 2] = key, value
    return document.tobytes()


def free_places(length: int, greatest: int) -> NDArray[np.bool_]:
    """Return a mask of free places `[length + greatest]`, all True: those of a document, and beyond its end."""
    return np.ones(length + greatest, dtype=bool)


def occurrences(
    random: np.random.Generator, free: NDArray[np.bool_], least: int, greatest: int, *, last: int, room: int
) -> Iterator[int]:
    """Yield the places of one key, up to the place `last`: each `least` to `greatest` after the one before.

    Each is drawn uniformly among those that are `free`; afterwards the places closer than `room` are not. The key ends
    where none is free.
    """
    # Beyond the end all places are free: a key's occurrences end there, without a bias to the last places.
    places = np.flatnonzero(free[:greatest])
    while len(places) and (place := int(places[random.integers(len(places))])) <= last:
        yield place
        free[max(0, place - room + 1) : place + room] = False
        places = place + least + np.flatnonzero(free[place + least : place + greatest + 1])
