"""The site that `make docs` builds: complete, and without loads from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import check_site
import compressive_transformer

DOCS = Path(__file__).parents[1] / "docs"


def test_the_reference_has_each_public_name_once() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. (?:auto\w+|py:data):: (\w+)$", page, flags=re.MULTILINE)
    assert sorted(named) == sorted(compressive_transformer.__all__)


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://elsewhere.example/a.js"></script>',
        '<link rel="preload stylesheet" href="//elsewhere.example/a.css">',
        '<img alt="" srcset="here.png 1x, http://elsewhere.example/a.png 2x">',
        '<p style="background: url(https://elsewhere.example/a.png)">',
        "<style>@import 'https://elsewhere.example/a.css';</style>",
        '<svg><image xlink:href="https://elsewhere.example/a.png"/></svg>',
    ],
)
def test_what_a_page_would_load_from_elsewhere_is_found(html: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    (found,) = check_site.check(tmp_path)
    assert re.match(r"page\.html loads (?:https?:)?//elsewhere\.example/a\.", found)


def test_links_that_a_reader_may_follow_are_no_loads(tmp_path: Path) -> None:
    links = '<a href="https://elsewhere.example">there</a><link rel="canonical" href="https://elsewhere.example/page">'
    (tmp_path / "page.html").write_text(f'{links}<img src="a.png"><script src="a.js"></script>', encoding="utf-8")
    (tmp_path / "style.css").write_text("/* https://elsewhere.example */ a { background: url(a.png) }")
    assert list(check_site.check(tmp_path)) == []


def test_links_that_lead_nowhere_or_stayed_markdown_are_found(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a file.json").write_text("{}")
    good = '<a href="source/a%20file.json">a</a> <a href="#here">b</a> <a href="page.html#x">c</a> <code>[a](b)</code>'
    bad = '<a href="source/b.json">b</a> <p>see [c.json](file:c.json)</p> <pre>d[0](1)</pre>'
    (tmp_path / "page.html").write_text(good + bad, encoding="utf-8")
    assert list(check_site.check(tmp_path)) == [
        "page.html links to source/b.json, which is not there",
        "page.html shows a link as Markdown: ](file:c.json)",
    ]


def test_styles_are_looked_at_and_a_folder_without_pages_is_no_site(tmp_path: Path) -> None:
    (tmp_path / "style.css").write_text("@font-face { src: url('https://elsewhere.example/a.woff2') }")
    assert list(check_site.check(tmp_path)) == [
        f"{tmp_path} holds no pages: build them first, with make docs",
        "style.css loads https://elsewhere.example/a.woff2",
    ]
