"""Files that may be compressed, read as a stream."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ...errors import CompressiveError, optional

COMPRESSED = (".gz", ".zst")


def name_and_kind(file: Path) -> tuple[str, str]:
    """The name without suffixes, and the suffix that says what is in a file, both without that of a compression."""
    inner = Path(file.stem) if file.suffix in COMPRESSED else file
    return inner.stem, inner.suffix


@contextlib.contextmanager
def open_file(file: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The content, decompressed where the name ends in .gz or .zst, and the file as it lies on disk.

    The place in the second says how far reading is. Raises CompressiveError for what cannot be read: a compressed
    file that is damaged or cut off too.
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
            f"{file} is damaged or cut off ({error}): fetch it again, or compress the text again"
        ) from error
    except OSError as error:
        raise CompressiveError(f"cannot read {file}: {error.strerror}") from error


def _zstd() -> Any:
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return optional(module, extra="data", purpose="reading .zst files")
