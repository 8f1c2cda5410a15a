"""Generated parts of docs/performance.md and README.md.

    python benchmarks/page.py

Between `<!-- performance: PART -->` and `<!-- end of performance -->` a page gets the part of that name; all other
text is unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import summary
import tables
from compressive_transformer import CompressiveError
from compressive_transformer.checkpoint import check_format, read_json
from compressive_transformer.files import atomic_file
from profiling import BEFORE

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "performance.json"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
PLACE = re.compile(r"(<!-- performance: (\S+) -->\n).*?(<!-- end of performance -->)", flags=re.DOTALL)

PARTS = {
    "summary": summary.summary,
    "peers": tables.peers,
    "made": tables.made,
    "goals": tables.goals_met,
    "training": tables.ratios("training"),
    "scoring": tables.ratios("scoring"),
    "decoding": tables.ratios("decoding"),
    "memory": tables.memory,
    "compression": tables.compression,
    "growth": tables.growth,
    "stream": tables.stream,
    "profile": lambda results: tables.profile(results, read_json(BEFORE) if BEFORE.exists() else None),
}


def fill(page: str, results: Mapping[str, Any] | None) -> str:
    """Return the page with all places filled. Raises CompressiveError for an unknown part."""

    def filled(match: re.Match[str]) -> str:
        begin, part, end = match.groups()
        if part not in PARTS:
            raise CompressiveError(f"{part!r} is no part of the results; parts are {', '.join(PARTS)}")
        text = "Not measured yet." if results is None else PARTS[part](results)
        return f"{begin}\n{text}\n\n{end}"

    return PLACE.sub(filled, page)


def write_pages(results: Mapping[str, Any], *, to_stdout: bool = False) -> None:
    """Write the results into both pages, or print the parts."""
    filled = {path: fill(path.read_text(encoding="utf-8"), results) for path in PAGES}
    for path, page in filled.items():
        if to_stdout:
            print("\n\n".join(match.group() for match in PLACE.finditer(page)))
            continue
        with atomic_file(path) as temporary:
            temporary.write_text(page, encoding="utf-8")


def main() -> None:
    """Write both pages from performance.json."""
    results = read_json(RESULTS)
    check_format(RESULTS, results)
    write_pages(results)


if __name__ == "__main__":
    main()
