"""Benchmarks with a special layout: Enwik8 and WikiText."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ...errors import CompressiveError
from .source import RawDocument, Source

WIKITEXT_FILES = {"train": "wiki.train", "validation": "wiki.valid", "test": "wiki.test"}


def enwik8(path: Path) -> Source:
    """Return the bytes of a file, 90 % for training, 5 % for validation, 5 % for test, one document each.

    Bytes are not changed, and a border may lie within a character. `path` is the file, or the zip archive of the
    download. Raises CompressiveError for anything else.
    """
    size = len(_raw_bytes(path))
    if size < 20:
        raise CompressiveError(f"{path} has {size} bytes: at least 20 are needed for three splits")
    held_out = size * 5 // 100
    borders = (0, size - 2 * held_out, size - held_out, size)
    pieces = {"train": borders[:2], "validation": borders[1:3], "test": borders[2:]}
    sizes = ", ".join(f"{stop - start:,}" for start, stop in pieces.values())
    return Source(
        f"enwik8:{path.name}",
        {name: partial(_read_piece, path, name, *piece) for name, piece in pieces.items()},
        holdout=0,
        reading="bytes are kept as they are",
        split_rule=f"90, 5 and 5 of 100 parts of {size:,} bytes in order: {sizes}",
        tokenizer="bytes",
        benchmark="Enwik8",
    )


def _raw_bytes(path: Path) -> bytes:
    try:
        if not zipfile.is_zipfile(path):
            return path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(names) != 1:
                raise CompressiveError(f"{path} must hold one file, it holds {len(names)}: unpack it and give the file")
            return archive.read(names[0])
    except OSError as error:
        raise CompressiveError(f"cannot read {path}: {error.strerror}; enwik8: needs a file") from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise CompressiveError(f"cannot unpack {path}: {error}; unpack it and give the file") from error


def _read_piece(path: Path, name: str, start: int, stop: int) -> Iterator[RawDocument]:
    content = _raw_bytes(path)[start:stop]
    words = sum(1 for _ in re.finditer(r"\S+", content.decode("utf-8", errors="replace")))
    yield RawDocument(f"{path.stem} {name}", content, str(path), words)


def wikitext(folder: Path) -> Source:
    """Return WikiText as published: wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or .raw files.

    Each file is one document, since results are reported with context across article borders. The end of each line is
    a word. Raises CompressiveError where files are missing.
    """
    tokens, raw = (
        {split: file for split, stem in WIKITEXT_FILES.items() if (file := folder / f"{stem}.{suffix}").is_file()}
        for suffix in ("tokens", "raw")
    )
    files = tokens or raw
    if tokens and raw:
        raise CompressiveError(f"{folder} has both .tokens and .raw files of WikiText: keep one kind")
    if "train" not in files:
        raise CompressiveError(
            f"{folder} has no wiki.train.tokens (or wiki.train.raw): the vocabulary is that of the training split,"
            f" add it; found {', '.join(file.name for file in files.values()) or 'no file of WikiText'}"
        )
    return Source(
        f"wikitext:{folder.resolve().name}",
        {split: partial(_read_lines, file) for split, file in files.items()},
        holdout=0,
        reading="words separated by whitespace, and one <eos> at the end of each line",
        tokenizer="words",
        benchmark="WikiText",
        files=tuple(files.values()),
    )


def _read_lines(file: Path) -> Iterator[RawDocument]:
    try:
        content = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise CompressiveError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CompressiveError(f"{file} is not UTF-8 at byte {error.start}") from error
    lines = content.replace("\r\n", "\n").removesuffix("\n").split("\n")
    # WikiText's layout, which the word tokenizer decodes to: a space before each word and each end of a line.
    pieces = ["".join(f" {word}" for word in line.split()) + " \n" for line in lines]
    text = "".join(pieces)
    yield RawDocument(file.stem, text, str(file), words=text.count(" "), read=file.stat().st_size)
