"""Prepare writes the same corpus with any number of processes and after any interruption."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from compressive_transformer.data import pool as workers
from compressive_transformer.data import prepare
from compressive_transformer.data.tokenizers import ByteTokenizer
from compressive_transformer.data.writer import CorpusFiles, Encoded
from compressive_transformer.errors import CompressiveError
from compressive_transformer.progress import Progress

# The package has the function under this name.
prepare_module = importlib.import_module("compressive_transformer.data.prepare")

SAMPLE = Path(str(files("compressive_transformer.apps.demo") / "sample"))
BOOK = (SAMPLE / "train/11.txt").read_text(encoding="utf-8")
# Of very different lengths, some without anything but spaces; cut within words.
TEXTS = [
    BOOK[start : start + length] for start, length in zip(range(900, 9000, 700), [1, 2000, 3, 40] * 3, strict=True)
]


def write_lines(file: Path, texts: list[str], field: str = "text") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return file


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# --- several processes ---


def test_several_processes_write_the_same_files_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHARACTERS", 50)
    source = write_lines(tmp_path / "texts.jsonl", TEXTS)
    options: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": 300}
    one = prepare(source, tmp_path / "one", processes=1, **options)
    two = prepare(source, tmp_path / "two", processes=2, **options)
    assert contents(one.path) == contents(two.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "texts.jsonl", "two"]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_error_is_that_of_the_first_wrong_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(workers, "CHARACTERS", 2100)
    source = write_lines(tmp_path / "texts.jsonl", [*TEXTS[:5], "a lone \ud800", TEXTS[5]])
    with source.open("a") as file:
        file.write("not JSON\n")
    with pytest.raises(CompressiveError, match=r"texts\.jsonl, line 6: character 7 \(U\+D800\) is a lone surrogate"):
        prepare(source, tmp_path / "data", processes=processes)
    assert list(tmp_path.iterdir()) == [source]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started in a test."""
    processes: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return processes


class Interrupted:
    """Records that are interrupted while they are read, as Ctrl-C does it."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in TEXTS)
        raise KeyboardInterrupt


def test_an_interruption_ends_the_processes_and_leaves_nothing(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(Interrupted(), tmp_path / "new" / "data", processes=2)  # type: ignore[arg-type]
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)
    assert not list(tmp_path.iterdir())


def test_a_killed_worker_is_reported(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    ByteTokenizer().save(tmp_path / "tokenizer.json")

    def texts() -> Iterator[Any]:
        for process in started:
            process.kill()
        yield from ()

    with pytest.raises(CompressiveError, match=r"an encoder process was killed by SIGKILL \(out of memory\?\)"):
        list(workers.encode_all(texts(), ByteTokenizer(), tmp_path / "tokenizer.json", processes=2))


def test_processes_are_at_least_one_and_one_for_small_or_quick_sources(tmp_path: Path) -> None:
    with pytest.raises(CompressiveError, match=r"processes \(0\) must be 1 or more"):
        prepare(SAMPLE, tmp_path / "data", processes=0)
    assert workers.default_processes(ByteTokenizer(), 10**12) == 1


# --- resuming ---


class Ended(BaseException):
    """An end that nobody expects."""


def end_after(documents: int, source: Any, out: Path, **options: Any) -> None:
    """Call `prepare`, which ends after so many documents; each was saved, and one more appended."""
    add = CorpusFiles.add
    left = documents

    def add_or_end(self: CorpusFiles, encoded: Encoded) -> None:
        nonlocal left
        add(self, encoded)
        if not left:
            self.state()  # on disk, but not saved
            raise Ended
        left -= 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CorpusFiles, "add", add_or_end)
        patched.setattr(prepare_module, "SECONDS_BETWEEN_SAVES", 0.0)
        with pytest.raises(Ended):
            prepare(source, out, **options)
    assert not out.exists()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_resuming_after_any_document_gives_the_same_files(tmp_path: Path, tokenizer: str) -> None:
    source = write_lines(tmp_path / "texts.jsonl", TEXTS)
    options: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": 270, "holdout": 4}
    whole = prepare(source, tmp_path / "whole", **options)
    for ends in ([0], [1], [3, 2], [0, 4, 0], [len(TEXTS) - 1]):
        out = tmp_path / "-".join(map(str, ends))
        for documents in ends:
            end_after(documents, source, out, **options)
        prepare(source, out, **options)
        assert contents(out) == contents(whole.path)
    assert not list(tmp_path.glob("*.unfinished"))


KILLED = """
import importlib, os, signal, sys
from compressive_transformer.data import prepare
from compressive_transformer.data.writer import CorpusFiles

