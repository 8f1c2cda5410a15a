"""The command line: results on stdout, progress on stderr, exit 0, 1 with one line, or 2; nothing half-written."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressive_transformer.apps.inspection import InspectionReport, inspect_text
from compressive_transformer.apps.serve import Limits
from compressive_transformer.checkpoint import load, save
from compressive_transformer.cli import COMMANDS, main
from compressive_transformer.cli.evaluate import MetricOptions, SplitOptions
from compressive_transformer.cli.inspect import Chosen, Frequency
from compressive_transformer.compression import COMPRESSIONS
from compressive_transformer.data import Corpus, open_corpus, prepare
from compressive_transformer.data.tokenizers import MuLawTokenizer, train_bpe
from compressive_transformer.evaluate import ByFrequency, ByPosition, dynamic_evaluate, evaluate
from compressive_transformer.evaluate.compare import compare, compare_runs
from compressive_transformer.generate import Sampling, Stream
from runs import MODEL, TRAINING, program, tiny_model, write_books

pytestmark = pytest.mark.usefixtures("cpu")


@dataclass
class Done:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `compressive` with arguments, in this process."""

    def run(*arguments: str | Path | int) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["compressive", *map(str, arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        if isinstance(code, str):  # as Python itself ends
            return Done(1, printed.out, f"{printed.err}{code}\n")
        return Done(code, printed.out, printed.err)

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The tiny model and training as a TOML file, in a folder that tests may fill."""
    path = tmp_path / "config.toml"
    with path.open("w") as file:
        for name, table in {"model": MODEL, "train": TRAINING}.items():
            print(f"[{name}]", *(f"{field} = {value}" for field, value in table.items()), sep="\n", file=file)
    return path


def assert_failed(done: Done, message: str) -> None:
    """Exit 1 with one line on stderr that holds the message, nothing on stdout."""
    assert done.code == 1
    assert done.out == ""
    assert done.err.count("\n") == 1, done.err
    assert done.err.startswith("compressive: ")
    assert message in done.err


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


# --- from text to text ---


def test_from_text_to_a_model_that_continues_text(command: Run, config: Path, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    done = command("prepare", write_books(tmp_path / "books"), data)
    assert done.code == 0
    assert [line.split()[:3] for line in done.out.splitlines()] == [
        ["train", "3", "documents"],
        ["validation", "2", "documents"],
        ["test", "2", "documents"],
    ]

    settings = ["train.steps=4", "model.compression=max", "model.memory_length=[0, 9]"]
    done = command("train", config, data, run, *(part for setting in settings for part in ("--set", setting)))
    assert (done.code, done.out) == (0, "")
    assert done.err.splitlines()[-1] == f"the run is in {run}; try: compressive evaluate {run} {data}"
    assert (load(run)[0].config.compression, load(run)[0].config.memory_length) == ("max", (0, 9))

    done = command("evaluate", run, data, "--split", "test", "--json")
    assert (done.code, done.err) == (0, "")
    table = json.loads(done.out)
    assert table["conditions"]["split"] == "test"
    expected = evaluate(load(run)[0], open_corpus(data).test)
    assert table["nats"] == pytest.approx(expected.total.nats)

    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(b"Once upon\r\na time")
    done = command("generate", run, "--prompt", prompt, "--tokens", 20, "--seed", 3)
    stream = Stream(*load(run))
    stream.read("Once upon\na time")
    assert (done.code, done.out, done.err) == (0, stream.write(20, seed=3) + "\n", "")


def test_a_run_stopped_and_resumed_is_complete(command: Run, config: Path, corpus: Corpus, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert command("train", config, corpus.path, run, "--stop-at", 3).code == 0
    assert command("train", config, corpus.path, run, "--resume", "latest").code == 0
    assert [path.name for path in (run / "resume").iterdir()] == ["step-000000010"]


def test_evaluate_follows_its_options(command: Run, finished: Path, corpus: Corpus) -> None:
    done = command("evaluate", finished, corpus.path, "--memory-length", 20, "--compressed-length", 2)
    assert done.code == 0
    assert done.out.startswith("validation: 2 documents, ")
    assert "memory            segment 8, recent 20, compressed 2 at rate 3\n" in done.out
    done = command("evaluate", finished, corpus.path, "--memory-length", "1,20", "--tokens", 50)
    assert "memory            segment 8, recent [1, 20], compressed 4 at rate 3\n" in done.out
    done = command("evaluate", finished, corpus.path, "--tokens", 50, "--batch-size", 1, "--json")
    assert json.loads(done.out)["tokens"] == 50


def test_evaluate_scores_by_position_frequency_and_dynamically(command: Run, finished: Path, corpus: Corpus) -> None:
    asked = ["--by-position", "--by-frequency", "--borders", 30, 3, "--dynamic", 0.05]
    done = command("evaluate", finished, corpus.path, *asked, "--json")
    by = [ByPosition(corpus), ByFrequency(corpus, (30, 3))]
    expected = dynamic_evaluate(load(finished)[0], corpus.validation, learning_rate=0.05, by=by).to_dict()
    assert json.loads(done.out) == json.loads(json.dumps(expected))
    done = command("evaluate", finished, corpus.path, "--by-frequency")
    assert "by frequency" in done.out
    assert "by position" not in done.out
    assert "≥ 10,000 " in done.out
    done = command("evaluate", finished, corpus.path, "--borders", 3)
    assert_failed(done, "--borders divide words by frequency: give --by-frequency too")
    done = command("evaluate", finished, corpus.path, "--dynamic", -1)
    assert_failed(done, "learning_rate (-1.0) must be 0 or more")


def test_sweep_prints_a_line_per_pair_of_lengths(command: Run, finished: Path, corpus: Corpus) -> None:
    options = ["--recent", 4, 9, "--compressed", 0, 4, "--split", "test", "--tokens", 60]
    done = command("sweep", finished, corpus.path, *options)
    assert (done.code, done.err) == (0, "")
    lines = [line.split() for line in done.out.splitlines()]
    assert [line[:2] for line in lines] == [["recent", "compressed"], ["4", "0"], ["4", "4"], ["9", "0"], ["9", "4"]]
    tables = json.loads(command("sweep", finished, corpus.path, *options, "--json").out)
    same = command("evaluate", finished, corpus.path, "--split", "test", "--tokens", 60, "--json")
    assert tables[-1] == json.loads(same.out)
    assert [f"{table['bits_per_byte']:.4f}" for table in tables] == [line[2] for line in lines[1:]]


def test_compare_takes_pairs_of_results_as_seeds(command: Run, finished: Path, corpus: Corpus, tmp_path: Path) -> None:
    files = [tmp_path / f"{slots}.json" for slots in (4, 2, 0)]
    for path in files:
        path.write_text(command("evaluate", finished, corpus.path, "--compressed-length", path.stem, "--json").out)
    tables = [json.loads(path.read_text()) for path in files]
    done = command("compare", files[0], files[1])
    assert (done.code, done.out, done.err) == (0, f"{compare(tables[0], tables[1])}\n", "")
    done = command("compare", files[0], files[1], "--pair", files[1], files[2], "--json", "--resamples", 99)
    expected = compare_runs(tables[:2], tables[1:], resamples=99)
    assert json.loads(done.out) == json.loads(json.dumps(expected.to_dict()))
    assert_failed(command("compare", files[0], tmp_path / "none.json"), "none.json: no such file")
    (tmp_path / "other.json").write_text("{}")
    assert_failed(command("compare", files[0], tmp_path / "other.json"), "second[0] is not the result of an evaluation")


def test_generate_reads_a_prompt_from_standard_input(
    command: Run, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Es war einmal – 猫", encoding="utf-8")
    options = ["--tokens", 8, "--seed", 1, "--temperature", 0.5, "--top-k", 9, "--top-p", 0.9]
    from_file = command("generate", finished, "--prompt", prompt, *options)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.read_bytes()), encoding="ascii"))
    assert command("generate", finished, "--prompt", "-", *options).out == from_file.out
    assert from_file.code == 0


def test_inspect_prints_numbers_and_writes_a_page(
    command: Run, finished: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the page needs the extra `plot`")
    text, page = tmp_path / "book.txt", tmp_path / "report.html"
    text.write_bytes("“Call me”\r\nIshmael, Ishmael, Ishmael. ".encode() * 3)
    page.write_text("earlier")
    options = ["--data", corpus.path, "--borders", 30, 3, "--token", 5, 60, "--spread", 2]
    done = command("inspect", finished, text, "--out", page, "--against", finished, *options, "--json")
    assert (done.code, done.err) == (0, f"the page is in {page}\n")
    content = "“Call me”\nIshmael, Ishmael, Ishmael. " * 3
    found = inspect_text(*load(finished), content, tokens=[5, 60], spread=2)
    names = {"name": str(finished), "against_name": str(finished), "text_name": "book.txt"}
    expected = InspectionReport(found, found, ByFrequency(corpus, (30, 3)), **names).to_dict()
    assert json.loads(done.out) == json.loads(json.dumps(expected))
    assert "“Call me”" in page.read_text(encoding="utf-8")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes()), encoding="ascii"))
    done = command("inspect", finished, "-", "--spread", 0)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{found}\n"
    assert "without compressed memory" in done.out


def test_inspect_reads_raw_bytes_with_a_model_of_bytes(command: Run, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"\xff\x00 caf\xe9 \xf0\x9f")
    done = command("inspect", finished, tmp_path / "raw", "--json")
    assert done.code == 0
    (run,) = json.loads(done.out)["runs"]
    expected = Stream(*load(finished)).score(b"\xff\x00 caf\xe9 \xf0\x9f").tolist()
    assert run["nats"] == pytest.approx(expected, abs=1e-4)
    assert run["text"] == "\N{REPLACEMENT CHARACTER}\x00 caf\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("content", [None, ""])
def test_generate_without_a_prompt_begins_a_document(
    command: Run, finished: Path, tmp_path: Path, content: str | None
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(content or "")
    options = [] if content is None else ["--prompt", prompt]
    done = command("generate", finished, *options, "--tokens", 5, "--temperature", 0)
    assert (done.code, done.out) == (0, Stream(*load(finished)).write(5, temperature=0) + "\n")


def test_recipes_in_configs_can_be_read(command: Run, corpus: Corpus, tmp_path: Path) -> None:
    recipes = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))
    assert recipes
    for recipe in recipes:
        # Checked as far as a wrong number of ids, which is the last thing before training.
        with torch.device("meta"):
            done = command("train", recipe, corpus.path, tmp_path / "run", "--set", "model.vocab_size=300000")
        assert_failed(done, "vocab_size (300000) must be 257")
    assert not list(tmp_path.iterdir())


# --- plugins ---


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    """A file that registers a compression function, which is forgotten after the test."""
    known = dict(COMPRESSIONS)
    path = tmp_path / "mine.py"
    path.write_text(
        "import compressive_transformer as ct\n"
        "class First(ct.Compression):\n"
        "    def forward(self, evicted):\n"
        "        return evicted[:, :, 0]\n"
        'ct.COMPRESSIONS["first"] = First\n'
    )
    yield path
    for name in COMPRESSIONS.keys() - known.keys():
        del COMPRESSIONS[name]


def test_a_plugin_registers_a_function_for_all_commands(
    command: Run, plugin: Path, config: Path, corpus: Corpus, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train = ["train", config, corpus.path, run, "--set", "model.compression=first", "--set", "train.steps=3"]
    unknown = 'COMPRESSIONS["first"] = YourClass before the model is built or loaded; commands take the file that does'
    assert_failed(command(*train), unknown)
    assert command("--plugin", plugin, *train).code == 0
    for use in (["evaluate", run, corpus.path], ["generate", run, "--tokens", 3]):
        del COMPRESSIONS["first"]
        done = command(*use)
        assert_failed(done, "run/config.json: compression ('first') is not a registered compression function; known: m")
        assert unknown in done.err
        done = command(f"--plugin={plugin}", *use)
        assert (done.code, bool(done.out)) == (0, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "mine.py: no such file; expected a Python file"),
        ("x = 1\nx.y\n", "mine.py, line 2: AttributeError: 'int' object has no attribute 'y'"),
        ("x = (\n", "mine.py: SyntaxError: '(' was never closed"),
    ],
)
def test_a_failing_plugin_is_named_in_one_line(command: Run, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    assert_failed(command("--plugin", path, "demo"), f"--plugin {tmp_path}/{message}")
    assert_failed(command("--plugin"), "--plugin needs the path of a Python file")


def test_a_plugin_must_be_a_python_file(command: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x = 1")
    assert_failed(command("--plugin", tmp_path / "mine.txt", "demo"), "its name must end in .py")


# --- help and wrong usage ---


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_argument(command: Run, name: str) -> None:
    done = command(name, "--help")
    assert (done.code, done.err) == (0, "")
    function = COMMANDS[name]
    # Options that commands share, or that belong together.
    groups = {"split": SplitOptions, "metrics": MetricOptions, "sampling": Sampling}
    groups |= {"chosen": Chosen, "frequency": Frequency, "limits": Limits}
    for argument in function.__annotations__:
        if argument in groups and (argument, name) != ("split", "recall"):
            assert all(f"--{field.replace('_', '-')}" in done.out for field in groups[argument].__dataclass_fields__)
        elif argument != "return":
            shown = {
                "settings": "--set",
                "plan": "PLAN",
                "source": "SOURCE",
                "config": "CONFIG",
                "data": "DATA",
                "run": "RUN",
            }
            shown |= {"first": "FIRST", "second": "SECOND", "document": "TEXT"}
            out = argument == "out" and name in ("prepare", "experiment", "export")
            flag = "OUT" if out else f"--{argument.replace('_', '-')}"
            assert shown.get(argument, flag) in done.out, argument
    assert function.__doc__ is not None
    assert function.__doc__.splitlines()[0].split(",")[0][:40] in " ".join(done.out.split())


def test_help_names_every_command(command: Run) -> None:
    done = command("--help")
    assert done.code == 0
    assert all(name in done.out for name in COMMANDS)
    assert "--plugin FILE.py" in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["train"],
        ["train", "config.toml", "data"],
        ["train", "config.toml", "data", "run", "--steps", "3"],
        ["evaluate", "run", "data", "--batch-size", "many"],
        ["evaluate", "run", "data", "--memory-length", "64,many"],
        ["evaluate", "run", "data", "--memory-length", ""],
        ["generate", "run", "more"],
        ["prepare", "books", "data", "--holdout", "1.5"],
    ],
)
def test_wrong_usage_exits_with_2_and_writes_nothing(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err
    assert not list(tmp_path.iterdir())


# --- failures: one line, and nothing left ---


def books(folder: Path, **texts: bytes) -> Path:
    folder.mkdir()
    for name, content in texts.items():
        (folder / f"{name}.txt").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (None, [], "no source at"),
        ({}, [], "has no .txt, .jsonl or .parquet files"),
        ({"a": b"a", "b": b"", "c": b"c"}, [], "b.txt is empty"),
        ({"a": b"a", "b": b"caf\xe9", "c": b"c"}, [], "b.txt is not UTF-8 at byte 3"),
        ({"a": b"a"}, [], "too few for validation and test"),
        ({"a": b"a"}, ["--holdout", 2], "holdout (2) must be"),
        ({"a": b"a"}, ["--holdout", 0, "--tokenizer", "gpt2"], "no tokenizer at"),
    ],
)
def test_prepare_refuses(
    command: Run, tmp_path: Path, texts: dict[str, bytes] | None, options: list[Any], message: str
) -> None:
    source = tmp_path / "books" if texts is None else books(tmp_path / "books", **texts)
    before = tree(tmp_path)
    assert_failed(command("prepare", source, tmp_path / "new/data", *options), message)
    assert tree(tmp_path) == before


def replaced(old: str, new: str) -> Callable[[Path], object]:
    return lambda config: config.write_text(config.read_text().replace(old, new))


def nothing(config: Path) -> None:
    """No change to the config."""


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda config: config.unlink(), [], "config.toml: not a readable TOML file"),
        (lambda config: config.write_bytes(b"\xff"), [], "config.toml: not a readable TOML file"),
        (replaced("[model]", "[model"), [], "config.toml: not a readable TOML file"),
        (replaced("[model]", "[modell]"), [], "config.toml: unknown table or field 'modell'"),
        (replaced("d_model", "d_modle"), [], "model: unknown field 'd_modle'; did you mean d_model?"),
        (replaced("n_heads = 2", "n_heads = 3"), [], "model: n_heads (3) must divide d_model (16)"),
        (replaced("segment_length = 8", "segment_length = 0"), [], "segment_length (0) must be 1 or more"),
        (replaced("batch_size = 4", 'batch_size = "4"'), [], "train: batch_size ('4') must be of type int"),
        (nothing, ["--set", "model.memory_length=[1,2,3]"], "model: memory_length ([1, 2, 3]) must be one number, or"),
        (nothing, ["--set", "model.memory_length=1,2"], "model: memory_length ('1,2') must be of type int, or a list"),
        (nothing, ["--set", "model.compression=zip"], "compression ('zip') is not a registered"),
        (nothing, ["--set", "compression=mean"], "--set compression=mean: expected model.FIELD=VALUE"),
        (nothing, ["--set", "model.compression"], "--set model.compression: expected model.FIELD=VALUE"),
        (nothing, ["--set", "modle.norm=pre"], "--set modle.norm=pre: expected"),
        (nothing, ["--set", "train.steps=many"], "train: steps ('many') must be of type int"),
        (nothing, ["--set", "train.seed=99999999999999999999"], "must be less than 2**63"),
        (nothing, ["--set", "train.micro_batches=3"], "micro_batches (3) must divide batch_size (4)"),
        (nothing, ["--set", "train.max_document_length=9"], "max_document_length (9) must be a multiple of"),
        (nothing, ["--set", "model.vocab_size=300"], "vocab_size (300) must be 257"),
        (nothing, ["--resume", "latest"], "nothing to resume, no checkpoint was written there"),
        (nothing, ["--stop-at", 0], "stop_at (0) must be 1 or more"),
    ],
)
def test_train_refuses(
    command: Run, config: Path, corpus: Corpus, change: Callable[[Path], object], options: list[Any], message: str
) -> None:
    change(config)
    before = tree(config.parent)
    assert_failed(command("train", config, corpus.path, config.parent / "new/run", *options), message)
    assert tree(config.parent) == before


def test_train_needs_a_corpus(command: Run, config: Path, tmp_path: Path) -> None:
    done = command("train", config, tmp_path / "none", tmp_path / "run")
    assert_failed(done, "none: make one with `compressive prepare SOURCE")
    assert not (tmp_path / "run").exists()


def test_train_needs_a_split_to_validate_on(command: Run, config: Path, tmp_path: Path) -> None:
    data = prepare(books(tmp_path / "books", a=b"some text"), tmp_path / "data", holdout=0).path
    assert_failed(command("train", config, data, tmp_path / "run"), "has no validation split")
    assert not (tmp_path / "run").exists()
    never = ["--set", "train.validate_every=0", "--set", "train.steps=2"]
    assert command("train", config, data, tmp_path / "run", *never).code == 0


def test_train_leaves_an_existing_run_alone(command: Run, config: Path, finished: Path, corpus: Corpus) -> None:
    before = tree(finished)
    done = command("train", config, corpus.path, finished)
    assert_failed(done, "exists already; choose another folder, or resume it with --resume latest")
    assert tree(finished) == before


def test_train_resumed_with_another_setting_names_the_field(
    command: Run, config: Path, finished: Path, corpus: Corpus
) -> None:
    before = tree(finished)
    options = ["--set", "model.dropout=0.1", "--set", "train.max_grad_norm=0.2"]
    done = command("train", config, corpus.path, finished, "--resume", "latest", *options)
    assert_failed(done, "cannot resume, train.max_grad_norm was 0.1 and is 0.2 now; set it back, or start a new run")
    assert tree(finished) == before


def cut(run: Path) -> None:
    content = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(content[:-100])


def reshape(run: Path) -> None:
    tensors = load_file(run / "model.safetensors")
    save_file({**tensors, "final_norm.bias": torch.zeros(3)}, run / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "run: no such folder; expected a run"),
        (cut, "model.safetensors: not a readable safetensors file"),
        (reshape, "model.safetensors: tensor 'final_norm.bias' has shape [3], the config says [16]"),
        (lambda run: (run / "config.json").write_text("{"), "config.json: not a readable JSON file"),
        (lambda run: (run / "tokenizer.json").unlink(), "no tokenizer at"),
    ],
)
def test_evaluate_and_generate_refuse_a_damaged_run(
    command: Run, finished: Path, corpus: Corpus, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("resume"))
    damage(run)
    assert_failed(command("evaluate", run, corpus.path), message)
    assert_failed(command("generate", run), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "valid"], "has no valid split: it has train, validation, test"),
        (["--batch-size", 0], "batch_size (0) must be at least"),
        (["--tokens", -1], "tokens (-1) must be 1 or more"),
        (["--memory-length", -1], "memory_length (-1) must be 0 or more"),
        (["--memory-length", "-1,3"], "memory_length ((-1, 3)) must be 0 or more in each layer"),
        (["--compressed-length", "1,2,3"], "compressed_length ((1, 2, 3)) must be one number, or a list with one"),
    ],
)
def test_evaluate_refuses(command: Run, finished: Path, corpus: Corpus, options: list[Any], message: str) -> None:
    assert_failed(command("evaluate", finished, corpus.path, *options), message)


def test_options_of_a_group_are_refused_in_one_line(command: Run) -> None:
    assert_failed(command("serve", "run", "--resident", 0), "resident (0) must be more than 0")


def test_pickled_weights_are_refused(command: Run, corpus: Corpus, tmp_path: Path) -> None:
    pickled = tmp_path / "model.pt"
    torch.save({}, pickled)
    assert_failed(command("generate", pickled), "model.pt: pickled weights are never loaded")
    assert_failed(command("evaluate", pickled, corpus.path), "model.pt: pickled weights are never loaded")


def test_evaluate_refuses_a_missing_split(command: Run, finished: Path, tmp_path: Path) -> None:
    data = prepare(books(tmp_path / "books", a=b"some text"), tmp_path / "data", holdout=0).path
    assert_failed(command("evaluate", finished, data, "--split", "test"), "has no test split: it has train")


def test_evaluate_refuses_a_corpus_of_another_tokenizer(command: Run, finished: Path, tmp_path: Path) -> None:
    source = books(tmp_path / "books", a=b"some text, some text")
    data = prepare(source, tmp_path / "data", holdout=0, tokenizer="bpe", vocab_size=260).path
    done = command("evaluate", finished, data, "--split", "train")
    assert_failed(done, "the corpus has 260 token ids, the model 257; prepare the corpus with the tokenizer")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "prompt.txt: No such file or directory"),
        (b"caf\xe9", [], "prompt.txt: not UTF-8 at byte 3; convert it first"),
        (b"text", ["--tokens", 0], "tokens (0) must be 1 or more"),
        (b"text", ["--temperature", -1], "temperature (-1.0) must be"),
        (b"text", ["--top-p", 0], "top_p (0.0) must be more than 0"),
        (b"text", ["--top-k", -1], "top_k (-1) must be"),
        (b"text", ["--seed", 2**64], "seed (18446744073709551616) must be"),
        (b"text", ["--stop", ""], "stop must have at least one character"),
    ],
)
def test_generate_refuses(
    command: Run, finished: Path, tmp_path: Path, content: bytes | None, options: list[Any], message: str
) -> None:
    prompt = tmp_path / "prompt.txt"
    if content is not None:
        prompt.write_bytes(content)
    assert_failed(command("generate", finished, "--prompt", prompt, *options), message)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "book.txt: No such file or directory"),
        (b"", [], "book.txt: empty; expected a text to read"),
        (b"text", ["--token", 4], "token (4) must lie in 0 .. 3"),
        (b"text", ["--spread", -1], "spread (-1) must be 0 or more"),
        (b"text", ["--borders", 3], "--borders needs a corpus that counts words: add --data CORPUS"),
        (b"text", ["--data", "nowhere"], "nowhere"),
        (b"text", ["--against", "nowhere"], "nowhere: no such folder; expected a run"),
        (b"text", ["--against", "sound"], "sound is a model of sound; choose a model of text"),
        (b"caf\xe9", ["--against", "bpe"], "book.txt: not UTF-8 at byte 3; convert it first, or inspect a model"),
        (b"text", ["--out", "."], ". is a folder: give the page a name, such as report.html"),
        (b"text", ["--out", "nowhere/report.html"], "the folder nowhere does not exist; create it first"),
    ],
)
def test_inspect_refuses(
    command: Run,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    options: list[Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    bpe = train_bpe(["some text"], 260)
    for name, tokenizer in {"sound": MuLawTokenizer(8000), "bpe": bpe}.items():
        if name in options:
            save(name, tiny_model(vocab_size=tokenizer.vocab_size), tokenizer)
    if content is not None:
        Path("book.txt").write_bytes(content)
    before = tree(tmp_path)
    assert_failed(command("inspect", finished, "book.txt", *options), message)
    assert tree(tmp_path) == before


def test_an_interrupted_inspect_leaves_an_earlier_page(
    command: Run, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "book.txt").write_text("text")
    (tmp_path / "report.html").write_text("earlier")
    monkeypatch.setattr(sys.modules["compressive_transformer.cli.inspect"], "inspect_text", interrupt)
    done = command("inspect", finished, tmp_path / "book.txt", "--out", tmp_path / "report.html")
    assert_failed(done, "interrupted; nothing was written")
    assert (tmp_path / "report.html").read_text() == "earlier"


def test_an_interruption_is_one_line(
    command: Run, config: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["compressive_transformer.cli.train"], "train_model", interrupt)
    done = command("train", config, corpus.path, config.parent / "run")
    assert_failed(done, "interrupted; `compressive train --resume latest` continues from the last checkpoint")


# --- as a real program ---


def test_a_failure_prints_one_line_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "compressive_transformer.cli", "prepare", tmp_path / "none", tmp_path / "data"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"compressive: no source at {tmp_path / 'none'}")
    assert not list(tmp_path.iterdir())


def test_a_closed_stdout_ends_without_a_traceback(finished: Path) -> None:
    with program("generate", finished, "--tokens", "100000") as running:
        assert running.stdout.read(1)
        running.stdout.close()
        assert running.wait() == 1
        assert running.stderr.read() == b""
