"""Reader of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...errors import CompressiveError, first_line, optional
from .source import RawDocument
from .text import TITLES, no_field, read_record

BATCH_ROWS = 16
"""Rows in memory at a time; a row may be a book."""


def read_parquet(file: Path, field: str) -> Iterator[RawDocument]:
    """Yield each row of the file as a document. Raises CompressiveError, with the file named, where it cannot."""
    arrow = optional("pyarrow", extra="data", purpose="reading .parquet files")
    try:
        yield from _read_rows(file, field)
    except OSError as error:
        raise CompressiveError(f"cannot read {file}: {error.strerror or first_line(error)}") from error
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise CompressiveError(
            f"{file} is not a Parquet file, or damaged or truncated ({first_line(error)}): download it again"
        ) from error


def _read_rows(file: Path, field: str) -> Iterator[RawDocument]:
    parquet = optional("pyarrow.parquet", extra="data", purpose="reading .parquet files")
    size = file.stat().st_size
    # Memory-mapped: otherwise the columns of a whole row group are read together. So it is a page of any size.
    with parquet.ParquetFile(file, memory_map=True) as table:
        names, rows = table.schema_arrow.names, table.metadata.num_rows
        if field not in names:
            raise no_field(str(file), field, names)
        columns = [name for name in (field, *TITLES) if name in names]
        batches = table.iter_batches(batch_size=BATCH_ROWS, columns=columns)
        for number, record in enumerate(record for batch in batches for record in batch.to_pylist()):
            document = read_record(record, field, place=f"{file}, row {number}", title=f"{file.stem}:{number}")
            yield document._replace(read=size * (number + 1) // rows - size * number // rows)
