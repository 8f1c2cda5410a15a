"""Where documents come from: folders of text, JSON lines, Hugging Face datasets, and sources with a prefix.

Text is read in universal-newline mode: CRLF and CR become LF.
"""

from __future__ import annotations

import csv
import importlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CompressiveError
from .audio import audio
from .benchmarks import enwik8, wikitext
from .documents import WHOLE, Parts, Source, Text
from .passkey import passkey
from .reading import SPLITS
from .synthetic import recall

PREFIXES = (
    "hf:NAME",
    "enwik8:FILE",
    "wikitext:FOLDER",
    "audio:FOLDER",
    "recall:LEAST-GREATEST",
    "passkey:SOURCE:LEAST-GREATEST",
)


def open_source(source: str | Path, *, holdout: int, field: str) -> Source:
    """The documents of what `prepare` may be given, not read yet.

    Raises CompressiveError where there is nothing to read.
    """
    if holdout < 0 or holdout in (1, 2):
        raise CompressiveError(
            f"holdout ({holdout}) must be 0 (all documents are for training) or at least 3"
            " (of so many documents one is for validation and one for test)"
        )
    prefix, colon, rest = source.partition(":") if isinstance(source, str) else ("", "", "")
    match prefix if colon else "":
        case "hf":
            return _dataset(rest, field, holdout)
        case "enwik8":
            return enwik8(Path(rest))
        case "wikitext":
            return wikitext(Path(rest))
        case "audio":
            return audio(Path(rest), holdout)
        case "recall":
            return recall(rest)
        case "passkey":
            return passkey(rest, partial(open_source, holdout=holdout, field=field))
    path = Path(source)
    if path.is_dir():
        titles, benchmark = _read_metadata(path / "metadata.csv")
        return Source(path.resolve().name, _folder_parts(path, field, titles), holdout, benchmark=benchmark)
    if not path.is_file():
        raise CompressiveError(
            f"no source at {path}: give a folder, a .txt or .jsonl file, or one of {', '.join(PREFIXES)}"
        )
    if path.suffix == ".jsonl":
        return Source(path.name, {WHOLE: partial(_read_lines, path, field)}, holdout)
    if path.suffix == ".txt":
        return Source(path.name, {WHOLE: partial(_read_files, [path], {})}, holdout)
    raise CompressiveError(f"{path} must be a .txt or .jsonl file, or a folder: rename it if it is text")


def _folder_parts(folder: Path, field: str, titles: Mapping[str, str]) -> Parts:
    folders = {name: folder / name for name in SPLITS if (folder / name).is_dir()}
    files = {name: folder / f"{name}.jsonl" for name in SPLITS if (folder / f"{name}.jsonl").is_file()}
    if folders and files:
        raise CompressiveError(
            f"{folder} has both {next(iter(folders))}/ and {next(iter(files.values())).name}: leave one kind"
        )
    if not folders and not files:
        return {WHOLE: partial(_read_files, _text_files(folder), titles)}
    if "train" not in (folders or files):
        raise CompressiveError(f"{folder} has {', '.join(folders or files)} but no train: add it or rename")
    if folders:
        return {name: partial(_read_files, _text_files(part), titles) for name, part in folders.items()}
    return {name: partial(_read_lines, file, field) for name, file in files.items()}


def _text_files(folder: Path) -> list[Path]:
    """The `*.txt` files at any depth, sorted by name."""
    files = sorted((file for file in folder.rglob("*") if file.is_file()), key=Path.as_posix)
    texts = [file for file in files if file.suffix == ".txt"]
    if not texts:
        suffixes = Counter(file.suffix or "no suffix" for file in files)
        found = ", ".join(f"{count} with {suffix}" for suffix, count in sorted(suffixes.items()))
        raise CompressiveError(
            f"{folder} has no *.txt files ({found or 'it has no files'}): rename the text files to .txt,"
            " or give .jsonl files"
        )
    return texts


