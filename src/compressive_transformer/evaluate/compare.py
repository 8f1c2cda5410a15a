"""Whether one model is better than another on the same documents, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CompressiveError

COVERED = 0.95
DRAWS_AT_ONCE = 2**20


@dataclass(frozen=True)
class Comparison:
    """What the second of two models gains on the first: differences are second − first, less is better.

    Two intervals answer two questions, and neither answers the other's. That over documents: would it be so on
    other documents of the same kind, with these very weights? That over runs: would it be so after training again
    from other seeds, on these very documents?
    """

    documents: int
    runs: int
    """Pairs of runs, one a seed."""
    first: float
    """Bits per byte of the first model, mean over runs."""
    second: float
    """Bits per byte of the second model, mean over runs."""
    difference: float
    """second − first, in bits per byte."""
    difference_over_documents: tuple[float, float] | None
    """95 % interval of it, by a bootstrap over documents; None for a single document."""
    better: float | None
    """Share of resamples in which the second needs fewer bits, ties counting half; None for a single document."""
    ratio: float | None
    """Word perplexity of the second / that of the first (geometric mean over runs).

    None where a document has no words, and where it is beyond floating point."""
    ratio_over_documents: tuple[float, float] | None
    """95 % interval of it, by the same bootstrap."""
    differences: tuple[float, ...]
    """The difference in bits per byte of each pair of runs."""
    deviation: float | None
    """Their standard deviation (n − 1); None for a single pair."""
    difference_over_runs: tuple[float, float] | None
    """95 % interval of their mean, by Student's t on n − 1 degrees of freedom; None for a single pair."""

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
        """Everything as plain values, ready for JSON."""
        return asdict(self)


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], *, resamples: int = 10_000, seed: int = 0
) -> Comparison:
    """Two results compared on the documents that both scored: tables as `Evaluation.to_dict()` gives them.

    See `compare_runs`, of which this is the case of one run a side.
    """
    return compare_runs([first], [second], resamples=resamples, seed=seed)


