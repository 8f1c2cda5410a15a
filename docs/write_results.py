"""Generated parts of docs/results.md, from the files in results/, and their figures.

    python docs/write_results.py

Between `<!-- results of NAME -->` and `<!-- end of results -->` the page gets what results/NAME.json says: a
results.json of `compressive experiment`, or what a script of examples/ (transfer.py, buckets.py, foreign_lines.py)
prints. A place whose file is missing says so.
All other text of the page is left as it is. Pictures need matplotlib (extra `plot`).
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressive_transformer import CompressiveError
from compressive_transformer.apps.experiment import Results
from compressive_transformer.checkpoint import check_format, read_json

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "results.md", ROOT / "results"
PLACE = re.compile(r"(<!-- results of (\S+) -->\n).*?(<!-- end of results -->)", flags=re.DOTALL)


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Read and check each results file, by its name.

    Raises CompressiveError for a file that is damaged, of another format, unfinished or not a results file.
    """
    found = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
    for name, content in found.items():
        path = folder / f"{name}.json"
        check_format(path, content)
        if content.get("failed") or content.get("missing"):
            raise CompressiveError(f"{path}: not all runs are finished; the same command again finishes them")
        try:
            part_of(name, content)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CompressiveError(
                f"{path}: not the results.json of an experiment, nor what examples/ print "
                f"({type(error).__name__}: {error})"
            ) from None
    return found


def fill(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with all places filled. Raises CompressiveError for results without a place."""
    places = [place[1] for place in PLACE.findall(page)]
    if without := [name for name in results if name not in places]:
        raise CompressiveError(
            f"results/{without[0]}.json has no place in the page: add the lines "
            f"<!-- results of {without[0]} --> and <!-- end of results --> to its section"
        )

    def filled(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        part = part_of(name, results[name]) if name in results else "Not run yet."
        return f"{begin}\n{part}\n\n{end}"

    return PLACE.sub(filled, page)


def part_of(name: str, content: Mapping[str, Any]) -> str:
    """Return the part of the page about one results file, as Markdown."""
    if "transfer" in content:
        return _transfer(name, content)
    if "buckets" in content:
        return _buckets(name, content)
    if "foreign_lines" in content:
        return _foreign_lines(name, content)
    page = Results(content).page([f"results-{name}.svg"])
    versions = {
        f"{library} {version}"
        for run in content["runs"]
        for library, version in run["score"].get("conditions", {}).get("versions", {}).items()
    }
    made = f" Versions: {', '.join(sorted(versions))}." if versions else ""
    return f"{page.partition(chr(10) * 2)[2].strip()}{made} {_all_numbers(name)}"


def draw(results: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Draw results-NAME.svg of each experiment into the folder `out`: its settings with their intervals."""
    from compressive_transformer.apps.experiment.drawing import draw as draw_experiment  # an optional library

    with tempfile.TemporaryDirectory() as temporary:
        for name, content in results.items():
            if "runs" in content:
                draw_experiment(content, Path(temporary))
                shutil.copy(Path(temporary, "settings.svg"), out / f"results-{name}.svg")


def _transfer(name: str, content: Mapping[str, Any]) -> str:
    rows = ["| compression function | bits per byte | − own f_c | 95 % over seeds | 95 % over documents |"]
    rows.append("| :-- | --: | --: | --: | --: |")
    for row in content["transfer"]:
        bits = row["bits_per_byte"]
        deviation = f" ± {statistics.stdev(bits):.4f}" if len(bits) > 1 else ""
        difference = "–" if row["difference"] is None else f"{row['difference']:+.4f}"
        intervals = (row["difference_over_runs"], row["difference_over_documents"])
        between = ("–" if pair is None else f"{pair[0]:+.4f} to {pair[1]:+.4f}" for pair in intervals)
        cells = [row["compression"], f"{statistics.fmean(bits):.4f}{deviation}", difference, *between]
        rows.append(f"| {' | '.join(cells)} |")
    evaluate = content["evaluate"]
    limit = f", about {evaluate['tokens']:,} tokens of it" if evaluate["tokens"] else ""
    return "\n\n".join(
        [
            f"Function: {content['compression']}; seeds {', '.join(map(str, content['seeds']))}; networks of "
            f"{content['networks']}, {content['tokens']:,} tokens trained; the other corpus is that of "
            f"{content['donors']}. Scored on the {evaluate['split']} split{limit}.",
            "\n".join(rows),
            f"```bash\n{content['command']}\n```",
            f"Commit: {', '.join(content['commits']) or 'unknown'}. Corpus: {content['corpus']}. {_all_numbers(name)}",
        ]
    )


def _buckets(name: str, content: Mapping[str, Any]) -> str:
    baseline, setting = content["baseline"], content["setting"]
    parts = []
    for kind, buckets in content["buckets"].items():
        what = kind.removeprefix("by_")
        parts.append(f"| {what} | words | {baseline} | {setting} | difference | 95 % over seeds |")
        parts[-1] += "\n| --: | --: | --: | --: | --: | --: |"
        for bucket in buckets:
            bits = [statistics.fmean(bucket["nats"][side]) / math.log(2) for side in ("baseline", "setting")]
            interval = bucket["difference_over_runs"]
            cells = [
                bucket["bucket"],
                f"{bucket['words']:,}",
                *(f"{value / bucket['bytes']:.4f}" for value in bits),
                f"{bucket['difference']:+.4f}",
                "–" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}",
            ]
            parts[-1] += f"\n| {' | '.join(cells)} |"
    seeds = ", ".join(map(str, content["seeds"]))
    explained = (
        f"Bits per byte, means over seeds {seeds}; frequency: occurrences of a word in the training split; position: "
        f"tokens before it in the document."
    )
    return "\n\n".join([*parts, explained, f"```bash\n{content['command']}\n```", _all_numbers(name)])


def _foreign_lines(name: str, content: Mapping[str, Any]) -> str:
    rows = ["| lines from | area under the curve | smallest and largest |", "| :-- | --: | --: |"]
    for source, areas in content["foreign_lines"].items():
        rows.append(f"| {source} | {statistics.fmean(areas):.4f} | {min(areas):.4f} to {max(areas):.4f} |")
    seeds = ", ".join(map(str, content["seeds"]))
    note = f"Among lines of {content['log']}; {content['steps']:,} steps, mean over seeds {seeds}."
    return "\n\n".join(["\n".join(rows), note, f"```bash\n{content['command']}\n```", _all_numbers(name)])


def _all_numbers(name: str) -> str:
    plan = Path("configs", "experiments", f"{name}.toml")
    link = f", the plan [{plan}](../{plan})" if (ROOT / plan).exists() else ""
    return f"All numbers: [results/{name}.json](../results/{name}.json){link}."


def main() -> None:
    """Read all results, then write the figures and the page."""
    results = read_results(RESULTS)
    page = fill(PAGE.read_text(encoding="utf-8"), results)
    draw(results, PAGE.parent)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
