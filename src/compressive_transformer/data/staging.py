"""The folder in which a corpus is made, beside the one that it becomes, and what is needed to go on there."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CompressiveError
from ..files import atomic_file, flush, locked

STATE, LOCK = "unfinished.json", "prepare.lock"


class Unfinished:
    """A corpus that is being made: its folder, and how far it was when that was last saved."""

    def __init__(self, folder: Path, begun_with: Mapping[str, Any]) -> None:
        """Raises CompressiveError where the folder holds what was begun with something else than `begun_with`."""
        self.folder = folder
        self.begun_with = dict(begun_with)
        self.state: Any = None
        """What `save` was given last; None at the beginning."""
        self.saved = False
        """Whether `save` was called."""
        for file in self._left_over():
            file.unlink()
        if (folder / STATE).exists():
            self.state = self._read()

    def save(self, state: Mapping[str, Any]) -> None:
        """Keep what is needed to go on from here; all that it speaks of must be on disk."""
        with atomic_file(self.folder / STATE) as temporary:
            content = json.dumps({"begun_with": self.begun_with, "state": state}, indent=1)
            temporary.write_text(content + "\n", encoding="utf-8")
        self.saved = True

    def _left_over(self) -> list[Path]:
        """What no state speaks of: files that were being written, and all where an end came before the first state."""
        pattern = ".*" if (self.folder / STATE).exists() else "*"
        return [file for file in self.folder.glob(pattern) if file.name != LOCK]

    def _read(self) -> Any:
        try:
            content = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
            before, state = content["begun_with"], content["state"]
            other = [name for name, value in self.begun_with.items() if before.get(name) != value]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CompressiveError(f"{self.folder} is damaged: remove it to begin anew") from error
        if other:
            raise CompressiveError(
                f"{self.folder} holds work that was begun with another {' and '.join(other)}: give the same again to go"
                " on, or remove it to begin anew"
            )
        return state


@contextlib.contextmanager
def unfinished_folder(out: Path, begun_with: Mapping[str, Any], report: Callable[[str], None]) -> Iterator[Unfinished]:
    """A folder beside `out` that becomes it at the end, its files flushed to disk.

    Where the body fails it stays if a state was saved there, which is reported; the next call then finds it. Raises
    CompressiveError where the file system refuses, where another process is at work there, and where the folder is
    not what an earlier call left.
    """
    folder = out.with_name(f"{out.name}.unfinished")
    if folder.exists() and not (folder / LOCK).exists():
        raise CompressiveError(f"{folder} exists, and no earlier prepare left it: remove it, or choose another folder")
    missing = [parent for parent in out.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        busy = f"{folder}: another process is at work there; wait for its end, or choose another folder"
        with locked(folder / LOCK, busy):
            work = Unfinished(folder, begun_with)
            try:
                yield work
                for file in folder.iterdir():
                    flush(file)
                for name in (STATE, LOCK):  # without a state nothing in the folder is ever taken up
                    (folder / name).unlink(missing_ok=True)
                if out.exists():
                    out.rmdir()
                folder.rename(out)
            finally:
                if not (folder / STATE).exists():
                    shutil.rmtree(folder, ignore_errors=True)
                elif work.saved:
                    report(f"what is done is kept in {folder}; the same command goes on from there")
    except OSError as error:
        raise CompressiveError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        for parent in missing:
            with contextlib.suppress(OSError):  # it has something in it
                parent.rmdir()
