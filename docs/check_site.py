"""Checks that the pages of a built site load nothing from elsewhere: no fonts, scripts, styles or pictures.

    python docs/check_site.py SITE

Links that a reader may follow are no loads. Says what would be loaded, and exits with 1 if anything would.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ELSEWHERE = re.compile(r"\s*(?:https?:)?//", flags=re.IGNORECASE)
IN_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s;]+)""", flags=re.IGNORECASE)
LOADING = {"src", "srcset", "poster", "data", "background"}  # attributes that load, of any element
LOADING_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "modulepreload", "manifest"}


class Loads(HTMLParser):
    """Collects what a page or picture loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Looks at the attributes that load, and at inline styles."""
        given = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        kinds = set(given.get("rel", "").lower().split())
        drawn = tag in ("image", "use", "feimage")  # of SVG, where a link is a load
        for name, value in given.items():
            loads = name in LOADING or (name in ("href", "xlink:href") and (drawn or kinds & LOADING_LINKS))
            places = value.split(",") if name == "srcset" else [value]
            self.found += [place.strip() for place in places if loads and ELSEWHERE.match(place)]
        self.found += IN_STYLE.findall(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        """Looks at styles that a page holds."""
        if self._in_style:
            self.found += IN_STYLE.findall(data)

    def handle_endtag(self, tag: str) -> None:
        """Leaves a style."""
        self._in_style = False


def loads_of(file: Path) -> list[str]:
    """What a file of the site loads from elsewhere."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".css":
        return IN_STYLE.findall(text)
    page = Loads()
    page.feed(text)
    return page.found


def check(site: Path) -> Iterator[str]:
    """A line for each load from elsewhere in the pages, styles and pictures of a folder."""
    files = [file for file in sorted(site.rglob("*")) if file.suffix in (".html", ".css", ".svg")]
    if not any(file.suffix == ".html" for file in files):
        yield f"{site} holds no pages: build them first, with make docs"
    for file in files:
        yield from (f"{file.relative_to(site)} loads {place}" for place in loads_of(file))


if __name__ == "__main__":
    problems = list(check(Path(sys.argv[1])))
    print("\n".join(problems) or f"{sys.argv[1]}: nothing is loaded from elsewhere")
    sys.exit(bool(problems))
