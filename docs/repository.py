"""Sphinx extension: files of the project, to which pages link, as parts of the site.

The pages are written for GitHub, where a link leads to any file of the project. In the site, README, CONTRIBUTING and
CHANGELOG are pages (their text is read from the root, so nothing is said twice), and code has pages of its own below
`source/`, with lines to link to. Docstrings are written for readers of code; what reST wants otherwise is put right.
"""

from __future__ import annotations

import builtins
import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FROM_ROOT = {"index": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
PACKAGE = ROOT / "src" / "compressive_transformer"

LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".sh": "bash"}
COPIED = {".ipynb", ".json", ".svg"}  # a browser shows these without a page
LINK = re.compile(r"\]\(([^)\s]+)\)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", separate_paragraphs)
    app.connect("doctree-read", leave_builtins)
    app.connect("html-collect-pages", source_pages)
    app.connect("build-finished", copy_files)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def read_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace links by those of the site, and put README, CONTRIBUTING and CHANGELOG into their pages."""
    folder, text = DOCS, source[0]
    if name in FROM_ROOT:
        folder = ROOT
        text = (ROOT / FROM_ROOT[name]).read_text(encoding="utf-8") + text.partition("\n\n")[2]
    source[0] = LINK.sub(lambda link: f"]({_target(link[1], folder, _files(app))})", text)


def _files(app: Sphinx) -> set[Path]:
    """Return the linked files, collected while pages are read; the reference links to the whole package."""
    if not hasattr(app.env, "linked_files"):
        app.env.linked_files = set(PACKAGE.rglob("*.py"))  # type: ignore[attr-defined]
    files: set[Path] = app.env.linked_files  # type: ignore[attr-defined]
    return files


def _target(link: str, folder: Path, linked: set[Path]) -> str:
    path, hash_sign, heading = link.partition("#")
    file = (folder / path).resolve()
    if not path or re.match(r"\w+:", link) or not file.exists():
        return link
    names = {ROOT / page: f"{name}.md" for name, page in FROM_ROOT.items()}
    if file in names or (file.parent == DOCS and file.suffix in (".md", ".svg", ".png")):
        return names.get(file, file.name) + hash_sign + heading
    linked.add(file)
    linked.update(path for path in file.glob("*") if path.is_file())
    return f"{'plain' if file.suffix in COPIED else 'repository'}:{_address(file)}"


def _address(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def separate_paragraphs(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Add the empty lines around lists and parameters that reST needs and docstrings leave out."""
    try:
        parameters = set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):  # no callable
        parameters = set()
    separate: list[str] = []
    for line in lines:
        before = separate[-1] if separate else ""
        begins = line.startswith("- ") and not before.startswith(("- ", " "))
        ends = before.startswith(("- ", "  ")) and not line.startswith(("- ", " "))
        if before and line and (begins or ends or line.partition(":")[0] in parameters):
            separate.append("")
        separate.append(line)
    lines[:] = separate


def leave_builtins(app: Sphinx, tree: nodes.document) -> None:
    """Remove links from built-in types in signatures, which Sphinx would link to fields of that name."""
    for link in list(tree.findall(addnodes.pending_xref)):
        if link.get("refdomain") == "py" and hasattr(builtins, link["reftarget"]):
            link.replace_self(nodes.Text(link["reftarget"]))


def source_line(domain: str, info: dict[str, str]) -> str | None:
    """Return the link to the code of a documented name, for sphinx.ext.linkcode."""
    thing: Any = sys.modules[info["module"]]
    for part in info["fullname"].split("."):
        thing = getattr(thing, part, None)
    try:
        file, (_, line) = inspect.getsourcefile(inspect.unwrap(thing)), inspect.getsourcelines(thing)
    except TypeError:  # fields and tables have no code of their own
        return None
    return f"source/{_address(Path(file or ''))}.html#L-{line}"


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each linked file and folder."""
    files = _files(app)
    for file in sorted(file for file in files if file.suffix not in COPIED):
        address = _address(file)
        body = _listing(file, files) if file.is_dir() else _highlighted(app, file)
        context = {"title": address, "body": f'<h1 class="path">{escape(address)}</h1>{body}', "parents": []}
        yield f"source/{address}", context, "page.html"


def _highlighted(app: Sphinx, file: Path) -> str:
    code = file.read_text(encoding="utf-8")
    html: str = app.builder.highlighter.highlight_block(  # type: ignore[attr-defined]
        code, LANGUAGES.get(file.suffix, "text"), lineanchors="L"
    )
    return html


def _listing(folder: Path, files: set[Path]) -> str:
    # Addresses are relative to the folder's own page, which stands beside the folder.
    links = [
        f'<li><a href="{folder.name}/{file.name}{"" if file.suffix in COPIED else ".html"}">{file.name}</a></li>'
        for file in sorted(files)
        if file.parent == folder and file.is_file()
    ]
    return f"<ul>{''.join(links)}</ul>"


def copy_files(app: Sphinx, failure: Exception | None) -> None:
    """Copy linked files that have no page."""
    for file in () if failure else _files(app):
        if file.suffix in COPIED and file.is_file():
            target = Path(app.outdir) / "source" / _address(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
