"""A comparison pairs what both models scored; its intervals are what enumeration and textbooks give."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from compressive_transformer.data import Corpus
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import evaluate
from compressive_transformer.evaluate.compare import Comparison, compare, compare_runs
from runs import tiny_model

FIRST = [100.0, 310.0, 45.0, 77.0, 160.0]
SECOND = [98.0, 303.0, 46.5, 78.0, 159.0]
BYTES = [60, 200, 25, 41, 99]
WORDS = [12, 31, 6, 9, 20]


def result(nats: list[float], **conditions: Any) -> dict[str, Any]:
    """A table as an evaluation gives it, of as many documents as there are nats."""
    documents = [
        {"title": f"book {number}", "nats": lost, "tokens": 2 * BYTES[number], "bytes": BYTES[number]}
        for number, lost in enumerate(nats)
    ]
    for document, words in zip(documents, WORDS, strict=False):
        document["words"] = words
    return {"conditions": {"split": "validation", "corpus_fingerprint": "abc", **conditions}, "documents": documents}


def bits_per_byte(nats: float, size: float) -> float:
    return nats / math.log(2) / size


def enumerated(first: list[float], second: list[float]) -> tuple[list[float], list[float]]:
    """Difference in bits per byte, and ratio of word perplexities, of all equally likely resamples."""
    differences, ratios = [], []
    for drawn in itertools.product(range(len(first)), repeat=len(first)):
        gained = sum(second[i] - first[i] for i in drawn)
        differences.append(bits_per_byte(gained, sum(BYTES[i] for i in drawn)))
        ratios.append(math.exp(gained / sum(WORDS[i] for i in drawn)))
    return differences, ratios


# --- one run a side ---


def test_the_difference_is_that_of_the_totals() -> None:
    found = compare(result(FIRST), result(SECOND))
    assert found.first == pytest.approx(bits_per_byte(sum(FIRST), sum(BYTES)))
    assert found.second == pytest.approx(bits_per_byte(sum(SECOND), sum(BYTES)))
    assert found.difference == pytest.approx(found.second - found.first)
    assert found.ratio == pytest.approx(math.exp((sum(SECOND) - sum(FIRST)) / sum(WORDS)))
    assert (found.documents, found.runs) == (5, 1)
    assert (found.deviation, found.difference_over_runs) == (None, None)


@pytest.mark.parametrize("documents", [2, 3, 5])
def test_the_bootstrap_equals_an_enumeration_of_all_resamples(documents: int) -> None:
    first, second = FIRST[:documents], SECOND[:documents]
    found = compare(result(first), result(second), resamples=20_000)
    differences, ratios = enumerated(first, second)
    assert found.better == pytest.approx(np.mean(1 - np.sign(differences)) / 2, abs=0.01)
    # Of 2 or 3 documents the extreme resamples have more than 2.5 % each, so the interval is the whole range.
    tolerance = 1e-12 if documents < 5 else 0.05 * (max(differences) - min(differences))
    expected = np.quantile(differences, [0.025, 0.975], method="inverted_cdf")
    assert found.difference_over_documents == pytest.approx(expected, abs=tolerance)
    tolerance = 1e-12 if documents < 5 else 0.05 * (max(ratios) - min(ratios))
    expected = np.quantile(ratios, [0.025, 0.975], method="inverted_cdf")
    assert found.ratio_over_documents == pytest.approx(expected, abs=tolerance)


def test_many_documents_give_the_interval_of_a_normal_mean() -> None:
    gains = np.random.default_rng(1).normal(-1.0, 2.0, size=1500)  # more draws than are made at once
    documents = [{"title": "", "nats": 50.0, "tokens": 1, "bytes": 10, "words": 2} for _ in gains]
    changed = [{**document, "nats": 50.0 + gain} for document, gain in zip(documents, gains, strict=True)]
    found = compare({**result([]), "documents": documents}, {**result([]), "documents": changed}, resamples=5000)
    half = 1.96 * bits_per_byte(float(gains.std()), 10) / math.sqrt(len(gains))
    expected = found.difference - half, found.difference + half
    assert found.difference_over_documents == pytest.approx(expected, abs=0.08 * half)


def test_exchanging_the_sides_mirrors_the_comparison() -> None:
    found, mirrored = compare(result(FIRST), result(SECOND)), compare(result(SECOND), result(FIRST))
    assert found.difference_over_documents is not None
    low, high = found.difference_over_documents
    assert mirrored.difference == -found.difference
    assert mirrored.difference_over_documents == pytest.approx((-high, -low))
    assert mirrored.ratio == pytest.approx(1 / found.ratio)
    assert mirrored.better == pytest.approx(1 - found.better)


def test_a_model_is_neither_better_nor_worse_than_itself() -> None:
    found = compare(result(FIRST), result(FIRST))
    assert (found.difference, found.difference_over_documents, found.better) == (0, (0, 0), 0.5)
    assert (found.ratio, found.ratio_over_documents) == (1, (1, 1))


def test_the_seed_decides_the_interval() -> None:
    first, second = result(FIRST), result(SECOND)
    assert compare(first, second, resamples=50, seed=3) == compare(first, second, resamples=50, seed=3)
    assert compare(first, second, resamples=50, seed=3) != compare(first, second, resamples=50, seed=4)


def test_one_document_has_a_difference_but_no_interval() -> None:
    found = compare(result(FIRST[:1]), result(SECOND[:1]))
    assert found.difference == pytest.approx(bits_per_byte(-2, 60))
    assert (found.difference_over_documents, found.ratio_over_documents, found.better) == (None, None, None)
    assert "resamples" not in str(found)


def test_there_is_no_ratio_without_words_or_beyond_float() -> None:
    tables = result(FIRST), result(SECOND)
    for table in tables:
        table["documents"][0]["words"] = 0
    assert compare(*tables).ratio is None
    assert compare(result(FIRST), result([1e6, *SECOND[1:]])).ratio is None
    assert "word perplexity" not in str(compare(*tables))


# --- several runs a side ---


def test_runs_are_averaged_for_documents_and_paired_by_seed() -> None:
    shifts = [0.0, 3.0, -1.5]
    first = [[nats + 5 * shift for nats in FIRST] for shift in shifts]
    second = [[nats + 6 * shift for nats in SECOND] for shift in shifts]
    found = compare_runs([result(nats) for nats in first], [result(nats) for nats in second])
    pairs = [compare(result(one), result(other)) for one, other in zip(first, second, strict=True)]
    assert found.differences == pytest.approx([pair.difference for pair in pairs])
    assert found.difference == pytest.approx(np.mean(found.differences))
    assert found.deviation == pytest.approx(np.std(found.differences, ddof=1))
    means = [[sum(run[i] for run in side) / 3 for i in range(len(FIRST))] for side in (first, second)]
    averaged = compare(result(means[0]), result(means[1]))
    assert found.difference_over_documents == pytest.approx(averaged.difference_over_documents)
    assert found.ratio == pytest.approx(averaged.ratio)
    assert found.better == averaged.better


@pytest.mark.parametrize(
    ("runs", "quantile"),  # of Student's t at 97.5 %, from printed tables
    [
        (2, 12.7062),
        (3, 4.3027),
        (4, 3.1824),
        (5, 2.7764),
        (6, 2.5706),
        (11, 2.2281),
        (31, 2.0423),
        (41, 2.0211),
        (121, 1.9799),
    ],
)
def test_the_interval_over_seeds_is_students(runs: int, quantile: float) -> None:
    gains = np.random.default_rng(runs).normal(size=runs)
    first = [result(FIRST)] * runs
    found = compare_runs(first, [result([FIRST[0] + gain, *FIRST[1:]]) for gain in gains], resamples=1)
    assert found.deviation is not None
    half = quantile * found.deviation / math.sqrt(runs)
    expected = found.difference - half, found.difference + half
    assert found.difference_over_runs == pytest.approx(expected, rel=1e-4)


# --- as text and as JSON ---


def test_a_comparison_reads_as_text_and_is_json() -> None:
    found = compare_runs([result(FIRST)] * 2, [result(SECOND), result(FIRST)])
    text = str(found)
    assert f"{found.first:.4f} bits per byte on 5 documents, means of 2 runs" in text
    assert f"{found.difference:+.4f}   95 % over documents: " in text
    assert f"{found.better:.1%} of resamples" in text
    assert "95 % over seeds: " in text
    assert "over seeds" not in str(compare(result(FIRST), result(SECOND)))
    table = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert table.keys() == Comparison.__dataclass_fields__.keys()
    assert table["difference"] == found.difference


def test_results_of_evaluate_can_be_compared(corpus: Corpus) -> None:
    results = [evaluate(tiny_model(seed=seed), corpus.test) for seed in range(2)]
    found = compare(*(json.loads(json.dumps(result.to_dict())) for result in results))
    assert found.difference == pytest.approx(results[1].total.bits_per_byte - results[0].total.bits_per_byte)
    assert found.ratio == pytest.approx(results[1].total.word_perplexity / results[0].total.word_perplexity)


# --- what cannot be compared ---


def changed(name: str, value: Any) -> dict[str, Any]:
    table = result(SECOND)
    table["documents"][2][name] = value
    return table


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (result(SECOND, split="test"), r"second\[0\] and first\[0\] did not score the same text: the split is 'test'"),
        (result(SECOND, corpus_fingerprint="abd"), "the corpus is 'abd' and 'abc'"),
        (result(SECOND[:4]), "the number of documents is 4 and 5"),
        (changed("title", "another"), "document 2 is {'title': 'another'"),
        (changed("tokens", 7), "document 2 is .*'tokens': 7.* with the same --tokens"),
        (changed("bytes", 7), "document 2 is .*'bytes': 7"),
        (changed("words", 7), "document 2 is .*'words': 7"),
        (changed("nats", math.nan), "nats that are not finite"),
        (changed("nats", None), r"second\[0\] is not the result of an evaluation"),
        ({"documents": []}, r"not the result of an evaluation \(KeyError: 'conditions'\); expected the output"),
        ({**result(SECOND), "documents": [1]}, "not the result of an evaluation"),
    ],
)
def test_results_on_other_text_and_other_tables_are_refused(second: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressiveError, match=message):
        compare(result(FIRST), second)


def test_documents_without_bytes_and_no_documents_are_refused() -> None:
    empty = result(FIRST)
    empty["documents"][1]["bytes"] = 0
    for table in (empty, result([])):
        with pytest.raises(CompressiveError, match="must have documents with at least one byte each"):
            compare(table, table)


def test_runs_without_a_partner_and_wrong_numbers_are_refused() -> None:
    run = result(FIRST)
    with pytest.raises(CompressiveError, match="first has 2 results and second 1: give the same number of each"):
        compare_runs([run, run], [run])
    with pytest.raises(CompressiveError, match="first has 0 results and second 0"):
        compare_runs([], [])
    with pytest.raises(CompressiveError, match=r"resamples \(0\) must be 1 or more"):
        compare(run, run, resamples=0)
    with pytest.raises(CompressiveError, match=r"seed \(-1\) 0 or more"):
        compare(run, run, seed=-1)
