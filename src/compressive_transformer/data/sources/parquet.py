"""Parquet files to documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ...errors import CompressiveError, optional
from .records import TITLES, no_field, read_record
from .source import Text

ROWS = 16
"""Read at once; a row may be a book."""


def read_tables(files: Iterable[Path], field: str) -> Iterator[Text]:
    """Each row of the files as a document. Raises CompressiveError for what cannot be read, with the file named."""
    arrow = optional("pyarrow", extra="data", purpose="reading .parquet files")
    for file in files:
        try:
            yield from _read_table(file, field)
        except OSError as error:
            raise CompressiveError(f"cannot read {file}: {error.strerror or _reason(error)}") from error
        except (arrow.ArrowException, UnicodeDecodeError) as error:
            raise CompressiveError(
                f"{file} is not a Parquet file, or damaged or cut off ({_reason(error)}): fetch it again"
            ) from error


def _read_table(file: Path, field: str) -> Iterator[Text]:
    parquet = optional("pyarrow.parquet", extra="data", purpose="reading .parquet files")
    size = file.stat().st_size
    # Mapped: else the columns of a whole row group are read at once. So it is a page, as large as its writer made it.
    with parquet.ParquetFile(file, memory_map=True) as table:
        names, rows = table.schema_arrow.names, table.metadata.num_rows
        if field not in names:
            raise no_field(str(file), field, names)
        columns = [name for name in (field, *TITLES) if name in names]
        batches = table.iter_batches(batch_size=ROWS, columns=columns)
        for number, record in enumerate(record for batch_size in batches for record in batch_size.to_pylist()):
            text = read_record(record, field, place=f"{file}, row {number}", title=f"{file.stem}:{number}")
            yield text._replace(read=size * (number + 1) // rows - size * number // rows)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
