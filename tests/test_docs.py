"""Pages of the docs: their Python runs, their commands parse and run, links and figures are up to date."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compressive_transformer import COMPRESSIONS, cli
from compressive_transformer.apps.experiment.plan import read_plan
from compressive_transformer.config import ModelConfig, TrainConfig
from compressive_transformer.config.toml import from_mapping, read_settings
from compressive_transformer.data import Corpus
from runs import write_books

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)

# Sizes that read well and would take hours here, and what runs in their place. Each must occur in its page.
SMALLER_MODEL = {
    "d_model=256": "d_model=16",
    "n_layers=4": "n_layers=2",
    "n_heads=8": "n_heads=2",
    "segment_length=128": "segment_length=16",
    "memory_length=128": "memory_length=16",
    "compressed_length=128": "compressed_length=8",
}
SMALLER = {
    "README.md": {"d_model=256": "d_model=16", "n_layers=4": "n_layers=2", ": 128": ": 16"},
    "quickstart.md": {
        **SMALLER_MODEL,
        "steps=20_000, batch_size=8": "steps=4, batch_size=2, warmup_steps=1, validate_every=2",
        "compressed_length=256": "compressed_length=16",
        "stream.write(200": "stream.write(20",
        'vocab_size=257, compression="median"': 'vocab_size=257, d_model=16, compression="median"',
    },
    "transformers.md": {
        **SMALLER_MODEL,
        "steps=20_000, batch_size=8": "steps=2, batch_size=2, warmup_steps=1, validate_every=2",
    },
}
SMALLER_SETTINGS = {
    "model": {"d_model": 16, "n_layers": 2, "n_heads": 2, "segment_length": 16, "memory_length": 16},
    "train": {"steps": 3, "batch_size": 2, "warmup_steps": 1, "validate_every": 3, "sample_every": 0},
}

SMALLER_PLAN = {
    "seeds = [0, 1, 2]": "seeds = [0]",
    "d_model = 128": "d_model = 16",
    "steps = 2000": "steps = 2",
    "warmup_steps = 100": "warmup_steps = 1",
    "validate_every = 250": "validate_every = 2",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
pytestmark = pytest.mark.usefixtures("cpu")


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def commands_of(page: Path) -> list[list[str]]:
    """The arguments of each call of `compressive`, under torchrun or not; maybe with `>` and a file at the end."""
    commands = []
    for language, content in blocks_of(page):
        if language in ("bash", "console"):
            for line in content.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[:2] == ["compressive", "--plugin"]:
                    assert (ROOT / words[2]).is_file(), f"{page.name} names {words[2]}"
                    words = ["compressive", *words[3:]]
                if words[:1] == ["compressive"]:
                    commands.append(words[1:])
                elif "compressive_transformer.cli" in words:
                    commands.append(words[words.index("compressive_transformer.cli") + 1 :])
    return commands


def without_file(arguments: list[str]) -> tuple[list[str], Path | None]:
    """The arguments proper, and the file that the output goes to."""
    return (arguments[:-2], Path(arguments[-1])) if arguments[-2:-1] == [">"] else (arguments, None)


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages name; what a page changes in the package is set back."""
    write_books(tmp_path / "books")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    text = (files("compressive_transformer.apps.demo") / "sample/test/356.txt").read_text(encoding="utf-8")
    for name in ("moby-dick.txt", "chapter.txt"):
        (tmp_path / name).write_text(text[:300], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, compression in COMPRESSIONS.items():
        monkeypatch.setitem(COMPRESSIONS, name, compression)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text("utf-8")], ids=name_of)
def test_python_of_a_page_runs_and_prints_what_the_page_says(page: Path, place: Path) -> None:
    known = dict(COMPRESSIONS)
    replaced = dict.fromkeys(SMALLER.get(page.name, {}), False)
    namespace: dict[str, Any] = {}
    for (language, content), following in pairwise([*blocks_of(page), ("", "")]):
        if language != "python":
            continue
        for sizes, smaller in SMALLER.get(page.name, {}).items():
            replaced[sizes] |= sizes in content
            content = content.replace(sizes, smaller)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(content, str(page), "exec"), namespace)
        if following[0] == "text":
            assert printed.getvalue() == following[1]
    for name in COMPRESSIONS.keys() - known.keys():
        del COMPRESSIONS[name]
    assert all(replaced.values()), f"not in {page.name}: {[sizes for sizes, found in replaced.items() if not found]}"


