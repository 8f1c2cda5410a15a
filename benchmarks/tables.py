"""Parts of the pages as Markdown, one function each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from goals import OURS, TITLES, Results, against, compression_share, entries, form, goals, of_limit
from timing import Spread

MEGABYTE = 1024 * 1024
EVERY_ONE = "Every repetition: [benchmarks/performance.json](../benchmarks/performance.json)."


def table(head: list[str], rows: Iterable[list[str]], words: int = 1) -> str:
    """Return a table whose first `words` columns are words, the others numbers."""
    lines = [head, [":--"] * words + ["--:"] * (len(head) - words), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def written(spread: Spread | None, form: str = "{:.2f}") -> str:
    """Return a median with its range; a dash for None."""
    if spread is None:
        return "–"
    middle, low, high = (form.format(value) for value in (spread.median, spread.low, spread.high))
    return f"{middle} ({low} to {high})"


def made(results: Results) -> str:
    """Return the conditions of the measurements."""
    conditions = results["made"]
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    works = "\n".join(f"- **{name}**: {work['text']}" for name, work in results["works"].items())
    short = " A quick run, with too few repetitions to rely on." if results["quick"] else ""
    skipped = sorted(
        {f"{name}: {why}" for entry in results["entries"] for name, why in entry.get("skipped", {}).items()}
    )
    left_out = f"\n\nNot measured here: {'; '.join(skipped)}." if skipped else ""
    processor = f"{conditions['cpu']}, {conditions['cores']} cores, {conditions['instructions']}"
    if "gpu" in conditions:
        processor = f"{conditions['gpu']}, beside {processor}"
    commit = conditions["commit"] or "unknown"
    where = f"at commit {commit}; {processor}; {versions}"
    return f"{works}\n\nMeasured in {results['minutes']} minutes {where}. {EVERY_ONE}{short}{left_out}"


def goals_met(results: Results) -> str:
    """Return each goal with the figure reached, and a sentence that counts them."""
    rows, counts = [], {"met": 0, "missed": 0, "not measured": 0}
    for goal in goals(results):
        word = {True: "met", False: "missed", None: "not measured"}[goal.met]
        counts[word] += 1
        figures = "; ".join(
            f"{written(spread, goal.unit)} on {threads} thread{'s' * (threads > 1)}"
            for threads, spread in goal.reached.items()
        )
        wanted = f"{'≤' if goal.at_most else '≥'} {goal.unit.format(goal.wanted)}"
        rows.append([goal.what, wanted, figures or "–", "**missed**" if word == "missed" else word])
    counted = f"Of {len(rows)} goals, {counts['met']} are met, {counts['missed']} missed and {counts['not measured']} "
    return f"{counted}not measured.\n\n{table(['goal', 'wanted', 'reached', ''], rows, words=4)}"


def ratios(measure: str) -> Callable[[Results], str]:
    """Return the part about training, scoring or decoding: rates, shares of the limit, and ratios to each peer."""

    def part(results: Results) -> str:
        head = ["work", "threads", "batch", "ours", "tokens/s", "of the limit", *(f"× {t}" for t in TITLES.values())]
        rows = []
        for entry in entries(results, measure):
            for name, seconds in entry["seconds"].items():
                if name.startswith(OURS) and name != "ours without compression":
                    rate = Spread.of([entry["tokens"] / each for each in seconds])
                    peers = [written(against(entry, name, peer)) for peer in TITLES]
                    start = [
                        entry["work"],
                        str(entry["threads"]),
                        str(entry["batch"]),
                        form(measure, name),
                    ]
                    rows.append([*start, written(rate, "{:,.0f}"), written(of_limit(entry, name)), *peers])
        return f"{table(head, rows, words=4)}\n\n{_peers(results, measure)}"

    return part


def _peers(results: Results, measure: str) -> str:
    """Return the rates and shares of the limit of the peers."""
    rows = []
    for entry in entries(results, measure):
        cells = [entry["work"], str(entry["threads"]), str(entry["batch"])]
        for peer in TITLES:
            seconds = entry["seconds"].get(peer)
            rate = f"{entry['tokens'] / median(seconds):,.0f}" if seconds else "–"
            share = of_limit(entry, peer)
            cells.append(f"{rate} ({share.median:.2f})" if share else rate)
        rows.append(cells)
    head = ["work", "threads", "batch", *TITLES.values()]
    return f"Their tokens/s, and in brackets their share of the limit:\n\n{table(head, rows, words=3)}"


def memory(results: Results) -> str:
    """Return peak memory of training."""
    head = ["work", "contender", "peak, MB", "of it before the model, MB", "ours / theirs"]
    rows = []
    for entry in entries(results, "memory"):
        for name, sizes in entry["bytes"].items():
            before = median(entry["bytes_before"][name]) / MEGABYTE
            own = Spread.of([size / MEGABYTE for size in sizes])
            share = written(against(entry, OURS, name))
            rows.append([entry["work"], TITLES.get(name, name), written(own, "{:,.0f}"), f"{before:,.0f}", share])
    return table(head, rows, words=2)


def compression(results: Results) -> str:
    """Return the time that compression adds to the same network."""
    rows = [
        [entry["work"], entry["measure"], str(entry["threads"]), written(compression_share(entry), "{:+.1f} %")]
        for measure in ("training", "scoring")
        for entry in entries(results, measure)
    ]
    return table(["work", "measure", "threads", "time added"], rows, words=3)


def growth(results: Results) -> str:
    """Return the cost per token at each size, measured and counted, relative to the first size."""
    parts = []
    for grown in results["growth"]:
        head, rows = [grown["axis"]], []
        for measure in grown["seconds_a_token"]:
            head += [f"{measure}, µs a token", "measured", "counted"]
        for size in next(iter(grown["seconds_a_token"].values())):
            cells = [f"{int(size):,}"]
            for measure, seconds in grown["seconds_a_token"].items():
                counted = grown["multiply_adds_a_token"][measure]
                first = next(iter(seconds))
                cells.append(written(Spread.of([1e6 * each for each in seconds[size]]), "{:,.0f}"))
                cells.append(f"{median(seconds[size]) / median(seconds[first]):.2f}")
                cells.append(f"{counted[size] / counted[first]:.2f}")
            rows.append(cells)
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def stream(results: Results) -> str:
    """Return time and memory along one long text."""
    read = results["stream"]
    rows = [
        [
            f"{row['tokens']:,}",
            written(Spread.of([1000 * each for each in row["seconds"]]), "{:.1f}"),
            f"{row['resident_bytes'] / MEGABYTE:,.0f}",
        ]
        for row in read["rows"]
    ]
    along = "; ".join(
        f"{written(Spread.of([1000 * each for each in seconds]))} ms after {int(seen):,} tokens"
        for seen, seconds in results["decoding_along"]["seconds"].items()
    )
    head = ["tokens read before", "scoring a segment, ms", "memory of the process, MB"]
    return f"{table(head, rows)}\n\n{read['work']}. Decoding one token of work S takes {along}."


def profile(results: Results, before: Mapping[str, Any] | None) -> str:
    """Return the profile of a training step, now and, if available, before."""
    parts = []
    kept = [] if before is None else [(f"Before, at commit {before['made']['commit']}", before["profile"])]
    for title, profiled in (*kept, ("Now", results["profile"])):
        rows = [
            [f"`{each['name']}`", f"{100 * each['share']:.1f} %", f"{each['calls']:,.0f}"]
            for each in profiled["operations"]
        ]
        head = ["operation", "share of time", "calls a step"]
        parts.append(
            f"{title}: {profiled['seconds_a_step']:.2f} seconds a step, one thread, work {profiled['work']}, with the "
            f"profiler's own cost.\n\n{table(head, rows)}"
        )
    return "\n\n".join(parts)


def peers(results: Results) -> str:
    """Return the speed-up over each other package and the share of its memory, in one table."""
    rows, threads = [], max(entry["threads"] for entry in results["entries"])
    for measure in ("training", "scoring", "decoding", "memory"):
        for entry in entries(results, measure):
            if entry["threads"] != threads:
                continue
            if measure == "memory":
                own = f"{median(entry['bytes'][OURS]) / MEGABYTE:,.0f} MB"
            else:
                own = f"{entry['tokens'] / median(entry['seconds'][OURS]):,.0f} tokens/s"
            spreads = [against(entry, OURS, peer) for peer in TITLES]
            peers = [f"{spread.median:.2f}" if spread else "–" for spread in spreads]
            lanes = f", batch {entry['batch']}" if measure == "decoding" else ""
            title = f"{'peak memory, ' if measure == 'memory' else ''}{'training' if measure == 'memory' else measure}"
            rows.append([f"{title} {entry['work']}{lanes}", own, *peers])
    where = f"{results['made']['cpu']}, {threads} thread{'s' * (threads > 1)}, commit {results['made']['commit']}"
    short = " A quick run, with too few repetitions to rely on." if results["quick"] else ""
    return (
        f"{table(['fp32', 'this package', *TITLES.values()], rows)}\n\nSpeed-up over each package (higher is better); "
        f"memory as a fraction of theirs (lower is better). {where}.{short}"
    )
