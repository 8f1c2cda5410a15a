"""Bytes as tokens, and the decoder of all tokenizers whose tokens are bytes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from .base import TextDecoder, Tokenizer, no_such_id

BYTES_FILE = {"compressive_transformer": "bytes", "version": 1}


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8: id = byte, `start` = 256."""

    vocab_size = 257

    def _encode(self, text: str) -> NDArray[np.int64]:
        return self._encode_bytes(to_utf8(text))

    def _encode_bytes(self, content: bytes) -> NDArray[np.int64]:
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64)

    def measure(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """Return words and bytes; the bytes are exact even where ids begin or end within a character."""
        return len(self.decode(ids).split()), len(ids)

    def _decode(self, ids: NDArray[np.int64]) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def decoder(self) -> TextDecoder:
        """Return a decoder that holds back at most the three bytes of an incomplete character."""
        return ByteDecoder({byte: bytes([byte]) for byte in range(256)}, self.vocab_size)

    def to_json(self) -> str:
        """Return the kind of the file: there is nothing else to store."""
        return json.dumps(BYTES_FILE) + "\n"


class ByteDecoder(TextDecoder):
    """A decoder of tokens that are bytes: it holds back an incomplete character, nothing else."""

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
    """Return the bytes of a text. Raises CompressiveError for a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CompressiveError(
            f"character {error.start} (U+{ord(text[error.start]):04X}) is a lone surrogate, which UTF-8"
            " cannot encode: remove or replace it"
        ) from error
