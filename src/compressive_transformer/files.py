"""Files and folders that appear whole or not at all, and locks."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from .errors import CompressiveError


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; what was written there takes its place at the end, flushed to disk.

    Where the body fails, an earlier file at `path` stays as it was. Raises CompressiveError where the file
    system refuses.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        raise CompressiveError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` at the end, its files flushed; nothing is left where the body fails.

    `path` must not exist, or be empty. Raises CompressiveError where the file system refuses.
    """
    # In the nearest folder that exists: on the same disk, and no parents are left behind after an error.
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    temporary = parent / f".{path.name}.{uuid4().hex}"
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            flush(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.rmdir()
        temporary.rename(path)
        flush_folder(path.parent)
    except OSError as error:
        raise CompressiveError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path, message: str) -> Iterator[None]:
    """Hold the lock file `path`; the system releases it when the process ends, in whatever way.

    Raises CompressiveError with `message` where another process holds it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise CompressiveError(message) from None
    try:
        yield
    finally:
        lock.release()


def flush(path: Path) -> None:
    """Wait until what was written to `path` is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk, where the system can say so."""
    if os.name == "posix":
        flush(path)
