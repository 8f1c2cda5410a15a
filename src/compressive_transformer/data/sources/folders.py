"""Files of text, JSON lines or Parquet, and folders of them with their splits."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from ...errors import CompressiveError
from ..corpus import SPLITS
from .compressed import COMPRESSED, name_and_kind
from .parquet import read_tables
from .source import WHOLE, Source, Text
from .text import read_lines, read_texts

# As train.jsonl, or as the Hub cuts large splits into files.
SPLIT_FILE = re.compile(rf"({'|'.join(SPLITS)})(?:-\d+-of-\d+)?")


def file_source(file: Path, *, holdout: int, field: str) -> Source:
    """The documents of one file. Raises CompressiveError where its name does not say that it is text."""
    if not _kind(file):
        raise CompressiveError(
            f"{file} must be a .txt or .jsonl file (maybe compressed: .gz or .zst after it), a .parquet file, or a"
            " folder: rename it if it is text"
        )
    return Source(file.name, {WHOLE: partial(_read, [file], field, {})}, holdout, files=(file,))


def folder_source(folder: Path, *, holdout: int, field: str) -> Source:
    """The documents of a folder, in splits where it has such.

    Raises CompressiveError where there are none, where there are files of several kinds, and where train is missing.
    """
    titles, benchmark = _read_metadata(folder / "metadata.csv")
    folders = {name: folder / name for name in SPLITS if (folder / name).is_dir()}
    parts = _split_files(folder)
    if folders and parts:
        raise CompressiveError(
            f"{folder} has both {next(iter(folders))}/ and {next(iter(parts.values()))[0].name}: leave one kind"
        )
    parts = parts or {name: _files_below(part) for name, part in (folders or {WHOLE: folder}).items()}
    if not parts.keys() & {WHOLE, "train"}:
        raise CompressiveError(f"{folder} has {', '.join(parts)} but no train: add it or rename")
    for found in parts.values():
        _check_one_kind(folder, found)
    return Source(
        folder.resolve().name,
        {name: partial(_read, found, field, titles) for name, found in parts.items()},
        holdout,
        benchmark=benchmark,
        files=tuple(file for found in parts.values() for file in found),
    )


def _kind(file: Path) -> str:
    """ ".txt", ".jsonl" or ".parquet"; "" for a file of something else."""
    name, kind = name_and_kind(file)
    # Parquet compresses its columns itself.
    known = kind in (".txt", ".jsonl") or (kind == ".parquet" and file.suffix not in COMPRESSED)
    return kind if name and known else ""


def _read(files: Sequence[Path], field: str, titles: Mapping[str, str]) -> Iterator[Text]:
    match _kind(files[0]):
        case ".jsonl":
            return read_lines(files, field)
        case ".parquet":
            return read_tables(files, field)
    return read_texts(files, titles)


def _split_files(folder: Path) -> dict[str, list[Path]]:
    """Files of records in the folder itself that are named after splits, by split."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir(), key=Path.as_posix):
        named = SPLIT_FILE.fullmatch(name_and_kind(file)[0])
        if named and _kind(file) in (".jsonl", ".parquet") and file.is_file():
            found.setdefault(named[1], []).append(file)
    return {name: found[name] for name in SPLITS if name in found}


def _files_below(folder: Path) -> list[Path]:
    """The files of documents at any depth, sorted by name."""
    files = sorted((file for file in folder.rglob("*") if file.is_file()), key=Path.as_posix)
    known = [file for file in files if _kind(file)]
    if not known:
        suffixes = Counter(file.suffix or "no suffix" for file in files)
        found = ", ".join(f"{count} with {suffix}" for suffix, count in sorted(suffixes.items()))
        raise CompressiveError(
            f"{folder} has no *.txt files ({found or 'it has no files'}): rename the text files to .txt,"
            " or give .jsonl or .parquet files"
        )
    return known


def _check_one_kind(folder: Path, files: Sequence[Path]) -> None:
    """Raise CompressiveError for files of several kinds, and for a file beside its own compressed form."""
    kinds: dict[str, Path] = {}
    seen: dict[Path, Path] = {}
    for file in files:
        kinds.setdefault(_kind(file), file)
        plain = file.with_suffix("") if file.suffix in COMPRESSED else file
        if plain in seen:
            raise CompressiveError(f"{folder} has both {seen[plain].name} and {file.name}: leave one of them")
        seen[plain] = file
    if len(kinds) > 1:
        one, other = list(kinds.values())[:2]
        raise CompressiveError(f"{folder} has both {one.name} and {other.name}: leave one kind of files")


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
