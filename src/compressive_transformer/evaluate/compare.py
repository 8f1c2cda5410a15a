"""Comparison of two models on the same documents, with intervals over documents and over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CompressiveError

COVERAGE = 0.95
"""Probability that an interval covers."""
DRAWS_AT_ONCE = 2**20
"""Documents drawn at a time, which bounds the memory of the bootstrap."""

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom. A table, since SciPy would be a large dependency for
# these, and its `bootstrap` draws other resamples than the published intervals have.
STUDENT_QUANTILES = (
    12.7062047, 4.3026527, 3.1824463, 2.7764451, 2.5705818, 2.4469119, 2.3646243, 2.3060041, 2.2621572, 2.2281389,
    2.2009852, 2.1788128, 2.1603687, 2.1447867, 2.1314495, 2.1199053, 2.1098156, 2.1009220, 2.0930241, 2.0859634,
    2.0796138, 2.0738731, 2.0686576, 2.0638986, 2.0595386, 2.0555294, 2.0518305, 2.0484071, 2.0452296, 2.0422725,
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """The gain of the second of two models on the first: differences are second − first, less is better.

    Its two intervals answer different questions. Over documents: would the result hold on other documents of the same
    kind, with the same weights? Over runs: would it hold after training again from other seeds, on the same documents?
    """

    documents: int
    """Number of documents."""
    runs: int
    """Number of pairs of runs, one per seed."""
    first: float
    """Bits per byte of the first model, mean over runs."""
    second: float
    """Bits per byte of the second model, mean over runs."""
    difference: float
    """second − first, in bits per byte."""
    difference_over_documents: tuple[float, float] | None
    """95 % interval of `difference`, by a bootstrap over documents; None for a single document."""
    better: float | None
    """Share of resamples in which the second needs fewer bits, ties counting half; None for a single document."""
    ratio: float | None
    """Word perplexity of the second / word perplexity of the first, geometric mean over runs.

    None if a document has no words, or if the ratio is beyond floating point."""
    ratio_over_documents: tuple[float, float] | None
    """95 % interval of `ratio`, by the same bootstrap."""
    differences: tuple[float, ...]
    """The difference in bits per byte of each pair of runs."""
    deviation: float | None
    """Standard deviation of `differences` (n − 1); None for a single pair."""
    difference_over_runs: tuple[float, float] | None
    """95 % interval of the mean of `differences`, Student's t with n − 1 degrees of freedom; None for a single pair."""

    def __str__(self) -> str:
        runs = f", means of {self.runs} runs" if self.runs > 1 else ""
        lines = [
            f"first                 {self.first:.4f} bits per byte on {self.documents} documents{runs}",
            f"second                {self.second:.4f}",
            f"second − first       {self.difference:+.4f}{_between(self.difference_over_documents, '+.4f')}",
        ]
        if self.ratio is not None:
            between = _between(self.ratio_over_documents, ".4f")
            lines.append(f"word perplexity     × {self.ratio:.4f}{between}")
        if self.better is not None:
            lines.append(f"second better in      {self.better:.1%} of resamples of the documents")
        if self.difference_over_runs is not None:
            between = "{:+.4f} to {:+.4f}".format(*self.difference_over_runs)
            lines.append(
                f"over runs            {self.difference:+.4f}   95 % over seeds: {between}"
                f"   ({', '.join(f'{value:+.4f}' for value in self.differences)})"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], *, resamples: int = 10_000, seed: int = 0
) -> Comparison:
    """Compare two results on the same documents: `compare_runs` with one run per model."""
    return compare_runs([first], [second], resamples=resamples, seed=seed)


