"""The interface of all tokenizers."""

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
    """A mapping of text to token ids and back."""

    vocab_size: int
    """Number of ids, `start` included."""

    @property
    def start(self) -> int:
        """The id that precedes every document; the largest one."""
        return self.vocab_size - 1

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """Return the token ids of a text.

        Args:
            text: The text or, for tokenizers whose tokens are bytes, raw bytes.

        Returns:
            Ids `[tokens]` below `start`.

        Raises:
            CompressiveError: for text that the vocabulary cannot hold, and for bytes where tokens are not bytes.
        """
        return self._encode(text) if isinstance(text, str) else self._encode_bytes(text)

    @abstractmethod
    def _encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids `[tokens]` of a text."""

    def _encode_bytes(self, content: bytes) -> NDArray[np.int64]:
        """Return the ids `[tokens]` of raw bytes, which only some tokenizers have."""
        raise CompressiveError("bytes are read only by a tokenizer whose tokens are bytes: decode them to text first")

    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        """Return the text of ids.

        Args:
            ids: Token ids `[tokens]`.

        Returns:
            The text: nothing for `start`, U+FFFD where bytes are not UTF-8.

        Raises:
            CompressiveError: for an id that does not exist.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            raise no_such_id(wrong[0], self.vocab_size)
        return self._decode(array[array != self.start])

    @abstractmethod
    def _decode(self, ids: NDArray[np.int64]) -> str:
        """Return the text of ids that are valid and not `start`."""

    def measure(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """Return the words and the bytes of ids `[tokens]`, as word perplexity and bits per byte count them."""
        text = self.decode(ids)
        return len(text.split()), len(text.encode())

    @abstractmethod
    def decoder(self) -> TextDecoder:
        """Return a new incremental decoder, for text that is shown while it is generated."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the content of a `tokenizer.json`."""

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json` that `load_tokenizer` reads: the whole file or, on an error, none."""
        with atomic_file(Path(path)) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8", newline="\n")


class TextDecoder(ABC):
    """An incremental decoder: `decoder(id)` returns the text that this id completes, maybe ""."""

    @abstractmethod
    def __call__(self, id: int) -> str:
        """Return the text that `id` completes."""

    @abstractmethod
    def flush(self) -> str:
        """Return the rest, complete or not, and reset the decoder."""


class PieceDecoder(TextDecoder):
    """A decoder of tokens that are complete text: `pieces` by id, "" for `start`."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def __call__(self, id: int) -> str:
        if not 0 <= id < len(self._pieces):
            raise no_such_id(id, len(self._pieces))
        return self._pieces[id]

    def flush(self) -> str:
        return ""


def no_such_id(id: int, vocab_size: int) -> CompressiveError:
    """Return the error for an id that the tokenizer does not have."""
    return CompressiveError(f"token id {id} does not exist: ids are 0 to {vocab_size - 1}")
