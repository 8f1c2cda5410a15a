"""Check of a built site: no loads from elsewhere, no dead links.

    python docs/check_site.py SITE

No fonts, scripts, styles or pictures may come from elsewhere; links that a reader may follow are no loads. A link
within the site must lead to a file of it, and none may have stayed Markdown. Prints all problems, and exits with 1 if
there are any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ELSEWHERE = re.compile(r"\s*(?:https?:)?//", flags=re.IGNORECASE)
IN_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s;]+)""", flags=re.IGNORECASE)
MARKDOWN_LINK = re.compile(r"\]\([^)\s]+\)")
AS_WRITTEN = {"pre", "code", "script", "style"}
LOADING = {"src", "srcset", "poster", "data", "background"}  # attributes that load, of any element
LOADING_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "modulepreload", "manifest"}


class Loads(HTMLParser):
    """Parser that collects loads from elsewhere and links of a page or picture."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []
        """Addresses of links that a reader may follow, and links that have stayed Markdown."""
        self._in_style = False
        self._as_written = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect loads by attributes and inline styles, and links."""
        given = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        self._as_written += tag in AS_WRITTEN
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        kinds = set(given.get("rel", "").lower().split())
        drawn = tag in ("image", "use", "feimage")  # of SVG, where a link is a load
        for name, value in given.items():
            loads = name in LOADING or (name in ("href", "xlink:href") and (drawn or kinds & LOADING_LINKS))
            places = value.split(",") if name == "srcset" else [value]
            self.found += [place.strip() for place in places if loads and ELSEWHERE.match(place)]
        self.found += IN_STYLE.findall(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        """Collect loads in styles, and Markdown links in text."""
        if self._in_style:
            self.found += IN_STYLE.findall(data)
        if not self._as_written:
            self.links += MARKDOWN_LINK.findall(data)

    def handle_endtag(self, tag: str) -> None:
        """Leave a style or verbatim text."""
        self._in_style = False
        self._as_written -= tag in AS_WRITTEN


def problems_of(file: Path) -> Iterator[str]:
    """Yield loads from elsewhere and dead links of a file."""
    text = file.read_text(encoding="utf-8")
    page = Loads()
    if file.suffix == ".css":
        page.found = IN_STYLE.findall(text)
    else:
        page.feed(text)
    yield from (f"loads {place}" for place in page.found)
    for link in page.links:
        parts = urlsplit(link)
        if MARKDOWN_LINK.fullmatch(link):
            yield f"shows a link as Markdown: {link}"
        elif not parts.scheme and not parts.netloc and parts.path and not (file.parent / unquote(parts.path)).exists():
            yield f"links to {link}, which is not there"


def check(site: Path) -> Iterator[str]:
    """Yield a line per load from elsewhere and dead link in the pages, styles and pictures of a folder."""
    files = [file for file in sorted(site.rglob("*")) if file.suffix in (".html", ".css", ".svg")]
    if not any(file.suffix == ".html" for file in files):
        yield f"{site} holds no pages: build them first, with make docs"
    for file in files:
        yield from (f"{file.relative_to(site)} {problem}" for problem in problems_of(file))


if __name__ == "__main__":
    problems = list(check(Path(sys.argv[1])))
    print("\n".join(problems) or f"{sys.argv[1]}: nothing is loaded from elsewhere, no link is dead")
    sys.exit(bool(problems))
