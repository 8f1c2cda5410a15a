"""What a trained model can be scored by: the columns of the table, and how two settings are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..comparison import compare_runs
from ..corpus import Split
from ..evaluate import beginnings, evaluate
from ..model import CompressiveTransformer
from ..tokenizer import Tokenizer
from .plan import EvaluateConfig

Table = Mapping[str, Any]
"""The score of one run as plain values, ready for JSON."""


@dataclass(frozen=True)
class Measure:
    """A number in a score that the table shows."""

    key: str
    title: str
    decimals: int


@dataclass(frozen=True)
class Task:
    """One kind of score."""

    score: Callable[[CompressiveTransformer, Tokenizer, Split, EvaluateConfig], dict[str, Any]]
    """The score of a trained model; it holds a number, or None, for each measure."""
    measures: tuple[Measure, ...]
    """The columns of the table; the first is the one that settings are compared by."""
    compare: Callable[[Sequence[Table], Sequence[Table]], dict[str, Any]]
    """Scores of the baseline and of a setting, seed by seed -> `difference` (setting − baseline) with its 95 %
    intervals `difference_over_runs` and `difference_over_documents`, each a pair or None."""


def _score_text(
    model: CompressiveTransformer, tokenizer: Tokenizer, split: Split, config: EvaluateConfig
) -> dict[str, Any]:
    chosen = beginnings(split, tokenizer, config.tokens) if config.tokens else split
    return evaluate(model, chosen, batch=config.batch).table()


TASKS: dict[str, Task] = {
    "text": Task(
        score=_score_text,
        measures=(Measure("bits_per_byte", "bits per byte", 4), Measure("word_perplexity", "word perplexity", 2)),
        compare=lambda baseline, setting: compare_runs(baseline, setting).table(),
    ),
}
