"""Readers of text files and JSON lines, compressed or not, and what readers of records share."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from ...errors import CompressiveError, optional
from .source import RawDocument

COMPRESSED = (".gz", ".zst")
TITLES = ("title", "short_book_title")
"""Fields of titles; the dataset PG-19 has the second."""


def read_text(file: Path, field: str) -> Iterator[RawDocument]:
    """Yield the file as one document; `field` is for records."""
    with open_file(file) as (content, raw):
        try:
            text = content.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise CompressiveError(
                f"{file} is not UTF-8 at byte {error.start}: convert it to UTF-8 or take it out"
            ) from error
        read = raw.tell()
    yield make_document(stem_and_suffix(file)[0], text, str(file))._replace(read=read)


def read_json_lines(file: Path, field: str) -> Iterator[RawDocument]:
    """Yield each line of the file, a JSON record, as a document."""
    stem, _ = stem_and_suffix(file)
    with open_file(file) as (lines, raw):
        before = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                document = _read_line(line, field, place=f"{file}, line {number}", title=f"{stem}:{number}")
                before, read = raw.tell(), raw.tell() - before
                yield document._replace(read=read)


def _read_line(line: bytes, field: str, *, place: str, title: str) -> RawDocument:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CompressiveError(f"{place} is not JSON in UTF-8 ({error}): one record per line is expected") from error
    if not isinstance(record, dict):
        raise CompressiveError(f'{place} must be a record such as {{"{field}": "..."}}')
    return read_record(record, field, place=place, title=title)


def read_record(record: Mapping[str, Any], field: str, *, place: str, title: str) -> RawDocument:
    """Return the document of a record, with the text in `field`, and `title` where the record has none."""
    if field not in record:
        raise no_field(place, field, record)
    if not isinstance(record[field], str):
        raise CompressiveError(f"{place}: field {field!r} must be text, not {type(record[field]).__name__}")
    given = next((record[name] for name in TITLES if record.get(name)), None)
    if isinstance(given, str):
        title = given.encode("utf-8", "replace").decode("utf-8")  # JSON may hold lone surrogates, the index may not
    return make_document(title, record[field], place)


def no_field(place: str, field: str, fields: Iterable[str]) -> CompressiveError:
    """Return the error for records without `field`."""
    return CompressiveError(
        f"{place} has no field {field!r}, it has {', '.join(map(str, fields)) or 'none'}:"
        " name the one that holds the text"
    )


def make_document(title: str, text: str, place: str) -> RawDocument:
    """Return a document with line ends as in text mode. Raises CompressiveError where it is empty."""
    if not text:
        raise CompressiveError(f"{place} is empty: take it out, a document must have text")
    return RawDocument(title, text.replace("\r\n", "\n").replace("\r", "\n"), place)


def stem_and_suffix(file: Path) -> tuple[str, str]:
    """Return the name without suffixes, and the suffix of the format, both without that of a compression."""
    inner = Path(file.stem) if file.suffix in COMPRESSED else file
    return inner.stem, inner.suffix


@contextlib.contextmanager
def open_file(file: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open the content, decompressed where the name ends in .gz or .zst, and the file on disk.

    The position in the second says how much was read. Raises CompressiveError for what cannot be read, damaged or
    truncated compressed files included.
    """
    damages: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        with file.open("rb") as raw, contextlib.ExitStack() as stack:
            content: BinaryIO = raw
            if file.suffix in COMPRESSED and not os.fstat(raw.fileno()).st_size:
                raise EOFError("it has no bytes")  # which would be read as no text
            if file.suffix == ".gz":
                content = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=raw)))
            elif file.suffix == ".zst":
                zstd = _zstd()
                damages += (zstd.ZstdError,)
                content = io.BufferedReader(stack.enter_context(zstd.ZstdFile(raw)))
            yield content, raw
    except damages as error:
        raise CompressiveError(
            f"{file} is damaged or truncated ({error}): download it again, or compress the text again"
        ) from error
    except OSError as error:
        raise CompressiveError(f"cannot read {file}: {error.strerror}") from error


def _zstd() -> Any:
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return optional(module, extra="data", purpose="reading .zst files")
