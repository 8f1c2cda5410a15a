"""Files of documents in any known format, and folders of them with their splits."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...errors import CompressiveError
from ..corpus import SPLITS
from .parquet import read_parquet
from .source import WHOLE, RawDocument, Source
from .text import COMPRESSED, read_json_lines, read_text, stem_and_suffix


class Reader(NamedTuple):
    """Reader of files of one format."""

    read: Callable[[Path, str], Iterator[RawDocument]]
    """Function that yields the documents of a file; its second argument is the field of the text in records."""
    has_records: bool = True
    """True where a file holds many documents, so that it may be named after a split."""
    compressible: bool = True
    """True where .gz or .zst may follow the suffix."""


READERS = {
    ".txt": Reader(read_text, has_records=False),
    ".jsonl": Reader(read_json_lines),
    ".parquet": Reader(read_parquet, compressible=False),  # it compresses its columns
}
"""The readers by suffix: a new format is a function and a row here."""

METADATA = "metadata.csv"
# For example train.jsonl, or as the Hub divides large splits.
SPLIT_FILE = re.compile(rf"({'|'.join(SPLITS)})(?:-\d+-of-\d+)?")


def list_words(words: Iterable[str]) -> str:
    """Return words as "a, b or c"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


FORMATS = list_words(READERS)
RECORD_FORMATS = list_words(suffix for suffix, reader in READERS.items() if reader.has_records)
COMPRESSION = (
    f"{list_words(suffix for suffix, reader in READERS.items() if reader.compressible)} files may be compressed"
    f" ({list_words(COMPRESSED)} after the name)"
)


def file_source(file: Path, *, holdout: int, field: str) -> Source:
    """Return the documents of one file. Raises CompressiveError for an unknown format."""
    if not _suffix(file):
        raise CompressiveError(f"{file} must be a {FORMATS} file or a folder; {COMPRESSION}: rename it if it is text")
    return Source(file.name, {WHOLE: partial(_read, [file], field, {})}, holdout, files=(file,))


def folder_source(folder: Path, *, holdout: int, field: str) -> Source:
    """Return the documents of a folder, in splits where it has them.

    Raises CompressiveError where there are none, for several formats in one split, and where train is missing.
    """
    titles, benchmark = _read_metadata(folder / METADATA)
    folders = {name: folder / name for name in SPLITS if (folder / name).is_dir()}
    parts = _split_files(folder)
    if folders and parts:
        raise CompressiveError(
            f"{folder} has both {next(iter(folders))}/ and {next(iter(parts.values()))[0].name}: keep one kind"
        )
    parts = parts or {name: _files_below(part) for name, part in (folders or {WHOLE: folder}).items()}
    if not parts.keys() & {WHOLE, "train"}:
        raise CompressiveError(f"{folder} has {', '.join(parts)} but no train: add it or rename")
    for files in parts.values():
        _check_one_format(folder, files)
    return Source(
        folder.resolve().name,
        {name: partial(_read, files, field, titles) for name, files in parts.items()},
        holdout,
        benchmark=benchmark,
        files=tuple(file for files in parts.values() for file in files),
    )


def _suffix(file: Path) -> str:
    """Return the key of `READERS` for a file, "" where no reader knows it."""
    stem, suffix = stem_and_suffix(file)
    reader = READERS.get(suffix)
    return suffix if stem and reader and (reader.compressible or file.suffix not in COMPRESSED) else ""


def _read(files: Sequence[Path], field: str, titles: Mapping[str, str]) -> Iterator[RawDocument]:
    for file in files:
        reader = READERS[_suffix(file)]
        for document in reader.read(file, field):
            title = document.title if reader.has_records else titles.get(document.title, document.title)
            yield document._replace(title=title)


def _split_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of records in the folder that are named after splits, by split."""
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir(), key=Path.as_posix):
        named, suffix = SPLIT_FILE.fullmatch(stem_and_suffix(file)[0]), _suffix(file)
        if named and suffix and READERS[suffix].has_records and file.is_file():
            files.setdefault(named[1], []).append(file)
    return {name: files[name] for name in SPLITS if name in files}


def _files_below(folder: Path) -> list[Path]:
    """Return the files of documents at any depth, sorted by name."""
    files = sorted((file for file in folder.rglob("*") if file.is_file()), key=Path.as_posix)
    known = [file for file in files if _suffix(file) and file.name != METADATA]
    if not known:
        suffixes = Counter(file.suffix or "no suffix" for file in files)
        found = ", ".join(f"{count} with {suffix}" for suffix, count in sorted(suffixes.items()))
        raise CompressiveError(f"{folder} has no {FORMATS} files ({found or 'no files at all'}): rename text to .txt")
    return known


def _check_one_format(folder: Path, files: Sequence[Path]) -> None:
    """Raise CompressiveError for files of several formats, and for a file beside its compressed form."""
    formats: dict[str, Path] = {}
    seen: dict[Path, Path] = {}
    for file in files:
        formats.setdefault(_suffix(file), file)
        plain = file.with_suffix("") if file.suffix in COMPRESSED else file
        if plain in seen:
            raise CompressiveError(f"{folder} has both {seen[plain].name} and {file.name}: keep one of them")
        seen[plain] = file
    if len(formats) > 1:
        first, second = list(formats.values())[:2]
        raise CompressiveError(f"{folder} has both {first.name} and {second.name}: keep one format")


def _read_metadata(metadata: Path) -> tuple[dict[str, str], str]:
    """Return titles by file stem, and the benchmark, of a metadata.csv of PG-19: id, title, date, link; no header."""
    if not metadata.is_file():
        return {}, ""
    try:
        with metadata.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CompressiveError(f"{metadata} must be a CSV file of id, title, date, link: {error}") from error
    gutenberg = any("gutenberg.org" in row[3] for row in rows if len(row) >= 4)
    return {row[0]: row[1] for row in rows if len(row) >= 2}, "PG-19" if gutenberg else ""
