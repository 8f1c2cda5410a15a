"""Text files and JSON lines, compressed or not, to documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ...errors import CompressiveError
from .compressed import name_and_kind, open_file
from .records import make_text, read_record
from .source import Text


def read_texts(files: Iterable[Path], titles: Mapping[str, str]) -> Iterator[Text]:
    """Each file as a document; `titles` by names without suffixes."""
    for file in files:
        with open_file(file) as (content, raw):
            text = _decode(content.read(), file)
            read = raw.tell()
        name, _ = name_and_kind(file)
        yield make_text(titles.get(name, name), text, str(file))._replace(read=read)


def _decode(content: bytes, file: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CompressiveError(
            f"{file} is not UTF-8 at byte {error.start}: convert it to UTF-8 or take it out"
        ) from error


def read_lines(files: Iterable[Path], field: str) -> Iterator[Text]:
    """Each line of the files as a document: a record in JSON."""
    for file in files:
        name, _ = name_and_kind(file)
        with open_file(file) as (lines, raw):
            before = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    text = _read_line(line, field, place=f"{file}, line {number}", title=f"{name}:{number}")
                    before, read = raw.tell(), raw.tell() - before
                    yield text._replace(read=read)


def _read_line(line: bytes, field: str, *, place: str, title: str) -> Text:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CompressiveError(f"{place} is not JSON in UTF-8 ({error}): one record a line is expected") from error
    if not isinstance(record, dict):
        raise CompressiveError(f'{place} must be a record such as {{"{field}": "..."}}')
    return read_record(record, field, place=place, title=title)
