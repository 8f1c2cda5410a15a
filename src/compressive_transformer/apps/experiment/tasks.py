"""Ways to score a trained model: the columns of the table, and the comparison of two settings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...data import Split
from ...data.tokenizers import Tokenizer
from ...evaluate import evaluate, truncate_split
from ...evaluate.compare import compare_runs, interval_of, resampled, student_interval
from ...evaluate.recall import recall_accuracy
from ...model import CompressiveTransformer
from .plan import EvaluateConfig

Table = Mapping[str, Any]
"""Score of one run as plain values."""


@dataclass(frozen=True)
class Measure:
    """Number in a score that the table shows."""

    key: str
    title: str
    decimals: int


@dataclass(frozen=True)
class Task:
    """One way to score a model."""

    score: Callable[[CompressiveTransformer, Tokenizer, Split, EvaluateConfig], dict[str, Any]]
    """Scores a trained model; the result holds a number, or None, for each measure."""
    measures: tuple[Measure, ...]
    """Columns of the table; settings are compared by the first."""
    compare: Callable[[Sequence[Table], Sequence[Table]], dict[str, Any]]
    """Scores of the baseline and of a setting, seed by seed -> `difference` (setting − baseline) with its 95 %
    intervals `difference_over_runs` and `difference_over_documents`, each a pair or None."""


def _score_text(
    model: CompressiveTransformer, tokenizer: Tokenizer, split: Split, config: EvaluateConfig
) -> dict[str, Any]:
    return evaluate(model, _scored_split(tokenizer, split, config), batch_size=config.batch_size).to_dict()


def _score_recall(
    model: CompressiveTransformer, tokenizer: Tokenizer, split: Split, config: EvaluateConfig
) -> dict[str, Any]:
    return recall_accuracy(model, _scored_split(tokenizer, split, config), batch_size=config.batch_size).to_dict()


def _scored_split(tokenizer: Tokenizer, split: Split, config: EvaluateConfig) -> Split:
    return truncate_split(split, tokenizer, config.tokens) if config.tokens else split


def _compare_recall(baseline: Sequence[Table], setting: Sequence[Table]) -> dict[str, Any]:
    """Compare accuracies, setting − baseline: more is better. All scores are of the same documents."""
    differences = [ours["accuracy"] - other["accuracy"] for other, ours in zip(baseline, setting, strict=True)]
    right = np.array([[[d["right"] for d in score["documents"]] for score in side] for side in (baseline, setting)])
    answers = np.array([document["answers"] for document in baseline[0]["documents"]], np.float64)
    drawn = resampled(np.stack([(right[1] - right[0]).mean(0), answers])) if len(answers) > 1 else None
    return {
        "documents": len(answers),
        "runs": len(differences),
        "difference": statistics.fmean(differences),
        "differences": differences,
        "difference_over_documents": None if drawn is None else interval_of(drawn[0] / drawn[1]),
        "difference_over_runs": student_interval(differences) if len(differences) > 1 else None,
    }


TASKS: dict[str, Task] = {
    "text": Task(
        score=_score_text,
        measures=(Measure("bits_per_byte", "bits per byte", 4), Measure("word_perplexity", "word perplexity", 2)),
        compare=lambda baseline, setting: compare_runs(baseline, setting).to_dict(),
    ),
    "recall": Task(score=_score_recall, measures=(Measure("accuracy", "accuracy", 4),), compare=_compare_recall),
}
