"""A source: documents in splits, and the rules by which they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..corpus import SPLITS

NEWLINES = "CRLF and CR are read as LF"
WHOLE = "whole"  # the only part of a source without splits


class RawDocument(NamedTuple):
    """One document of a source, not encoded yet."""

    title: str
    content: str | bytes
    """Text, or bytes that are the tokens themselves."""
    place: str
    """File, line or record, for error messages."""
    words: int | None = None
    """Words for word perplexity; None counts what whitespace separates."""
    read: int = 0
    """Bytes read from disk for it (compressed ones of compressed files), 0 where they are not counted."""

    def measure(self) -> tuple[int, int]:
        """Return its words and its bytes."""
        if isinstance(self.content, bytes):
            return self.words or 0, len(self.content)
        words = len(self.content.split()) if self.words is None else self.words
        return words, len(self.content.encode("utf-8"))


Parts = dict[str, Callable[[], Iterator[RawDocument]]]


@dataclass(frozen=True)
class Source:
    """Documents that can be read any number of times, each with its split."""

    name: str
    """Its name, never a path of this machine."""
    parts: Parts
    """Readers of the documents by split, or of the `WHOLE`."""
    holdout: int
    """For a `WHOLE`: of every `holdout` documents one goes to validation and one to test; 0 uses all for training."""
    reading: str = NEWLINES
    """Description of how files become documents."""
    split_rule: str = ""
    """Description of how documents are split, for sources with a special rule."""
    tokenizer: str = ""
    """The required kind of tokenizer: words, mu-law or bytes; "" for text, which takes any."""
    rate: int = 0
    """Samples per second, of sound."""
    benchmark: str = ""
    """The published data set that it is part of, as far as is known."""
    targets: tuple[int, ...] = ()
    """The only token ids that are trained on and scored, for sources with a required tokenizer; empty for all."""
    files: tuple[Path, ...] = ()
    """All files that are read; empty where they are unknown."""

    @property
    def size(self) -> int:
        """Bytes of its files on disk; 0 where they are unknown."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def rule(self) -> str:
        """Description of how documents are split."""
        if self.split_rule:
            return self.split_rule
        if WHOLE not in self.parts:
            return "as the source has them"
        if not self.holdout:
            return "all documents are for training"
        return f"of every {self.holdout} documents in order the 2nd is for validation, the 3rd for test"

    def read(self) -> Iterator[tuple[str, RawDocument]]:
        """Yield the split and the document, for each document once, in order."""
        for part, read in self.parts.items():
            for number, document in enumerate(read()):
                yield self._split_of(number) if part == WHOLE else part, document

    def _split_of(self, number: int) -> str:
        # The second and third, so that three documents fill all splits.
        place = number % self.holdout if self.holdout else 0
        return SPLITS[place] if place < len(SPLITS) else "train"
