"""Sound as tokens: each sample is one of 256 µ-law levels, finer near silence (ITU-T G.711, µ = 255)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from .base import PieceDecoder, TextDecoder
from .bytes import ByteTokenizer

MU_LAW_FILE = {"compressive_transformer": "mu-law", "version": 1}
MU = 255


def mu_law_encode(samples: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the levels `[samples]` of samples `[samples]` in [-1, 1]: sign(x) ln(1 + µ|x|) / ln(1 + µ), quantized."""
    compressed = np.sign(samples) * np.log1p(MU * np.abs(samples)) / np.log1p(MU)
    levels: NDArray[np.uint8] = np.floor((compressed + 1) / 2 * MU + 0.5).astype(np.uint8)
    return levels


def mu_law_decode(levels: NDArray[Any]) -> NDArray[np.float64]:
    """Return the samples `[samples]` in [-1, 1] of levels `[samples]`."""
    compressed = 2 * levels.astype(np.float64) / MU - 1
    samples: NDArray[np.float64] = np.sign(compressed) * np.expm1(np.abs(compressed) * np.log1p(MU)) / MU
    return samples


class MuLawTokenizer(ByteTokenizer):
    """Samples as bytes of µ-law: id = level, `start` = 256. As text, one character stands for one sample."""

    def __init__(self, rate: int) -> None:
        """Set the rate of the sound (samples per second)."""
        if rate < 1:
            raise CompressiveError(f"rate ({rate}) must be 1 or more")
        self.rate = rate

    def _encode(self, text: str) -> NDArray[np.int64]:
        try:
            return self._encode_bytes(text.encode("latin-1"))
        except UnicodeEncodeError as error:
            raise CompressiveError("this tokenizer is for sound, not for text: give a .wav file") from error

    def measure(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """Return no words, and one byte per sample."""
        return 0, len(ids)

    def _decode(self, ids: NDArray[np.int64]) -> str:
        return ids.astype(np.uint8).tobytes().decode("latin-1")

    def decoder(self) -> TextDecoder:
        """Return a decoder that returns a character for each id."""
        return PieceDecoder([*map(chr, range(256)), ""])

    def to_json(self) -> str:
        """Return the rate: there is nothing else to store."""
        return json.dumps({**MU_LAW_FILE, "rate": self.rate}) + "\n"
