"""Sound as tokens: each sample is one of 256 steps that are finer near silence (µ-law, ITU-T G.711, µ = 255)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from .base import Decoder, PieceDecoder
from .bytes import ByteTokenizer

MU_LAW_FILE = {"compressive_transformer": "mu-law", "version": 1}
MU = 255


def mu_law_encode(samples: NDArray[Any]) -> NDArray[np.uint8]:
    """The step of each of the samples, which lie in [-1, 1]: sign(x) ln(1 + µ|x|) / ln(1 + µ), in 256 even steps."""
    compressed = np.sign(samples) * np.log1p(MU * np.abs(samples)) / np.log1p(MU)
    steps: NDArray[np.uint8] = np.floor((compressed + 1) / 2 * MU + 0.5).astype(np.uint8)
    return steps


def mu_law_decode(steps: NDArray[Any]) -> NDArray[np.float64]:
    """The sample in [-1, 1] that each step stands for."""
    compressed = 2 * steps.astype(np.float64) / MU - 1
    samples: NDArray[np.float64] = np.sign(compressed) * np.expm1(np.abs(compressed) * np.log1p(MU)) / MU
    return samples


class MuLawTokenizer(ByteTokenizer):
    """Samples as bytes of µ-law: id = step, `start` = 256. Where text is asked for, a character stands for a sample."""

    def __init__(self, rate: int) -> None:
        """For sound of `rate` samples a second."""
        if rate < 1:
            raise CompressiveError(f"rate ({rate}) must be 1 or more")
        self.rate = rate

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """The steps `[samples]`, given as bytes or as what `decode` gives."""
        try:
            return super().encode(text if isinstance(text, bytes) else text.encode("latin-1"))
        except UnicodeEncodeError as error:
            raise CompressiveError("this tokenizer is for sound, not for text: give a .wav file") from error

    def measure(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """No words, and one byte a sample."""
        return 0, len(ids)

    def _decode(self, ids: NDArray[np.int64]) -> str:
        return ids.astype(np.uint8).tobytes().decode("latin-1")

    def decoder(self) -> Decoder:
        """A decoder that gives a character with each id."""
        return PieceDecoder([*map(chr, range(256)), ""])

    def to_json(self) -> str:
        """The rate: there is nothing else to store."""
        return json.dumps({**MU_LAW_FILE, "rate": self.rate}) + "\n"