def compare_runs(
    first: Sequence[Mapping[str, Any]],
    second: Sequence[Mapping[str, Any]],
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compare two models, each trained from one or several seeds, on the same documents.

    The interval over documents is a bootstrap (percentile method, Efron 1979): documents are drawn with replacement,
    the same ones for both models and all runs, so that what makes a document easy or hard cancels in the difference.
    The interval over runs is Student's t on the paired differences, since a bootstrap of three or five values would
    be far too narrow.

    Args:
        first: Results of the first model, one per run, as `Evaluation.to_dict()` returns them.
        second: Results of the second model; `second[i]` is of the same seed as `first[i]`.
        resamples: Number of bootstrap resamples.
        seed: Seed of the bootstrap.

    Returns:
        Differences in bits per byte and in word perplexity, with their intervals.

    Raises:
        CompressiveError: The numbers of runs differ, results are not of the same documents or not of an evaluation, or
            a number is out of range.
    """
    nats = _document_nats(first, second)
    if resamples < 1 or seed < 0:
        raise CompressiveError(f"resamples ({resamples}) must be 1 or more and seed ({seed}) 0 or more")
    size, words = (
        np.array([entry[name] for entry in first[0]["documents"]], np.float64) for name in ("bytes", "words")
    )
    return _comparison(nats, size, words, resamples, seed)


def _document_nats(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Return nats `[model, run, document]`. Raise CompressiveError unless all results are of the same documents."""
    if len(first) != len(second) or not first:
        raise CompressiveError(
            f"first has {len(first)} results and second {len(second)}: give the same number of each, at least one, "
            "paired by seed"
        )
    named = {f"{side}[{i}]": run for side, runs in (("first", first), ("second", second)) for i, run in enumerate(runs)}
    nats = np.array([_checked(name, table, named["first[0]"]) for name, table in named.items()])
    return nats.reshape(2, len(first), -1)


def _comparison(
    nats: NDArray[np.float64], size: NDArray[np.float64], words: NDArray[np.float64], resamples: int, seed: int
) -> Comparison:
    """Compare `nats [model, run, document]` of documents of `size [document]` bytes and `words [document]`."""
    documents = len(size)
    to_bits = 1 / math.log(2) / size.sum()
    totals = nats.sum(2)
    differences = ((totals[1] - totals[0]) * to_bits).tolist()
    gained = (nats[1] - nats[0]).mean(0)
    drawn = resampled(np.stack([gained, size, words]), resamples, seed) if documents > 1 else None
    has_ratio = bool((np.abs(gained) < 700 * words).all())  # exp(709) is the largest number
    several = len(differences) > 1
    return Comparison(
        documents=documents,
        runs=len(differences),
        first=float(totals[0].mean() * to_bits),
        second=float(totals[1].mean() * to_bits),
        difference=statistics.fmean(differences),
        difference_over_documents=None if drawn is None else interval_of(drawn[0] / drawn[1] / math.log(2)),
        better=None if drawn is None else float((1 - np.sign(drawn[0])).mean() / 2),
        ratio=math.exp(gained.sum() / words.sum()) if has_ratio else None,
        ratio_over_documents=interval_of(np.exp(drawn[0] / drawn[2])) if has_ratio and drawn is not None else None,
        differences=tuple(differences),
        deviation=statistics.stdev(differences) if several else None,
        difference_over_runs=student_interval(differences) if several else None,
    )


def _checked(name: str, table: Mapping[str, Any], like: Mapping[str, Any]) -> list[float]:
    """Return the nats of each document. Raise CompressiveError unless they are of the same documents as `like`."""
    identity, expected = _identity(name, table), _identity("first[0]", like)
    for key, value in identity.items():
        if value != expected[key]:
            raise CompressiveError(
                f"{name} and first[0] did not score the same text: {key} is {value!r} and {expected[key]!r};"
                " score both on the same split of the same corpus, with the same --tokens"
            )
    nats = [float(entry["nats"]) for entry in table["documents"]]
    if not all(map(math.isfinite, nats)):
        raise CompressiveError(f"{name} has nats that are not finite, so it cannot be compared")
    if not nats or not all(entry["bytes"] for entry in table["documents"]):
        raise CompressiveError(f"{name} must have documents with at least one byte each")
    return nats


def _identity(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two results on the same text have in common."""
    try:
        conditions, documents = table["conditions"], table["documents"]
        identity = {"the split": conditions["split"], "the corpus": conditions["corpus_fingerprint"]}
        identity["the number of documents"] = len(documents)
        for number, entry in enumerate(documents):
            float(entry["nats"])
            counts = {count: entry[count] for count in ("tokens", "bytes", "words")}
            identity[f"document {number}"] = {"title": entry["title"], **counts}
    except (KeyError, TypeError, ValueError) as error:
        raise CompressiveError(
            f"{name} is not the result of an evaluation ({type(error).__name__}: {error});"
            " expected the output of Evaluation.to_dict() or `compressive evaluate --json`"
        ) from None
    return identity


def resampled(values: NDArray[np.float64], resamples: int = 10_000, seed: int = 0) -> NDArray[np.float64]:
    """Return sums of `values [value, document]` over documents drawn with replacement, `[value, resample]`."""
    random, documents = np.random.default_rng(seed), values.shape[1]
    at_once = max(1, DRAWS_AT_ONCE // documents)
    sums = [
        values[:, random.integers(documents, size=(min(at_once, resamples - done), documents))].sum(2)
        for done in range(0, resamples, at_once)
    ]
    return np.concatenate(sums, axis=1)


def interval_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the central interval that covers 95 % of `values [resample]`."""
    low, high = np.quantile(values, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of at least two values, by Student's t."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = _student_quantile(len(values) - 1) * error
    return mean - half, mean + half


def _student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t: from the table, or by an expansion for more degrees of freedom."""
    if freedom <= len(STUDENT_QUANTILES):
        return STUDENT_QUANTILES[freedom - 1]
    z = statistics.NormalDist().inv_cdf((1 + COVERAGE) / 2)
    # Abramowitz and Stegun (1964), 26.7.5; the next term is below 1e-5 from 31 degrees of freedom on.
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return math.fsum([z, *(term / freedom**power for power, term in enumerate(terms, 1))])


def _between(interval: tuple[float, float] | None, form: str) -> str:
    if interval is None:
        return ""
    low, high = (format(value, form) for value in interval)
    return f"   95 % over documents: {low} to {high}"
