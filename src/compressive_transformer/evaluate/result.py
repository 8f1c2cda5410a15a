"""Results of an evaluation: nats, the counts that divide them, and the conditions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Score:
    """The negative log-likelihood of a text, and the counts that it is divided by.

    If the corpus says which tokens are targets, `tokens` and `bytes` count only these, and there are no words.
    """

    nats: float
    """-ln p of all tokens."""
    tokens: int
    """Number of tokens."""
    words: int
    """Number of words, separated by whitespace."""
    bytes: int
    """Number of UTF-8 bytes."""

    @property
    def word_perplexity(self) -> float:
        """exp(nats / whitespace-separated words) (Sec. 4.2); inf without words or beyond floating point."""
        return _exp(self.nats / self.words) if self.words else math.inf

    @property
    def bits_per_byte(self) -> float:
        """nats / ln 2 / UTF-8 bytes; NaN without bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood of a token; depends on the tokenizer; NaN without tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    def to_dict(self) -> dict[str, float | int | None]:
        """Return counts and measures as plain values; None for a division by 0 and for a perplexity that is inf."""
        perplexity = self.word_perplexity
        return {
            **asdict(self),
            "nats_per_token": self.nats_per_token if self.tokens else None,
            "bits_per_byte": self.bits_per_byte if self.bytes else None,
            "word_perplexity": perplexity if math.isfinite(perplexity) else None,
        }


@dataclass(frozen=True)
class Evaluation:
    """The scores of a split: in total, of each document, of its parts, and the conditions. `print` shows a table."""

    total: Score
    documents: tuple[tuple[str, Score], ...]
    """Title and score of each document, in the order of the split."""
    conditions: dict[str, Any]
    """All that is needed to reproduce the scores: model, data, weights, versions."""
    buckets: Mapping[str, tuple[tuple[str, Score], ...]] = field(default_factory=dict)
    """Label and score of each bucket, under `by_position` and `by_frequency` if these were requested."""

    def __str__(self) -> str:
        total, memory = self.total, self.conditions["model"]
        lines = [
            f"{self.conditions['split']}: {len(self.documents)} documents, {total.bytes:,} bytes, "
            f"{total.words:,} words, {total.tokens:,} tokens",
            f"bits per byte     {total.bits_per_byte:.4f}",
            "word perplexity   "
            + (f"{total.word_perplexity:.2f}" if total.words else "none, there are no words")
            + ("" if self.conditions["lossless"] else "   (not sound: the tokenizer loses text)"),
            f"nats per token    {total.nats_per_token:.4f}   (total {total.nats:,.1f} nats)",
            f"memory            segment {memory['segment_length']}, recent {memory['memory_length']}, "
            f"compressed {memory['compressed_length']} at rate {memory['compression_rate']}",
        ]
        if self.conditions["benchmark"]:
            lines.append(f"benchmark         {self.conditions['benchmark']}")
        if "dynamic" in self.conditions:
            lines.append(f"dynamic           SGD at {self.conditions['dynamic']['learning_rate']:g} after each segment")
        for name, buckets in self.buckets.items():
            header = (
                f"{name.replace('_', ' '):<18}{'tokens':>12}{'words':>12}{'bits per byte':>15}{'word perplexity':>17}"
            )
            lines += ["", header]
            for label, score in buckets:
                perplexity = f"{score.word_perplexity:.2f}" if score.word_perplexity < 1e9 else "> 1e9"
                counts = f"{label:<18}{score.tokens:>12,}{score.words:>12,}"
                lines.append(f"{counts}{score.bits_per_byte:>15.4f}{perplexity:>17}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        documents = [{"title": title, **score.to_dict()} for title, score in self.documents]
        buckets = {
            name: [{"bucket": label, **score.to_dict()} for label, score in scores]
            for name, scores in self.buckets.items()
        }
        return {**self.total.to_dict(), "conditions": self.conditions, **buckets, "documents": documents}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