@each_page
def test_commands_of_a_page_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def recorded(name: str, command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def record(*arguments: Any, **options: Any) -> None:
            called.append(name)

        return record

    for name, command in list(cli.COMMANDS.items()):
        monkeypatch.setitem(cli.COMMANDS, name, recorded(name, command))
    commands = commands_of(page)
    for arguments in commands:
        monkeypatch.setattr(sys, "argv", ["compressive", *without_file(arguments)[0]])
        try:
            cli.main()
        except SystemExit as stop:
            pytest.fail(f"compressive {shlex.join(arguments)}: exit {stop.code}")
    assert called == [arguments[0] for arguments in commands]


def test_an_unknown_option_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compressive", "evaluate", "run", "data", "--no-such-flag"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Runs one command of a page and returns what it prints, which also goes to the file that it names."""

    def call(command: list[str]) -> str:
        arguments, file = without_file(command)
        monkeypatch.setattr(sys, "argv", ["compressive", *arguments])
        cli.main()
        printed = capsys.readouterr().out
        if file:
            file.write_text(printed, encoding="utf-8")
        return printed

    return call


def test_commands_of_the_readme_run(place: Path, run: Callable[[list[str]], str]) -> None:
    smaller = [f"{table}.{name}={value}" for table, sizes in SMALLER_SETTINGS.items() for name, value in sizes.items()]
    printed = {}
    for arguments in commands_of(ROOT / "README.md"):
        if arguments[0] == "train":
            arguments = [*arguments, *(part for setting in smaller for part in ("--set", setting))]
        printed[arguments[0]] = run(arguments)
    assert list(printed) == ["prepare", "train", "evaluate", "generate"]
    assert "documents" in printed["prepare"]
    result = json.loads(printed["evaluate"])
    assert result["conditions"]["split"] == "test"
    assert result["conditions"]["model"]["compressed_length"] == 256
    assert printed["generate"].strip()


def test_commands_of_the_evaluation_page_run(
    place: Path, corpus: Corpus, finished: Path, run: Callable[[list[str]], str]
) -> None:
    shutil.copytree(corpus.path, place / "data")
    for name in ("base", "base-0", "base-1", "xl-0", "xl-1"):
        shutil.copytree(finished, place / "runs" / name)
    printed = [(command[0], run(command)) for command in commands_of(ROOT / "docs" / "evaluation.md")]
    assert json.loads(Path("part.json").read_text(encoding="utf-8"))["tokens"] == 200
    (_, compared) = [text for name, text in printed if name == "compare"]
    assert json.loads(compared)["differences"] == [0, 0]
    assert all(text for _, text in printed)
    assert all("word perplexity" in text for _, text in printed[-3:])  # as in the paper


@pytest.mark.slow  # trains two models
def test_commands_of_the_inspection_page_run(
    place: Path, corpus: Corpus, finished: Path, run: Callable[[list[str]], str]
) -> None:
    pytest.importorskip("matplotlib", reason="the page needs the extra `plot`")
    shutil.copytree(corpus.path, place / "data")
    for name in ("base", "xl"):
        shutil.copytree(finished, place / "runs" / name)
    for command in commands_of(ROOT / "docs" / "inspection.md"):
        run(command)
    (inspected,) = json.loads(Path("report.json").read_text(encoding="utf-8"))["runs"]
    assert {17, 250} <= {token["token"] for token in inspected["tokens"]}
    assert Path("report.html").stat().st_size < Path("both.html").stat().st_size


@pytest.mark.slow  # four processes
def test_commands_of_the_page_of_experiments_run(
    place: Path, run: Callable[[list[str]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    page = ROOT / "docs" / "experiments.md"
    plan = next(content for language, content in blocks_of(page) if language == "toml")
    for sizes, smaller in SMALLER_PLAN.items():
        assert sizes in plan
        plan = plan.replace(sizes, smaller)
    (place / "plan.toml").write_text(plan, encoding="utf-8")
    printed = [run(command) for command in commands_of(page)]
    results = json.loads(printed[-1])
    assert [entry["seeds"] for entry in results["settings"]] == [[0], [0]]
    assert (place / "runs/memory/results.md").exists()


@pytest.mark.parametrize("page", [page for page in PAGES if "```toml" in page.read_text("utf-8")], ids=name_of)
def test_recipes_and_plans_of_a_page_are_valid(page: Path, tmp_path: Path, corpus: Corpus) -> None:
    for language, content in blocks_of(page):
        if language == "toml":
            (tmp_path / "recipe.toml").write_text(content, encoding="utf-8")
            if "settings" in tomllib.loads(content):
                read_plan(tmp_path / "recipe.toml", corpus)
                continue
            tables = read_settings(tmp_path / "recipe.toml")
            from_mapping(ModelConfig, {"vocab_size": 257, **tables["model"]}, "model")
            from_mapping(TrainConfig, tables["train"], "train")


@each_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings]
            assert heading in slugs, f"{page.name} links to {target}"


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = re.findall(r"(?:^ *|`)make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(named) <= targets


def test_the_training_page_names_every_field() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    missing = [name for name in TrainConfig.__dataclass_fields__ if f"`{name}`" not in page]
    assert not missing


@pytest.mark.parametrize("name", ["memory", "positions", "gradients"])
def test_a_picture_is_what_its_script_draws_now(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    importlib.import_module(f"draw_{name}").draw(tmp_path / "picture.svg")
    drawn, shipped = (
        path.read_text(encoding="utf-8") for path in (tmp_path / "picture.svg", ROOT / "docs" / f"{name}.svg")
    )
    # Matplotlib writes each label as a comment; releases may differ in how they draw it.
    labels = re.findall(r"<!-- (.*?) -->", shipped, flags=re.DOTALL)
    assert len(labels) > 10
    assert re.findall(r"<!-- (.*?) -->", drawn, flags=re.DOTALL) == labels
    assert len(re.findall("<path", drawn)) == len(re.findall("<path", shipped))


def test_the_table_of_attention_is_that_of_its_file() -> None:
    benchmark = load_script(ROOT / "benchmarks" / "attention.py")
    benchmark.check_agreement()
    page = benchmark.PAGE.read_text(encoding="utf-8")
    assert benchmark.replace_table(page, "").count(benchmark.BEGIN) == 1
    if benchmark.RESULTS.exists():
        results = json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))
        assert benchmark.replace_table(page, benchmark.table_of(results)) == page
