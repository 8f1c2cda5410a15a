"""Sources of documents: files and folders, datasets, and names with a prefix.

Text is read in universal-newline mode: CRLF and CR become LF.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...errors import CompressiveError
from .audio import audio
from .benchmarks import enwik8, wikitext
from .folders import COMPRESSION, FORMATS, RECORD_FORMATS, file_source, folder_source
from .hf_datasets import Records, dataset, records
from .passkey import passkey
from .recall import recall
from .source import Source


class Prefix(NamedTuple):
    """A kind of source that is named by a prefix."""

    setting: str
    """Text after the colon of the specification, in capitals."""
    description: str
    open: Callable[[str, int, str], Source]
    """Function of the setting, `holdout` and `field`."""


PREFIXES = {
    "hf": Prefix(
        "NAME",
        "a Hugging Face dataset (extra `data`), maybe as NAME:CONFIG, or the path of a saved one",
        lambda name, holdout, field: dataset(name, holdout=holdout, field=field),
    ),
    "enwik8": Prefix("FILE", "raw bytes of the file or its .zip", lambda path, *_: enwik8(Path(path))),
    "wikitext": Prefix("FOLDER", "words of wiki.train.tokens and so on", lambda path, *_: wikitext(Path(path))),
    "audio": Prefix("FOLDER", ".wav files as 8-bit µ-law", lambda path, holdout, _: audio(Path(path), holdout)),
    "recall": Prefix(
        "MIN-MAX",
        "generated documents with keys that recur after MIN to MAX tokens",
        lambda setting, *_: recall(setting),
    ),
    "passkey": Prefix(
        "SOURCE:MIN-MAX",
        "the text of another source with hidden keys",
        lambda setting, holdout, field: passkey(setting, partial(open_source, holdout=holdout, field=field)),
    ),
}

SOURCES = (
    "A folder of .txt files, one document each (titles are read from a metadata.csv beside them), or with sub-folders"
    f" train/, validation/ and test/; a {RECORD_FORMATS} file or a folder of such; {COMPRESSION}; "
    + "; ".join(f"{name}:{prefix.setting}, {prefix.description}" for name, prefix in PREFIXES.items())
)
"""Description of all sources that a name or path can stand for, for help texts."""


def open_source(source: str | Path | Records | Mapping[str, Records], *, holdout: int, field: str) -> Source:
    """Return the source that `prepare` was given, not read yet.

    Args:
        source: One of `SOURCES`, or records in memory.
        holdout: For a source without splits: of every `holdout` documents one goes to validation and one to test.
        field: Field of the text in records.

    Raises:
        CompressiveError: where there is nothing to read.
    """
    if holdout < 0 or holdout in (1, 2):
        raise CompressiveError(
            f"holdout ({holdout}) must be 0 (all documents are for training) or at least 3 (of every `holdout`"
            " documents one is for validation and one for test)"
        )
    if not isinstance(source, str | Path):
        return records(source, holdout=holdout, field=field)
    name, colon, setting = source.partition(":") if isinstance(source, str) else ("", "", "")
    if colon and name in PREFIXES:
        return PREFIXES[name].open(setting, holdout, field)
    path = Path(source)
    if path.is_dir():
        return folder_source(path, holdout=holdout, field=field)
    if not path.is_file():
        names = ", ".join(f"{name}:{prefix.setting}" for name, prefix in PREFIXES.items())
        raise CompressiveError(f"no source at {path}: give a folder, a {FORMATS} file, or one of {names}")
    return file_source(path, holdout=holdout, field=field)
