"""Bytes as tokens, and what goes for every tokenizer whose tokens are bytes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from .base import Decoder, Tokenizer, no_such_id

BYTES_FILE = {"compressive_transformer": "bytes", "version": 1}


class ByteTokenizer(Tokenizer):
    """The bytes of the UTF-8 form: id = byte, `start` = 256."""

    vocab_size = 257

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """The bytes of a text `[bytes]`, or bytes as they are. Raises CompressiveError for a lone surrogate."""
        content = text if isinstance(text, bytes) else to_utf8(text)
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64)

    def measure(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """Words and bytes; the bytes are exact where ids begin or end within a character, too."""
        return len(self.decode(ids).split()), len(ids)

    def _decode(self, ids: NDArray[np.int64]) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def decoder(self) -> Decoder:
        """A decoder that holds back at most the three bytes of a character that is not complete."""
        return ByteDecoder({byte: bytes([byte]) for byte in range(256)}, self.vocab_size)

    def to_json(self) -> str:
        """A few words: there is nothing to store."""
        return json.dumps(BYTES_FILE) + "\n"


class ByteDecoder(Decoder):
    """For tokens that are bytes: holds back an incomplete character, nothing else."""

    def __init__(self, pieces: Mapping[int, bytes], vocab_size: int) -> None:
        self._pieces, self._vocab_size = pieces, vocab_size
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, id: int) -> str:
        if not 0 <= id < self._vocab_size:
            raise no_such_id(id, self._vocab_size)
        return self._utf8.decode(self._pieces.get(id, b""))

    def flush(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def to_utf8(text: str) -> bytes:
    """The bytes of a text. Raises CompressiveError for a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CompressiveError(
            f"character {error.start} (U+{ord(text[error.start]):04X}) is a lone surrogate, which no"
            " UTF-8 text can hold: remove or replace it"
        ) from error