def compare_runs(
    first: Sequence[Mapping[str, Any]],
    second: Sequence[Mapping[str, Any]],
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Two models compared, each trained from several seeds: `first[i]` and `second[i]` are of the same seed.

    Bootstrap over documents (percentile method, Efron 1979): as many documents as there are, drawn with
    replacement, the same ones for both sides and for all runs; both sides are averaged over their runs. What
    documents have in common, being easy or hard, cancels in the difference. Over seeds an interval is Student's t
    on the paired differences, since a bootstrap of three or five values is far too narrow.

    Raises CompressiveError where the sides have not the same number of runs or did not score the same documents,
    and for tables that are not an evaluation's.
    """
    if len(first) != len(second) or not first:
        raise CompressiveError(
            f"first has {len(first)} results and second {len(second)}: give as many, at least one, paired by seed"
        )
    if resamples < 1 or seed < 0:
        raise CompressiveError(f"resamples ({resamples}) must be 1 or more and seed ({seed}) 0 or more")
    named = {f"{side}[{i}]": run for side, runs in (("first", first), ("second", second)) for i, run in enumerate(runs)}
    nats = np.array([_checked(name, table, named["first[0]"]) for name, table in named.items()])
    documents = first[0]["documents"]
    size, words = (np.array([entry[name] for entry in documents], np.float64) for name in ("bytes", "words"))
    to_bits = 1 / math.log(2) / size.sum()
    sides = nats.reshape(2, len(first), len(documents))  # [side, run, document]
    totals = sides.sum(2)
    differences = ((totals[1] - totals[0]) * to_bits).tolist()
    gained = (sides[1] - sides[0]).mean(0)
    drawn = resampled(np.stack([gained, size, words]), resamples, seed) if len(documents) > 1 else None
    worded = bool((np.abs(gained) < 700 * words).all())  # exp(709) is the largest number
    several = len(differences) > 1
    return Comparison(
        documents=len(documents),
        runs=len(first),
        first=float(totals[0].mean() * to_bits),
        second=float(totals[1].mean() * to_bits),
        difference=statistics.fmean(differences),
        difference_over_documents=None if drawn is None else interval_of(drawn[0] / drawn[1] / math.log(2)),
        better=None if drawn is None else float((1 - np.sign(drawn[0])).mean() / 2),
        ratio=math.exp(gained.sum() / words.sum()) if worded else None,
        ratio_over_documents=interval_of(np.exp(drawn[0] / drawn[2])) if worded and drawn is not None else None,
        differences=tuple(differences),
        deviation=statistics.stdev(differences) if several else None,
        difference_over_runs=student_interval(differences) if several else None,
    )


def _checked(name: str, table: Mapping[str, Any], like: Mapping[str, Any]) -> list[float]:
    """The nats of each document. Raises CompressiveError unless they are of the same documents as `like`."""
    ours, theirs = _identity(name, table), _identity("first[0]", like)
    for what, one in ours.items():
        if one != theirs[what]:
            raise CompressiveError(
                f"{name} and first[0] did not score the same text: {what} is {one!r} and {theirs[what]!r};"
                " score both on the same split of the same corpus, with the same --tokens"
            )
    nats = [float(entry["nats"]) for entry in table["documents"]]
    if not all(map(math.isfinite, nats)):
        raise CompressiveError(f"{name} has nats that are not finite: such a run cannot be compared")
    if not nats or not all(entry["bytes"] for entry in table["documents"]):
        raise CompressiveError(f"{name} must have documents, and each at least one byte")
    return nats


def _identity(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """What two results on the same text have in common."""
    try:
        conditions, documents = table["conditions"], table["documents"]
        same = {"the split": conditions["split"], "the corpus": conditions["corpus_fingerprint"]}
        same["the number of documents"] = len(documents)
        for number, entry in enumerate(documents):
            float(entry["nats"])
            counts = {count: entry[count] for count in ("tokens", "bytes", "words")}
            same[f"document {number}"] = {"title": entry["title"], **counts}
    except (KeyError, TypeError, ValueError) as error:
        raise CompressiveError(
            f"{name} is not the result of an evaluation ({type(error).__name__}: {error});"
            " expected what Evaluation.to_dict() gives or `compressive evaluate --json` prints"
        ) from None
    return same


def resampled(values: NDArray[np.float64], resamples: int = 10_000, seed: int = 0) -> NDArray[np.float64]:
    """`[value, document]` -> sums over documents drawn with replacement `[value, resample]`."""
    random, documents = np.random.default_rng(seed), values.shape[1]
    at_once = max(1, DRAWS_AT_ONCE // documents)
    sums = [
        values[:, random.integers(documents, size=(min(at_once, resamples - done), documents))].sum(2)
        for done in range(0, resamples, at_once)
    ]
    return np.concatenate(sums, axis=1)


def interval_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """The interval that holds the share `COVERED` of `values [resample]`, as much cut off on either side."""
    low, high = np.quantile(values, [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return float(low), float(high)


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of at least two values, by Student's t."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = _student_quantile(len(values) - 1) * error
    return mean - half, mean + half


def _student_quantile(freedom: int) -> float:
    """The t that Student's distribution of `freedom` degrees of freedom stays within with probability `COVERED`."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < COVERED else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _student_within(angle: float, freedom: int) -> float:
    """Probability of |t| <= sqrt(freedom) tan(angle): Abramowitz and Stegun (1964), 26.7.3 and 26.7.4."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (power - 1) / power
        total += term
    series = math.sin(angle) * total
    return (angle + series) * 2 / math.pi if odd else series


def _between(interval: tuple[float, float] | None, form: str) -> str:
    if interval is None:
        return ""
    low, high = (format(value, form) for value in interval)
    return f"   95 % over documents: {low} to {high}"
