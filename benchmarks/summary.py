"""Table of results in the README: measure on the left, result on the right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tables
from compressive_transformer.checkpoint import read_json
from goals import OURS, TITLES, Entry, Results, against, compression_share, entries, goals

EXPERIMENTS = Path(__file__).parents[1] / "results"
FILES = ("recall", "recall-long", "pg19-bytes", "pg19-bpe")


def summary(results: Results) -> str:
    """Return the table: experiments of results/, then speed and memory of performance.json."""
    conditions = results["made"]
    sources = ", ".join(f"[{name}](results/{name}.json)" for name in FILES)
    where = f"{conditions['cpu']}, {_threads(results)} threads, fp32, commit {(conditions['commit'] or 'unknown')[:7]}"
    short = " A quick run, with too few repetitions to rely on." if results["quick"] else ""
    return (
        f"{tables.table(['measured', 'result'], [*_memory_rows(), *_speed_rows(results)], words=2)}\n\n"
        f"Sources: {sources} and [performance.json](benchmarks/performance.json) ({where}).{short}"
    )


def _settings(name: str) -> dict[str, Any]:
    return {row["setting"]: row for row in read_json(EXPERIMENTS / f"{name}.json")["settings"]}


def _memory_rows() -> list[list[str]]:
    short, long, books, bpe = (_settings(name) for name in FILES)
    accuracy = {name: row["measures"]["accuracy"] for name, row in short.items()}
    longer = {name: row["measures"]["accuracy"]["mean"] for name, row in long.items()}
    learned = sum(value > 0.5 for value in accuracy["conv-overlap"]["values"])
    bits = {name: row["measures"]["bits_per_byte"]["mean"] for name, row in books.items()}
    bpe_bits = {name: row["measures"]["bits_per_byte"]["mean"] for name, row in bpe.items()}
    compared = books["conv-overlap"]["against_baseline"]
    low, high = (f"{value:+.3f}".replace("-", "−") for value in compared["difference_over_runs"])
    return [
        [
            "Recalling a value seen 75 to 140 tokens ago (chance 0.03), attention width 96, mean of 3 seeds",
            f"**{longer['conv-overlap']:.4f}** with the default compression and {longer['conv']:.2f} with the paper's "
            f"convolution after 2,000 steps; Transformer-XL of equal width: "
            f"{accuracy['Transformer-XL']['mean']:.2f} after 1,000 steps",
        ],
        [
            "The same after 1,000 steps only",
            f"{learned} of {len(accuracy['conv-overlap']['values'])} seeds of the default have learned the task; "
            "max pooling, BPTT and states at free scale (as in the paper) are near chance",
        ],
        [
            f"Predicting books: PG-19 subset as bytes, {compared['documents']} validation books, small models "
            f"that read {books['conv-overlap']['tokens'] / 1e6:.1f} million bytes, {compared['runs']} seeds",
            f"**No improvement shown**: {bits['conv-overlap']:.3f} bits per byte against {bits['Transformer-XL']:.3f} "
            f"of a Transformer-XL of equal width; difference {low} to {high} (95 %); the same with BPE "
            f"({bpe_bits['conv-overlap']:.3f} against {bpe_bits['Transformer-XL']:.3f})",
        ],
    ]


def _threads(results: Results) -> int:
    return max(entry["threads"] for entry in results["entries"])


def _speed_rows(results: Results) -> list[list[str]]:
    met = [goal.met for goal in goals(results)]
    added = [compression_share(entry).median for entry in _shown(results, "training")]
    return [
        ["Training speed", _beside(results, "training", "×")],
        ["Generation speed, one token at a time", _beside(results, "decoding", "×")],
        ["Peak memory in training", _beside(results, "memory", "times that of")],
        ["Time that compression adds to a training step", f"{_range(added, '{:.0f}')} %"],
        [
            "Speed goals that were set in advance",
            f"{met.count(True)} of {len(met)} met, {met.count(False)} missed, {met.count(None)} not measured "
            "([list](docs/performance.md#goals))",
        ],
        ["Speed on GPUs; the paper's experiments at full size", "not measured"],
    ]


def _shown(results: Results, measure: str) -> list[Entry]:
    batch = 1 if measure == "decoding" else None
    return [entry for entry in entries(results, measure, batch=batch) if entry["threads"] == _threads(results)]


def _beside(results: Results, measure: str, relation: str) -> str:
    """Return the ratio to each other package, over all sizes of models."""
    ratios = []
    for peer, title in TITLES.items():
        spreads = [against(entry, OURS, peer) for entry in _shown(results, measure)]
        medians = [spread.median for spread in spreads if spread]
        ratios.append(f"{_range(medians, '{:.1f}' if measure == 'decoding' else '{:.2f}')} {relation} {title}")
    return f"{', '.join(ratios)} (the last two do not compress)"


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
