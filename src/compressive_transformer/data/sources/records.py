"""Records to documents: what holds the text, and what the title."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import CompressiveError
from .source import Text

TITLES = ("title", "short_book_title")
"""Fields that titles are taken from; PG-19 as a dataset has the second."""


def read_record(record: Mapping[str, Any], field: str, *, place: str, title: str) -> Text:
    """The document of a record: its text is in `field`, its title is `title` where it has none of its own."""
    if field not in record:
        raise no_field(place, field, record)
    if not isinstance(record[field], str):
        raise CompressiveError(f"{place}: field {field!r} must be text, not {type(record[field]).__name__}")
    given = next((record[name] for name in TITLES if record.get(name)), None)
    if isinstance(given, str):
        title = given.encode("utf-8", "replace").decode("utf-8")  # JSON may hold lone surrogates, the index not
    return make_text(title, record[field], place)


def no_field(place: str, field: str, fields: Iterable[str]) -> CompressiveError:
    """What to raise where there is no `field` among the fields."""
    return CompressiveError(
        f"{place} has no field {field!r}, it has {', '.join(map(str, fields)) or 'none'}:"
        " name the one that holds the text"
    )


def make_text(title: str, text: str, place: str) -> Text:
    """A document with line ends as text mode reads them. Raises CompressiveError where it is empty."""
    if not text:
        raise CompressiveError(f"{place} is empty: take it out, a document must have text")
    return Text(title, text.replace("\r\n", "\n").replace("\r", "\n"), place)
