"""Sessions of a server, in main memory or in files."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...data.tokenizers import Tokenizer
from ...errors import CompressiveError
from ...generate import StreamState
from ...generate.stream_state import fingerprint
from ...model import CompressiveTransformer
from .errors import Refusal
from .limits import Limits

ID = re.compile(r"[0-9a-f]{32}")
OFFLOADED, SAVED = ".safetensors", ".saved.safetensors"


@dataclass(eq=False)
class Session:
    """One session."""

    id: str
    state: StreamState | None
    """None while it is in a file."""
    used: float
    """Time of its last use, by the clock of `Sessions`."""
    busy: bool = False
    """True while a request uses it."""


class Sessions:
    """All sessions by id. The least recently used are offloaded to files and loaded on demand.

    A request acquires a session, so that no other can use it, and releases it. Methods raise Refusal.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        limits: How many sessions there may be, and when they are idle.
        folder: Folder of the files; None to have all sessions in main memory.

    Raises:
        CompressiveError: The folder cannot be used.
    """

    def __init__(
        self, model: CompressiveTransformer, tokenizer: Tokenizer, limits: Limits, folder: Path | None
    ) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.offloads = self.loads = self.drops = 0
        self._model, self._model_id = model, fingerprint(model, tokenizer)  # reads all weights: once
        self._limits, self._folder = limits, folder
        self._all: dict[str, Session] = {}
        # Held while sessions are added, removed, offloaded or loaded; the worker, which releases, never waits for it.
        self._moving = threading.Lock()
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            ids = {path.name.partition(".")[0] for path in folder.glob(f"*{OFFLOADED}")}
        except OSError as error:
            raise CompressiveError(f"{folder}: cannot hold sessions: {error.strerror}") from None
        self._all = {id: Session(id, None, self.clock()) for id in ids if ID.fullmatch(id)}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def resident(self) -> int:
        """Number of sessions in main memory."""
        return len(self._resident())

    def add(self, state: StreamState) -> str:
        """Return the id of a new session."""
        with self._moving:
            if len(self._all) >= self._limits.stored:
                raise _too_many(f"there are {self._limits.stored} sessions, the limit of this server; delete some")
            self._make_room()
            session = Session(secrets.token_hex(16), state, self.clock())
            self._all[session.id] = session
            return session.id

    def acquire(self, id: str) -> Session:
        """Return a session, in main memory and busy. Raises Refusal if it is unknown or busy."""
        with self._moving:
            session = self._free(id)
            if session.state is None:
                self._make_room()
                path = self._path(id, OFFLOADED)
                session.state = self._load(id, path if path.is_file() else self._path(id, SAVED))
                self.loads += 1
            session.busy = True
            return session

    def release(self, session: Session, state: StreamState | None = None) -> None:
        """End the use of a session, with a new state unless it is None."""
        if state is not None:
            session.state = state
        session.used = self.clock()
        session.busy = False

    @contextmanager
    def acquired(self, id: str) -> Iterator[StreamState]:
        """Acquire a session for a moment, and return its state."""
        session = self.acquire(id)
        assert session.state is not None
        try:
            yield session.state
        finally:
            self.release(session)

    def save(self, id: str) -> StreamState:
        """Write a session's state to the file that `restore`, and a server after a crash, return to."""
        self._check_folder("saved")
        with self.acquired(id) as state:
            self._write(id, SAVED, state)
            self._path(id, OFFLOADED).unlink(missing_ok=True)  # older than the saved file
            return state

    def restore(self, id: str) -> StreamState:
        """Return a session to its saved state."""
        self._check_folder("restored")
        with self._moving:
            session = self._free(id)
            saved = self._path(id, SAVED)
            if not saved.is_file():
                raise Refusal(409, "never_saved", f"session {id} was never saved: save it first")
            if session.state is None:
                self._make_room()
            session.state = state = self._load(id, saved)
            session.used = self.clock()
            self._path(id, OFFLOADED).unlink(missing_ok=True)
            return state

    def delete(self, id: str) -> None:
        """Delete a session and its files."""
        with self._moving:
            self._free(id)
            if self._folder is not None:
                for ending in (OFFLOADED, SAVED):
                    self._path(id, ending).unlink(missing_ok=True)
            del self._all[id]

    def offload_idle(self) -> None:
        """Offload sessions that were idle for too long, or drop them without a folder."""
        with self._moving:
            now = self.clock()
            for session in self._resident():
                if session.busy or now - session.used < self._limits.idle:
                    continue
                if self._folder is None:
                    del self._all[session.id]
                    self.drops += 1
                else:
                    self._offload(session)

    def offload_all(self) -> None:
        """Offload all sessions, before the server ends; without a folder they are lost."""
        if self._folder is not None:
            with self._moving:
                for session in self._resident():
                    with suppress(Refusal):  # logged; the others must be written all the same
                        self._offload(session)

    def _resident(self) -> list[Session]:
        return [session for session in list(self._all.values()) if session.state is not None]

    def _free(self, id: str) -> Session:
        # An id is looked up among those that the server made; nothing else of a request becomes part of a path.
        session = self._all.get(id) if ID.fullmatch(id) else None
        if session is None:
            raise Refusal(404, "no_such_session", "no such session; it may have been deleted, or dropped when idle")
        if session.busy:
            message = f"session {id} is in use by another request; wait until it ends, or fork the session earlier"
            raise Refusal(409, "session_busy", message)
        return session

    def _make_room(self) -> None:
        """Offload the least recently used session if main memory is full."""
        resident, limit = self._resident(), self._limits.resident
        if len(resident) < limit:
            return
        if self._folder is None:
            raise _too_many(f"there are {limit} sessions, the limit of a server without --sessions DIR; delete one")
        free = [session for session in resident if not session.busy]
        if not free:
            raise _too_many(f"all {limit} sessions in main memory are in use; retry later", retry_after=1)
        self._offload(min(free, key=lambda session: session.used))

    def _offload(self, session: Session) -> None:
        assert session.state is not None
        self._write(session.id, OFFLOADED, session.state)
        session.state = None
        self.offloads += 1

    def _write(self, id: str, ending: str, state: StreamState) -> None:
        try:
            state.save(self._path(id, ending), self._model_id)
        except CompressiveError as error:
            logging.getLogger(__name__).error("%s", error)
            message = f"session {id} could not be written to disk; see the server's log"
            raise Refusal(507, "storage", message) from None

    def _load(self, id: str, path: Path) -> StreamState:
        try:
            state = StreamState.load(path, self._model, self._model_id)
            if (state.logits is None) != (state.seen == 0):
                raise CompressiveError("corrupt session file: next-token logits missing")
            return state
        except CompressiveError as error:
            message = str(error).removeprefix(f"{path}: ")  # clients need not know the path
            raise Refusal(409, "session_unreadable", f"session {id} cannot be loaded: {message}") from None

    def _path(self, id: str, ending: str) -> Path:
        assert self._folder is not None
        return self._folder / (id + ending)

    def _check_folder(self, verb: str) -> None:
        if self._folder is None:
            message = f"sessions cannot be {verb}: the server was started without --sessions DIR"
            raise Refusal(409, "no_folder", message)


def _too_many(message: str, *, retry_after: int | None = None) -> Refusal:
    return Refusal(429, "too_many_sessions", message, retry_after=retry_after)
