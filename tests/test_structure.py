"""What holds for the package as a whole: order of imports, sizes, public names, and what it ships."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import compressive_transformer

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "compressive_transformer"
SAMPLE = PACKAGE / "apps" / "demo" / "sample"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# The reading order: a file imports only from files above it. A folder counts as the file whose place it took.
ORDER = [
    "errors",
    "files",
    "config",
    "memory",
    "compression",
    "attention",
    "model",
    "progress",
    "data",
    "checkpoint",
    "evaluate",
    "generate",
    "train",
    "hf",
    "lm_eval",
    "apps",
    "cli",
]

# Written as patterns that do not match themselves.
MACHINE_PATHS_AND_HOSTS = re.compile(r"/(?:work|root|opt)/|(?:pypi|pythonhosted|download\.pytorch)\.org")

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def place_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_from_package(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first name below the package ("" for the package itself) of each import, at any depth."""
    folder = ["compressive_transformer", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) + 1 - node.level] if node.level else []
            module = [*base, *(node.module or "").split(".")]
            names = [".".join(filter(None, [*module, alias.name])) for alias in node.names]
        else:
            continue
        for parts in (name.split(".") for name in names):
            if parts[0] == "compressive_transformer":
                yield node.lineno, parts[1] if len(parts) > 1 else ""


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@each_file
def test_a_file_imports_only_from_files_above_it(path: Path) -> None:
    place = place_of(path)
    if place == "__init__":
        return
    assert place in ORDER, f"{path.name} has no place in ORDER of {Path(__file__).name}: give it one"
    above = ORDER[: ORDER.index(place)]
    wrong = {
        f"line {line} imports {name or 'the package'}"
        for line, name in imports_from_package(path)
        if name not in above and not (path.parent != PACKAGE and name == place)
    }
    assert not wrong, f"{place} may import only from {', '.join(above) or 'nothing'} (in the package): {sorted(wrong)}"


@each_file
def test_files_functions_and_parameter_lists_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 300, f"{path.name} has {lines} lines: make it a folder of the same name"
    for function in functions_of(path):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= 50, f"{function.name} in {path.name} has {length} lines, 50 are the limit"
        a = function.args
        parameters = [p.arg for p in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if p]
        count = sum(name not in ("self", "cls") for name in parameters)
        assert count <= 8, f"{function.name} in {path.name} has {count} parameters, 8 are the limit"


@each_file
def test_each_public_function_and_class_has_a_docstring(path: Path) -> None:
    bare = [
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not bare, f"without a docstring in {path.name}: {', '.join(bare)}"


def test_the_public_names_are_exactly_those_of_all() -> None:
    names = compressive_transformer.__all__
    here = {
        name
        for name, value in vars(compressive_transformer).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert here <= set(names), f"not in __all__: {sorted(here - set(names))}"
    for name in names:
        assert hasattr(compressive_transformer, name), f"{name} is in __all__ but does not exist"
        assert not inspect.ismodule(getattr(compressive_transformer, name)), f"{name} is a module"
    # ruff's order: constants, then classes, then functions
    assert names == sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def test_importing_the_package_imports_no_optional_library() -> None:
    code = "import sys, compressive_transformer; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    optional = {"datasets", "lm_eval", "matplotlib", "pyarrow", "sentencepiece", "tensorboard", "trackio"}
    optional |= {"fastapi", "uvicorn"}
    assert not (optional | {"rich", "tokenizers", "transformers", "tyro", "wandb"}) & set(loaded.stdout.split())


def test_no_machine_path_or_registry_host_is_written_into_the_project() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("lists the project's files with git")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for path in (ROOT / name for name in output.split("\0") if name):
        text = path.read_bytes().decode("utf-8", errors="ignore") if path.is_file() else ""
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in MACHINE_PATHS_AND_HOSTS.finditer(text)]
    assert not found


def test_the_sample_has_the_bytes_that_its_readme_lists() -> None:
    readme = (SAMPLE / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\S+\.txt)` .* `([0-9a-f]{64})` \|$", readme, flags=re.MULTILINE))
    shipped = {
        path.relative_to(SAMPLE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in SAMPLE.rglob("*.txt")
    }
    assert listed
    assert shipped == listed
    assert sum(path.stat().st_size for path in SAMPLE.rglob("*.txt")) <= 3_000_000


# Words that read like a translation, and first words of a docstring that say nothing.
BANNED = re.compile(
    r"\b(anew|so many|taken? up|takes up|goes on|go on|going on|went on|told|affair|tells|gives back)\b", re.IGNORECASE
)
EMPTY_FIRST_WORDS = {"a", "an", "the", "what", "whether", "how", "which", "that", "where", "those", "one", "of", "all"}


def documented(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node, text


@each_file
def test_docstrings_of_functions_begin_with_a_verb(path: Path) -> None:
    wrong = []
    for node, text in documented(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {getattr(d, "id", getattr(d, "attr", "")) for d in node.decorator_list}
        if decorators & {"property", "cached_property", "setter"}:
            continue  # a noun phrase, as an attribute has
        if text.split()[0].strip("`").lower() in EMPTY_FIRST_WORDS:
            wrong.append(f"line {node.lineno}: {text.splitlines()[0][:60]}")
    assert not wrong, "begin with an imperative verb: " + "; ".join(wrong)


@each_file
def test_texts_use_the_words_of_the_field(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    wrong = [f"line {number}: {m.group()}" for number, line in enumerate(lines, 1) if (m := BANNED.search(line))]
    assert not wrong, f"say it in field words (cache, resume, reset, log, ...): {', '.join(wrong)}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_use_the_words_of_the_field(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    wrong = sorted({match.group().lower() for match in BANNED.finditer(prose)})
    assert not wrong, f"say it in field words (cache, resume, reset, log, ...): {', '.join(wrong)}"
