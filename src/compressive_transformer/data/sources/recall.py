"""Distant recall: made-up documents in which every answer is known only to who remembers something far back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from .source import Source, Text

LENGTH = 1_280
"""Tokens of a document, bytes each."""
KEYS = b"ABCDEFGH"
VALUES = b"0123456789IJKLMNOPQRSTqrstuvwxyz"
FILLER = b"abcdefghijklmnop"
SPACING = 6
"""Least number of filler tokens between two occurrences, of whichever keys."""
DOCUMENTS = {"train": 3_000, "validation": 32, "test": 64}
SEED = 0


def recall(setting: str) -> Source:
    """Keys and values amid filler; `setting` is "LEAST-GREATEST", or that and ":N" for N training documents.

    See `recall_document`. Each document has a random stream of its own, so more of them leave the first as they are.
    Raises CompressiveError for distances that no document has room for.
    """
    found = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", setting)
    if not found:
        raise CompressiveError(
            f"recall:{setting} must be recall:LEAST-GREATEST, two distances in tokens as in recall:75-140; a third"
            " number after a colon is that of training documents"
        )
    least, greatest, train = int(found[1]), int(found[2]), int(found[3] or DOCUMENTS["train"])
    if not 2 + SPACING <= least <= greatest < LENGTH or not train:
        raise CompressiveError(
            f"recall:{setting}: distances must rise from {2 + SPACING} on and be less than {LENGTH} tokens, the length"
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
        cut=", ".join(f"{count:,} for {split}" for split, count in counts.items()),
        tokenizer="bytes",
        targets=tuple(sorted(VALUES)),
    )


def _documents(split: str, stream: int, count: int, least: int, greatest: int) -> Iterator[Text]:
    for number in range(count):
        content = recall_document(np.random.default_rng([SEED, stream, number]), least=least, greatest=greatest)
        yield Text(f"{split} {number}", content, f"recall {split} {number}", words=0)


def recall_document(random: np.random.Generator, *, least: int, greatest: int) -> bytes:
    """One document of `LENGTH` tokens: filler, and keys each followed by its value.

    A key has one value in a document and occurs again and again, each time `least` to `greatest` tokens after its
    last occurrence, uniformly among the places that are free then. Where none is free it does not occur again.
    """
    document = np.frombuffer(FILLER, np.uint8)[random.integers(len(FILLER), size=LENGTH)]
    free = free_places(LENGTH, greatest)
    for key in KEYS:
        value = VALUES[random.integers(len(VALUES))]
        for place in occurrences(random, free, least, greatest, last=LENGTH - 2, room=2 + SPACING):
            document[place : place + 2] = key, value
    return document.tobytes()


def free_places(length: int, greatest: int) -> NDArray[np.bool_]:
    """Every place of a document, and as many beyond it as `occurrences` looks at: all free."""
    return np.ones(length + greatest, dtype=bool)


def occurrences(
    random: np.random.Generator, free: NDArray[np.bool_], least: int, greatest: int, *, last: int, room: int
) -> Iterator[int]:
    """Places where one key occurs, up to the place `last`: each `least` to `greatest` after the one before.

    Each is drawn uniformly among those that are `free`; less than `room` around it nothing is free afterwards. Where
    none is free the key does not occur again.
    """
    # Beyond the end everything is free: there a key's occurrences end, without any pull towards the last places.
    places = np.flatnonzero(free[:greatest])
    while len(places) and (place := int(places[random.integers(len(places))])) <= last:
        yield place
        free[max(0, place - room + 1) : place + room] = False
        places = place + least + np.flatnonzero(free[place + least : place + greatest + 1])
