"""Where documents come from: files and folders, datasets, and sources with a prefix.

Text is read in universal-newline mode: CRLF and CR become LF.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ...errors import CompressiveError
from .audio import audio
from .benchmarks import enwik8, wikitext
from .folders import file_source, folder_source
from .hf_datasets import Records, dataset, records
from .passkey import passkey
from .recall import recall
from .source import Source

PREFIXES = (
    "hf:NAME",
    "enwik8:FILE",
    "wikitext:FOLDER",
    "audio:FOLDER",
    "recall:LEAST-GREATEST",
    "passkey:SOURCE:LEAST-GREATEST",
)


def open_source(source: str | Path | Records | Mapping[str, Records], *, holdout: int, field: str) -> Source:
    """The documents of what `prepare` may be given, not read yet.

    Raises CompressiveError where there is nothing to read.
    """
    if holdout < 0 or holdout in (1, 2):
        raise CompressiveError(
            f"holdout ({holdout}) must be 0 (all documents are for training) or at least 3"
            " (of so many documents one is for validation and one for test)"
        )
    if not isinstance(source, str | Path):
        return records(source, holdout=holdout, field=field)
    prefix, colon, rest = source.partition(":") if isinstance(source, str) else ("", "", "")
    match prefix if colon else "":
        case "hf":
            return dataset(rest, holdout=holdout, field=field)
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
        return folder_source(path, holdout=holdout, field=field)
    if not path.is_file():
        raise CompressiveError(
            f"no source at {path}: give a folder, a .txt, .jsonl or .parquet file, or one of {', '.join(PREFIXES)}"
        )
    return file_source(path, holdout=holdout, field=field)
