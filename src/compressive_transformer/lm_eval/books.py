"""Functions of the task `pg19`, named in its YAML file."""

from __future__ import annotations

from typing import Any

import datasets

from compressive_transformer.data.sources import open_source
from compressive_transformer.errors import CompressiveError


def documents(folder: str | None = None, **_: Any) -> dict[str, Any]:
    """Return the books of a folder by split, read as by `compressive prepare`."""
    if folder is None:
        raise CompressiveError(
            'the task pg19 needs the folder of the books: pass --metadata \'{"folder": "books/"}\', or '
            'metadata={"folder": ...} in Python'
        )
    books: dict[str, list[dict[str, str]]] = {}
    for split, book in open_source(folder, holdout=0, field="text").read():
        books.setdefault(split, []).append({"title": book.title, "text": str(book.content)})
    if "test" not in books:
        raise CompressiveError(f"{folder} has {', '.join(books)} but no test split: put the books to score into test/")
    return {split: datasets.Dataset.from_list(rows) for split, rows in books.items()}


def process_results(document: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """Return ln p of a book with the words, separated by whitespace, and the bytes that divide it."""
    (likelihood,) = results
    words, size = len(document["text"].split()), len(document["text"].encode("utf-8"))
    return {
        "word_perplexity": (likelihood, words),
        "byte_perplexity": (likelihood, size),
        "bits_per_byte": (likelihood, size),
    }
