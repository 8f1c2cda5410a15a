"""The site that `make docs` builds: complete, and without loads from elsewhere."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import check_site
import compressive_transformer

DOCS = Path(__file__).parents[1] / "docs"


def test_the_reference_has_each_public_name_once() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    modules = re.split(r"^\.\. currentmodule:: (\S+)$", page, flags=re.MULTILINE)[1:]
    named: dict[str, list[str]] = {}
    for module, text in zip(modules[::2], modules[1::2], strict=True):
        named.setdefault(module, []).extend(re.findall(r"^\.\. (?:auto\w+|py:data):: (\w+)$", text, flags=re.MULTILINE))
    top = compressive_transformer.__all__
    for module, names in named.items():
        public = importlib.import_module(module).__all__
        wanted = [name for name in public if module == "compressive_transformer" or name not in top]
        assert sorted(names) == sorted(wanted), f"docs/api.md and {module}.__all__ differ"


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
def test_loads_from_elsewhere_are_found(html: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    (found,) = check_site.check(tmp_path)
    assert re.match(r"page\.html loads (?:https?:)?//elsewhere\.example/a\.", found)


def test_links_to_other_sites_are_no_loads(tmp_path: Path) -> None:
    links = '<a href="https://elsewhere.example">there</a><link rel="canonical" href="https://elsewhere.example/page">'
    (tmp_path / "page.html").write_text(f'{links}<img src="a.png"><script src="a.js"></script>', encoding="utf-8")
    (tmp_path / "style.css").write_text("/* https://elsewhere.example */ a { background: url(a.png) }")
    assert list(check_site.check(tmp_path)) == []


def test_dead_links_and_links_left_as_markdown_are_found(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a file.json").write_text("{}")
    good = '<a href="source/a%20file.json">a</a> <a href="#here">b</a> <a href="page.html#x">c</a> <code>[a](b)</code>'
    bad = '<a href="source/b.json">b</a> <p>see [c.json](file:c.json)</p> <pre>d[0](1)</pre>'
    (tmp_path / "page.html").write_text(good + bad, encoding="utf-8")
    assert list(check_site.check(tmp_path)) == [
        "page.html links to source/b.json, which is not there",
        "page.html shows a link as Markdown: ](file:c.json)",
    ]


def test_styles_are_checked_and_a_site_needs_pages(tmp_path: Path) -> None:
    (tmp_path / "style.css").write_text("@font-face { src: url('https://elsewhere.example/a.woff2') }")
    assert list(check_site.check(tmp_path)) == [
        f"{tmp_path} holds no pages: build them first, with make docs",
        "style.css loads https://elsewhere.example/a.woff2",
    ]
