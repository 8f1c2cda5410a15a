"""What every tokenizer does, whatever its tokens are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from ...files import atomic_file


class Tokenizer(ABC):
    """What encodes text to ids and decodes ids to text."""

    vocab_size: int
    """Number of ids, `start` included."""

    @property
    def start(self) -> int:
        """The id that stands before every document; the largest one."""
        return self.vocab_size - 1

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids `[tokens]` of a text. Raises CompressiveError for text that it cannot hold."""

    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        """The text of ids; "" for `start`, U+FFFD where the bytes are not UTF-8."""
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            raise no_such_id(wrong[0], self.vocab_size)
        return self._decode(array[array != self.start])

    @abstractmethod
    def _decode(self, ids: NDArray[np.int64]) -> str:
        """The text of ids that are known to be tokens."""

    def measure(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """Words and bytes that part of a document counts, as word perplexity and bits per byte take them."""
        text = self.decode(ids)
        return len(text.split()), len(text.encode())

    @abstractmethod
    def decoder(self) -> Decoder:
        """A new incremental decoder, for output that is shown while it is written."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json` that `load_tokenizer` reads: the whole file or, on an error, none."""
        with atomic_file(Path(path)) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8", newline="\n")


class Decoder(ABC):
    """Turns ids into text one by one: `decoder(id)` gives the text that this id completes, maybe ""."""

    @abstractmethod
    def __call__(self, id: int) -> str:
        """The text that became complete with `id`."""

    @abstractmethod
    def flush(self) -> str:
        """The rest, complete or not; the decoder is then as new."""


class PieceDecoder(Decoder):
    """For tokens that are text of their own: `pieces` by id, "" for `start`."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def __call__(self, id: int) -> str:
        if not 0 <= id < len(self._pieces):
            raise no_such_id(id, len(self._pieces))
        return self._pieces[id]

    def flush(self) -> str:
        return ""


def no_such_id(id: int, vocab_size: int) -> CompressiveError:
    """What to raise for an id that is none of the tokenizer's."""
    return CompressiveError(f"token id {id} does not exist: ids are 0 to {vocab_size - 1}")