def _read_metadata(metadata: Path) -> tuple[dict[str, str], str]:
    """Titles by file stem, and the benchmark, from a metadata.csv as PG-19 has it: id, title, date, link; no header."""
    if not metadata.is_file():
        return {}, ""
    try:
        with metadata.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CompressiveError(f"{metadata} must be a CSV file of id, title, date, link: {error}") from error
    gutenberg = any("gutenberg.org" in row[3] for row in rows if len(row) >= 4)
    return {row[0]: row[1] for row in rows if len(row) >= 2}, "PG-19" if gutenberg else ""


def _read_files(files: Iterable[Path], titles: Mapping[str, str]) -> Iterator[Text]:
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8")
        except OSError as error:
            raise CompressiveError(f"cannot read {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise CompressiveError(
                f"{file} is not UTF-8 at byte {error.start}: convert it to UTF-8 or take it out"
            ) from error
        yield _text(titles.get(file.stem, file.stem), text, str(file))


def _read_lines(file: Path, field: str) -> Iterator[Text]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _read_line(line, field, place=f"{file}, line {number}", title=f"{file.stem}:{number}")
    except OSError as error:
        raise CompressiveError(f"cannot read {file}: {error.strerror}") from error


def _read_line(line: bytes, field: str, *, place: str, title: str) -> Text:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CompressiveError(f"{place} is not JSON in UTF-8 ({error}): one record a line is expected") from error
    if not isinstance(record, dict):
        raise CompressiveError(f'{place} must be a record such as {{"{field}": "..."}}')
    return _read_record(record, field, place=place, title=title)


def _read_record(record: Mapping[str, Any], field: str, *, place: str, title: str) -> Text:
    if field not in record:
        raise CompressiveError(
            f"{place} has no field {field!r}, it has {', '.join(map(str, record)) or 'none'}:"
            " name the one that holds the text"
        )
    if not isinstance(record[field], str):
        raise CompressiveError(f"{place}: field {field!r} must be text, not {type(record[field]).__name__}")
    # PG-19 as a dataset calls it short_book_title.
    given = record.get("title") or record.get("short_book_title")
    return _text(given if isinstance(given, str) else title, record[field], place)


def _dataset(dataset: str, field: str, holdout: int) -> Source:
    name = Path(dataset).resolve().name if Path(dataset).exists() else dataset
    benchmark = "PG-19" if "pg19" in name.lower().replace("-", "") else ""
    return Source(f"hf:{name}", _dataset_parts(dataset, field), holdout, benchmark=benchmark)


def _dataset_parts(name: str, field: str) -> Parts:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise CompressiveError(
            "reading hf: sources needs the library datasets: pip install 'compressive-transformer[data]'"
        ) from error
    try:
        splits = datasets.load_dataset(name, streaming=True)
        names = list(splits)
    except Exception as error:  # the library raises whatever its parts raise
        raise CompressiveError(f"cannot load the dataset {name}: {_first_line(error)}") from error
    if "train" not in names:
        raise CompressiveError(f"the dataset {name} must have a split train, it has {', '.join(map(str, names))}")
    return {split: partial(_read_dataset, splits[split], split, field) for split in SPLITS if split in names}


def _read_dataset(records: Iterable[Mapping[str, Any]], split: str, field: str) -> Iterator[Text]:
    try:
        for number, record in enumerate(records):
            title = f"{split}:{number}"
            yield _read_record(record, field, place=f"record {number} of {split}", title=title)
    except CompressiveError:
        raise
    except Exception as error:  # the library raises whatever its parts raise
        raise CompressiveError(f"cannot read {split} of the dataset: {_first_line(error)}") from error


def _text(title: str, text: str, place: str) -> Text:
    if not text:
        raise CompressiveError(f"{place} is empty: take it out, a document must have text")
    return Text(title, text.replace("\r\n", "\n").replace("\r", "\n"), place)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
