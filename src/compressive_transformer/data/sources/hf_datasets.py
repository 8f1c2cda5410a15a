"""Datasets of the library `datasets`, by name or as objects, and records in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import CompressiveError, optional
from ..corpus import SPLITS
from .source import WHOLE, Parts, RawDocument, Source
from .text import read_record

Records = Iterable[Mapping[str, Any]]


def dataset(name: str, *, holdout: int, field: str) -> Source:
    """Return a dataset, `NAME` or `NAME:CONFIG` of the Hub or a path; streamed, unless it was saved to disk.

    Raises CompressiveError where it cannot be loaded.
    """
    library = optional("datasets", extra="data", purpose="reading hf: sources")
    path, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    called = f"{Path(path).resolve().name if Path(path).exists() else path}{config and ':'}{config}"
    try:
        if any((Path(path) / file).is_file() for file in ("dataset_dict.json", "state.json")):
            splits = library.load_from_disk(path)
        else:
            splits = library.load_dataset(path, config or None, streaming=True)
    except Exception as error:  # the library raises what its dependencies raise
        raise CompressiveError(f"cannot load the dataset {name}: {_reason(error)}") from error
    return _source(f"hf:{called}", splits, holdout=holdout, field=field)


def records(given: Records | Mapping[str, Records], *, holdout: int, field: str) -> Source:
    """Return records, or a mapping of splits to records: datasets of the library `datasets`, or lists of dicts.

    Raises CompressiveError for records that can be read only once.
    """
    parts = list(given.values()) if isinstance(given, Mapping) else [given]
    if not all(isinstance(part, Iterable) and not isinstance(part, Iterator) for part in parts):
        raise CompressiveError(
            f"a source must be a path, a name, a dataset or a list of records, not {type(given).__name__}: records"
            " are read more than once"
        )
    info = next((part.info for part in parts if hasattr(part, "info")), None)
    return _source(getattr(info, "dataset_name", None) or "records", given, holdout=holdout, field=field)


def _source(name: str, splits: Records | Mapping[str, Records], *, holdout: int, field: str) -> Source:
    if isinstance(splits, Mapping):
        if "train" not in splits:
            raise CompressiveError(
                f"the dataset {name.removeprefix('hf:')} must have a split train, it has {', '.join(map(str, splits))}"
            )
        parts: Parts = {split: partial(_read, splits[split], split, field) for split in SPLITS if split in splits}
    else:
        parts = {WHOLE: partial(_read, splits, "records", field)}
    benchmark = "PG-19" if "pg19" in name.lower().replace("-", "") else ""
    return Source(name, parts, holdout, benchmark=benchmark)


def _read(records: Records, split: str, field: str) -> Iterator[RawDocument]:
    try:
        for number, record in enumerate(records):
            yield read_record(record, field, place=f"record {number} of {split}", title=f"{split}:{number}")
    except CompressiveError:
        raise
    except Exception as error:  # the library raises what its dependencies raise
        raise CompressiveError(f"cannot read {split} of the dataset: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