prepare_module = importlib.import_module("compressive_transformer.data.prepare")

add = CorpusFiles.add

def add_and_end(files, encoded):
    add(files, encoded)
    if files.documents == 5:
        prepare_module.SECONDS_BETWEEN_SAVES = 1000
    if files.documents == 8:
        files.state()  # on disk, but not saved
        os.kill(os.getpid(), signal.SIGKILL)

CorpusFiles.add = add_and_end
prepare_module.SECONDS_BETWEEN_SAVES = 0
prepare(sys.argv[1], sys.argv[2], tokenizer="bpe", vocab_size=300)
"""


def test_resuming_after_a_kill_gives_the_same_files(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", TEXTS)
    whole = prepare(source, tmp_path / "whole", tokenizer="bpe", vocab_size=300)
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.unfinished", "texts.jsonl", "whole"]
    (tmp_path / "data.unfinished" / ".unfinished.json.0123").write_text("{")  # killed while a state was written
    said: list[str] = []
    data = prepare(source, tmp_path / "data", tokenizer="bpe", vocab_size=300, progress=said.append)
    assert said[0] == "resuming after 5 documents"
    assert contents(data.path) == contents(whole.path)
    assert not (tmp_path / "data.unfinished").exists()


def interrupt(source: Any, out: Path, **options: Any) -> Path:
    """The folder that an interrupted call leaves."""
    said: list[str] = []
    end_after(3, source, out, progress=said.append, **options)
    folder = out.with_name(f"{out.name}.unfinished")
    assert said[-1] == f"progress is saved in {folder}; run the same command to resume"
    return folder


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"holdout": 5}, "holdout"),
        ({"field": "body"}, "field"),
        ({"tokenizer": "bpe", "holdout": 5}, "tokenizer and holdout"),
    ],
    ids=str,
)
def test_resuming_with_other_options_is_refused(tmp_path: Path, changed: dict[str, Any], what: str) -> None:
    source = write_lines(tmp_path / "texts.jsonl", TEXTS)
    folder = interrupt(source, tmp_path / "data")
    before = contents(folder)
    with pytest.raises(CompressiveError, match=rf"data\.unfinished was started with another {what}: give"):
        prepare(source, tmp_path / "data", **changed)
    assert contents(folder) == before
    assert not (tmp_path / "data").exists()


def test_resuming_with_another_source_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", TEXTS)
    interrupt(source, tmp_path / "data")
    write_lines(source, [*TEXTS[:-1], TEXTS[-1].swapcase()])  # of the same size
    with pytest.raises(CompressiveError, match=r"started with another source: give the same to resume, or remove it"):
        prepare(source, tmp_path / "data")

    records = [{"text": text} for text in TEXTS]
    interrupt(records, tmp_path / "records")
    changed = [{"text": TEXTS[0]}, {"text": TEXTS[1].swapcase()}, *records[2:]]
    with pytest.raises(CompressiveError, match=r"records changed since .*records\.unfinished was started: remove"):
        prepare(changed, tmp_path / "records")
    with pytest.raises(CompressiveError, match="records changed since"):
        prepare(records[:2], tmp_path / "records")
    assert contents(prepare(records, tmp_path / "records").path) == contents(prepare(records, tmp_path / "again").path)


@pytest.mark.parametrize("name", ["train.bin", "documents.jsonl", "unfinished.json"])
@pytest.mark.parametrize("change", [lambda content: content[:100], lambda content: content.replace(b"e", b"f", 1)])
def test_resuming_from_damaged_files_is_refused(tmp_path: Path, name: str, change: Any) -> None:
    source = write_lines(tmp_path / "texts.jsonl", TEXTS)
    folder = interrupt(source, tmp_path / "data", holdout=0)
    damaged = change((folder / name).read_bytes())
    (folder / name).write_bytes(damaged)
    with pytest.raises(CompressiveError, match=r"data\.unfinished is damaged: remove it to start over"):
        prepare(source, tmp_path / "data", holdout=0)
    assert (folder / name).read_bytes() == damaged


def test_names_in_a_state_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", TEXTS)
    folder = interrupt(source, tmp_path / "data", holdout=0)
    (tmp_path / "victim.bin").write_bytes(b"not ours")
    content = json.loads((folder / "unfinished.json").read_text())
    content["state"]["splits"]["../victim"] = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    (folder / "unfinished.json").write_text(json.dumps(content))
    with pytest.raises(CompressiveError, match=r"data\.unfinished is damaged: remove it to start over"):
        prepare(source, tmp_path / "data", holdout=0)
    assert (tmp_path / "victim.bin").read_bytes() == b"not ours"


def test_work_that_was_never_saved_starts_over(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", TEXTS)
    whole = prepare(source, tmp_path / "whole", holdout=0)
    folder = tmp_path / "data.unfinished"
    folder.mkdir()
    for name in ("prepare.lock", "train.bin", "test.bin", "documents.jsonl", "tokenizer.json", "documents.json"):
        (folder / name).write_text("half")
    assert contents(prepare(source, tmp_path / "data", holdout=0).path) == contents(whole.path)


def test_a_staging_folder_has_one_process_and_foreign_ones_are_kept(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", TEXTS)
    folder = tmp_path / "data.unfinished"
    folder.mkdir()
    (folder / "letters").write_text("mine")
    with pytest.raises(CompressiveError, match=r"data\.unfinished exists, and no earlier prepare left it: remove it"):
        prepare(source, tmp_path / "data")
    with (folder / "prepare.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CompressiveError, match=r"data\.unfinished: another process is using it; wait"):
            prepare(source, tmp_path / "data")
    assert (folder / "letters").read_text() == "mine"


# --- progress ---


def test_progress_counts_bytes_of_files_and_documents_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "Progress", partial(Progress, seconds=0))
    source = write_lines(tmp_path / "texts.jsonl", ["one two", "three four"] * 2)
    said: list[str] = []
    prepare(source, tmp_path / "data", holdout=0, progress=said.append)
    lengths = [len(line) for line in source.read_bytes().splitlines(True)]
    for number, line in enumerate(said[:4], start=1):
        assert line.startswith(f"{sum(lengths[:number])} of {sum(lengths)} bytes, ETA 0:00:0"), line
        assert f"; train: {number} documents, " in line
    assert said[4] == "train: 4 documents, 34 tokens, 8 words"
    said.clear()
    prepare([{"text": "one two"}] * 3, tmp_path / "records", holdout=0, progress=said.append)
    assert [line.split(",")[0] for line in said[:3]] == ["1 documents", "2 documents", "3 documents"]
    assert said[3:] == ["train: 3 documents, 21 tokens, 6 words"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_for_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE" if terminal else "UNSET", "1")
    prepare(write_lines(tmp_path / "texts.jsonl", TEXTS), tmp_path / "data", progress=True)
    said = capsys.readouterr()
    assert said.out == ""
    for line in ("train: 9 documents, ", "validation: 2 documents, 2,040 tokens, ", "test: 1 documents, 3 tokens, "):
        assert line in said.err
    assert ("ETA" in said.err) == ("\x1b" in said.err) == terminal
