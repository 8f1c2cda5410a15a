"""Files and folders that appear whole or not at all, locks, and Python files from any folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from uuid import uuid4

from .errors import CompressiveError


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; at the end it is flushed to disk and renamed to `path`.

    If the body raises, an earlier file at `path` is unchanged. Raises CompressiveError if the file system refuses.
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
    """Yield a temporary folder; at the end its files are flushed to disk and it is renamed to `path`.

    If the body raises, nothing is left. `path` must not exist, or be empty. Raises CompressiveError if the file system
    refuses.
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


def import_file(path: Path) -> ModuleType:
    """Run a Python file (.py) from any folder as a module: under its name, or as plugin_NAME where that is taken."""
    name = path.stem if path.stem not in sys.modules else f"plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flush(path: Path) -> None:
    """Flush a file to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to disk, on systems that support it."""
    if os.name == "posix":
        flush(path)
