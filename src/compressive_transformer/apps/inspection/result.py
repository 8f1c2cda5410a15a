"""Result of an inspection: numbers for each token of a text, and the work of memory while it was read."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...compression import COMPRESSIONS
from ...config import ModelConfig
from ...config.toml import to_dict
from ...evaluate import ByFrequency
from ...evaluate.buckets import TokenSpans
from ...evaluate.reconstruction import Reconstruction
from .attention import LayerAttention, Slot, TokenAttention
from .contrast import Contrast, Reading, contrast
from .kept import KeptStates


@dataclass(frozen=True, eq=False)
class Inspection:
    """Inspection of a model on a text, read from its beginning in segments.

    Tokens are counted from 0. Fields without data are None, and `missing` holds the reason. `print(inspection)` shows
    bits per byte, with and without compressed memory.
    """

    config: ModelConfig
    pieces: TokenSpans
    """Text as the tokenizer decodes it, and the part that each token completes."""
    nats: NDArray[np.float64]
    """−ln p(token | all before) `[tokens]`, in nats."""
    nats_without: NDArray[np.float64] | None
    """Nats without compressed memory `[tokens]`, see `inspect_text`."""
    attention: tuple[LayerAttention, ...]
    """Attention by age, of each layer (Figure 2 of the paper)."""
    tokens: tuple[TokenAttention, ...]
    """Attention that predicts some tokens, in the order of the text."""
    reconstruction: Reconstruction | None
    """Squared error / squared target of attention reconstruction over all commits (Figure 6 of the paper)."""
    kept: tuple[KeptStates, ...] | None
    """Kept states of each layer whose function selects states (most-used)."""
    missing: dict[str, str]
    """Reasons by the name of a field that is None."""

    @property
    def reading(self) -> Reading:
        """The text with its nats."""
        return Reading(self.pieces, self.nats)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the whole text."""
        return float(self.nats.sum() / math.log(2) / self.pieces.bytes.sum())

    @property
    def bits_per_byte_without(self) -> float | None:
        """Bits per byte without compressed memory; None for a model that has none."""
        if self.nats_without is None:
            return None
        return float(self.nats_without.sum() / math.log(2) / self.pieces.bytes.sum())

    def gain(self, frequency: ByFrequency | None = None) -> Contrast | None:
        """Return the gain of compressed memory by word, position and frequency.

        The first reading has compressed memory, the second has not.

        Args:
            frequency: Buckets of words by their occurrences in a training split.

        Returns:
            The contrast; None for a model without compressed memory.
        """
        if self.nats_without is None:
            return None
        return contrast(self.reading, Reading(self.pieces, self.nats_without), frequency)

    @property
    def slot_note(self) -> str:
        """Other states than those of its group that a compressed slot depends on; "" if there are none."""
        name = self.config.compression
        return "" if self.nats_without is None else COMPRESSIONS[name].slot_note(name)

    def text_of(self, slot: Slot) -> str:
        """Return the text that a slot stands for; "" for the start of the document and for an empty slot."""
        starts = self.pieces.starts
        first, stop = max(slot.first, 0), max(slot.stop, 0)
        end = int(starts[stop]) if stop < len(starts) else len(self.pieces.text)
        return self.pieces.text[int(starts[first]) : end] if first < stop else ""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return {
            "model": to_dict(self.config),
            "text": self.pieces.text,
            "bits_per_byte": self.bits_per_byte,
            "token_starts": self.pieces.starts.tolist(),
            "nats": self.nats.tolist(),
            "nats_without": None if self.nats_without is None else self.nats_without.tolist(),
            "attention": [
                {
                    "buckets": [bucket._asdict() for bucket in layer.buckets],
                    "heads": [list(shares) for shares in layer.heads],
                }
                for layer in self.attention
            ],
            "slot_note": self.slot_note,
            "tokens": [self._token_table(token) for token in self.tokens],
            "reconstruction": None if self.reconstruction is None else asdict(self.reconstruction),
            "kept": None
            if self.kept is None
            else [{**vars(layer), "tokens": layer.tokens.tolist()} for layer in self.kept],
            "missing": self.missing,
        }

    def _token_table(self, token: TokenAttention) -> dict[str, Any]:
        layers = []
        for read in token.layers:
            mean, *heads = (
                {**head._asdict(), "slots": [{**slot._asdict(), "text": self.text_of(slot)} for slot in head.slots]}
                for head in (read.mean, *read.heads)
            )
            layers.append({"mean": mean, "heads": heads})
        return {"token": token.token, "layers": layers}

    def __str__(self) -> str:
        lines = [
            f"{len(self.nats):,} tokens, {int(self.pieces.bytes.sum()):,} bytes",
            f"bits per byte                       {self.bits_per_byte:.4f}",
        ]
        if self.bits_per_byte_without is not None:
            lines.append(f"without compressed memory           {self.bits_per_byte_without:.4f}")
        return "\n".join(lines)
