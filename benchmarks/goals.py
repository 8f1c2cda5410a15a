"""Goals, and whether the results met them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from timing import Spread, fraction, ratio

Results = Mapping[str, Any]
Entry = Mapping[str, Any]

OURS = "ours"
TITLES = {
    "lucidrains": "compressive-transformer-pytorch",
    "labml": "labml-nn",
    "classical Transformer-XL": "classical Transformer-XL",
    "x-transformers": "x-transformers",
}
"""Peers, as columns: the name in the results and the one in the tables."""


@dataclass(frozen=True)
class Goal:
    """Figure to reach, and the figures reached, by number of threads."""

    what: str
    unit: str
    """How a figure is written, as a format."""
    wanted: float
    at_most: bool
    reached: dict[int, Spread]

    @property
    def met(self) -> bool | None:
        """True if all medians reach it; None if nothing was measured."""
        medians = [spread.median for spread in self.reached.values()]
        good = [median <= self.wanted if self.at_most else median >= self.wanted for median in medians]
        return all(good) if good else None


# Measure, work, our form, then how many times as long each peer should take (memory: as many bytes as ours).
AGAINST = (
    ("training", "S", OURS, (1.6, 3, 2.4)),
    ("training", "L", OURS, (2.2, 3.1, 2.3)),
    ("training", "S", "ours, bf16", (2.3, 4.5, 3.6)),
    ("scoring", "S", OURS, (1.5, 2.6, 2.5)),
    ("scoring", "L", OURS, (2.6, 3, 2.7)),
    ("decoding", "S", OURS, (13, 3.8, 5)),
    ("decoding", "S", "ours, bf16", (25, 7.5, 10)),
    ("decoding", "S", "ours, int8", (34, 10, 14)),
    ("memory", "S", OURS, (0.5, 0.45, 0.65)),
    ("memory", "L", OURS, (0.7, 0.55, 0.8)),
)


def entries(results: Results, measure: str, work: str | None = None, batch: int | None = None) -> list[Entry]:
    """Return the entries of a measure, optionally of one work and one batch size."""
    return [
        entry
        for entry in results["entries"]
        if entry["measure"] == measure and work in (None, entry["work"]) and batch in (None, entry["batch"])
    ]


def against(entry: Entry, ours: str, peer: str) -> Spread | None:
    """Return the time of the peer over ours; for memory, ours over the peer's."""
    if entry["measure"] == "memory":
        values = entry["bytes"]
        return ratio(values[ours], values[peer]) if {ours, peer} <= set(values) else None
    seconds = entry["seconds"]
    return ratio(seconds[peer], seconds[ours]) if {ours, peer} <= set(seconds) else None


def of_limit(entry: Entry, name: str) -> Spread | None:
    """Return the share of the machine's limit that a contender reaches, if known."""
    if name not in entry.get("seconds", {}):
        return None
    if entry["measure"] == "decoding":
        limit = entry["limits"].get(name, entry["limits"][OURS])
        return fraction(limit["needed_bytes"], entry["seconds"][name], limit["seconds"], limit["bytes"])
    limit = entry["limit"]
    needed = entry["needed_multiply_adds"]
    return fraction(needed, entry["seconds"][name], limit["seconds"], limit["multiply_adds"])


def goals(results: Results) -> Iterator[Goal]:
    """Yield all goals with the figures reached."""
    for measure, work, ours, wanted in AGAINST:
        found = entries(results, measure, work, 1 if measure == "decoding" else None)
        for (peer, title), least in zip(TITLES.items(), wanted, strict=False):
            spreads = {entry["threads"]: against(entry, ours, peer) for entry in found}
            reached = {threads: spread for threads, spread in spreads.items() if spread is not None}
            what = f"{measure} {work}, {form(measure, ours)}, against {title}"
            yield Goal(what, "{:.2f}", least, measure == "memory", reached)
    yield from _shares(results)
    yield from _decoding(results)


def compression_share(entry: Entry) -> Spread:
    """Return the time that compression adds to the same network, in percent."""
    spread = ratio(entry["seconds"][OURS], entry["seconds"]["ours without compression"])
    return Spread(*(100 * (value - 1) for value in (spread.median, spread.low, spread.high)))


def form(measure: str, ours: str) -> str:
    """Return the precision of a form of our model; rounded weights are labeled as such."""
    precision = ours.partition(", ")[2] or "fp32"
    return f"weights rounded to {precision}" if measure == "decoding" and precision != "fp32" else precision


def _shares(results: Results) -> Iterator[Goal]:
    for measure, most in (("training", 10.0), ("scoring", 2.0)):
        for work in results["works"]:
            shares = {entry["threads"]: compression_share(entry) for entry in entries(results, measure, work)}
            yield Goal(f"share of compression in {measure} {work}", "{:+.1f} %", most, True, shares)
    for measure, least in (("training", 0.75), ("decoding", 0.6)):
        batch = 1 if measure == "decoding" else None
        spreads = {entry["threads"]: of_limit(entry, OURS) for entry in entries(results, measure, "S", batch)}
        known = {threads: spread for threads, spread in spreads.items() if spread is not None}
        yield Goal(f"{measure} S, fp32, share of the machine's limit", "{:.2f}", least, False, known)


def _decoding(results: Results) -> Iterator[Goal]:
    one = {entry["threads"]: entry for entry in entries(results, "decoding", "S", 1)}
    eight = {entry["threads"]: entry for entry in entries(results, "decoding", "S", 8)}
    gains = {
        threads: Spread.of([8 * single / all_ for single, all_ in zip(
            one[threads]["seconds"][OURS], entry["seconds"][OURS], strict=True)])
        for threads, entry in eight.items()
    }  # fmt: skip
    yield Goal("decoding S, batch 8 against batch 1, tokens a second", "{:.2f}", 5, False, gains)
    commits = {threads: ratio(entry["commit_seconds"][OURS], entry["seconds"][OURS]) for threads, entry in one.items()}
    yield Goal("decoding S, a commit in ordinary tokens", "{:.2f}", 3, True, commits)
    first, *_, last = results["decoding_along"]["seconds"].values()
    flat = {results["decoding_along"]["threads"]: ratio(last, first)}
    yield Goal("decoding S, a token late in the stream against an early one", "{:.2f}", 1.1, True, flat)
