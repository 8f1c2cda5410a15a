"""What every source gives: documents in parts, and the rules by which they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..corpus import SPLITS

NEWLINES = "CRLF and CR are read as LF"
WHOLE = "whole"  # the one part of a source that has no splits of its own


class Text(NamedTuple):
    """One document of a source."""

    title: str
    text: str | bytes
    """Bytes are the tokens themselves, for sources that are read as they are."""
    place: str
    """The file, line or record that it is, for error messages."""
    words: int | None = None
    """What word perplexity is to be measured by, where it is not what whitespace separates."""
    read: int = 0
    """Bytes on disk that were read for it, where they are counted; of compressed files, compressed ones."""

    def measure(self) -> tuple[int, int]:
        """Its words and its bytes."""
        if isinstance(self.text, bytes):
            return self.words or 0, len(self.text)
        return len(self.text.split()) if self.words is None else self.words, len(self.text.encode("utf-8"))


Parts = dict[str, Callable[[], Iterator[Text]]]


@dataclass(frozen=True)
class Source:
    """Documents that can be read again and again, each with the split that it belongs to."""

    name: str
    """What to call it; never a path on this machine."""
    parts: Parts
    """What reads the documents of each split, or of the `WHOLE`."""
    holdout: int
    """Of so many documents of a whole one goes to validation and one to test; 0: all are for training."""
    reading: str = NEWLINES
    """How files become documents, in words."""
    cut: str = ""
    """How documents are given to splits, in words, where the source has a rule of its own."""
    tokenizer: str = ""
    """The only kind of tokenizer that can hold it: words or mu-law, or bytes as they are; "" for text, any."""
    rate: int = 0
    """Samples a second, of sound."""
    benchmark: str = ""
    """The published data that it is, or is a part of, as far as it can be told."""
    targets: tuple[int, ...] = ()
    """Token ids that alone are learned from and scored, of a source with a tokenizer of its own; all if empty."""
    files: tuple[Path, ...] = ()
    """All files that it is read from; empty where they are not known."""

    @property
    def size(self) -> int:
        """Bytes of its files on disk; 0 where they are not known."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def rule(self) -> str:
        """How documents are given to splits, in words."""
        if self.cut:
            return self.cut
        if WHOLE not in self.parts:
            return "as the source has them"
        if not self.holdout:
            return "all documents are for training"
        return f"of every {self.holdout} documents in order the 2nd is for validation, the 3rd for test"

    def read(self) -> Iterator[tuple[str, Text]]:
        """Each document once, in order, after the name of its split."""
        for part, read in self.parts.items():
            for number, text in enumerate(read()):
                yield self._split_of(number) if part == WHOLE else part, text

    def _split_of(self, number: int) -> str:
        # The second and third, so that three documents are enough to fill all splits.
        place = number % self.holdout if self.holdout else 0
        return SPLITS[place] if place < len(SPLITS) else "train"
