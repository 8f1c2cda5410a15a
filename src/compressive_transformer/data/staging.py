"""Staging folder of `prepare`: renamed on success, kept for resuming after an interruption."""

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


class Staging:
    """A staging folder, and the state that was saved last."""

    def __init__(self, folder: Path, begun_with: Mapping[str, Any]) -> None:
        """Open the folder. Raises CompressiveError where its work was started with other options than `begun_with`."""
        self.folder = folder
        self.begun_with = dict(begun_with)
        self.state: Any = None
        """The last argument of `save`; None at the beginning."""
        self.saved = False
        """True once `save` was called."""
        for file in self._leftovers():
            file.unlink()
        if (folder / STATE).exists():
            self.state = self._read()

    def save(self, state: Mapping[str, Any]) -> None:
        """Save the state to resume from; the files that it describes must be on disk."""
        with atomic_file(self.folder / STATE) as temporary:
            content = json.dumps({"begun_with": self.begun_with, "state": state}, indent=1)
            temporary.write_text(content + "\n", encoding="utf-8")
        self.saved = True

    def _leftovers(self) -> list[Path]:
        """Return temporary files, and all files where no state was saved."""
        pattern = ".*" if (self.folder / STATE).exists() else "*"
        return [file for file in self.folder.glob(pattern) if file.name != LOCK]

    def _read(self) -> Any:
        try:
            content = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
            before, state = content["begun_with"], content["state"]
            other = [name for name, value in self.begun_with.items() if before.get(name) != value]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CompressiveError(f"{self.folder} is damaged: remove it to start over") from error
        if other:
            raise CompressiveError(
                f"{self.folder} was started with another {' and '.join(other)}: give the same to resume, or remove"
                " it to start over"
            )
        return state


@contextlib.contextmanager
def staging_folder(out: Path, begun_with: Mapping[str, Any], report: Callable[[str], None]) -> Iterator[Staging]:
    """Open a folder beside `out` that is renamed to it at the end, its files flushed to disk.

    Where the body fails after a state was saved, the folder stays for the next call, which `report` says. Raises
    CompressiveError where the file system refuses, where another process uses the folder, and where no earlier call
    left it.
    """
    folder = out.with_name(f"{out.name}.unfinished")
    if folder.exists() and not (folder / LOCK).exists():
        raise CompressiveError(f"{folder} exists, and no earlier prepare left it: remove it, or choose another folder")
    missing = [parent for parent in out.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        busy = f"{folder}: another process is using it; wait for its end, or choose another folder"
        with locked(folder / LOCK, busy):
            work = Staging(folder, begun_with)
            try:
                yield work
                for file in folder.iterdir():
                    flush(file)
                for name in (STATE, LOCK):  # without a state nothing in the folder is resumed
                    (folder / name).unlink(missing_ok=True)
                if out.exists():
                    out.rmdir()
                folder.rename(out)
            finally:
                if not (folder / STATE).exists():
                    shutil.rmtree(folder, ignore_errors=True)
                elif work.saved:
                    report(f"progress is saved in {folder}; run the same command to resume")
    except OSError as error:
        raise CompressiveError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        for parent in missing:
            with contextlib.suppress(OSError):  # it has something in it
                parent.rmdir()
