"""Sessions of a server: some in main memory, the others in files."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import CompressiveError
from .errors import Refusal
from .state import State, States

NAME = re.compile(r"[0-9a-f]{32}")
AWAY, SAVED = ".safetensors", ".saved.safetensors"


@dataclass(eq=False)
class Session:
    """One session; `state` is None while it is only on disk."""

    id: str
    state: State | None
    used: float
    """Time of its last use, by the clock of `Sessions`."""
    busy: bool = False
    """True while a request uses it."""


@dataclass
class Sessions:
    """All sessions by id. The least recently used are stored to `folder` and loaded on demand.

    A request takes a session exclusively, and returns it with `give`. Methods raise `Refusal`.
    """

    states: States
    folder: Path | None
    resident_limit: int
    """Sessions in main memory."""
    total_limit: int
    """Sessions in all."""
    idle: float
    """Seconds without a request after which a session is stored to `folder`, or deleted if there is none."""
    clock: Callable[[], float] = time.monotonic
    stored: int = 0
    """Number of sessions stored to disk."""
    loaded: int = 0
    """Number of sessions loaded from disk."""
    forgotten: int = 0
    """Number of idle sessions that were deleted."""
    _all: dict[str, Session] = field(default_factory=dict)
    # Held while sessions are created, deleted, stored or loaded; the worker, which calls `give`, never waits for it.
    _moving: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = {path.name.partition(".")[0] for path in self.folder.glob(f"*{AWAY}")}
        except OSError as error:
            raise CompressiveError(f"{self.folder}: cannot be used for sessions: {error.strerror}") from None
        self._all = {name: Session(name, None, self.clock()) for name in names if NAME.fullmatch(name)}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def resident(self) -> int:
        """Sessions in main memory."""
        return sum(session.state is not None for session in list(self._all.values()))

    def add(self, state: State) -> str:
        """Create a session, and return its id."""
        with self._moving:
            if len(self._all) >= self.total_limit:
                message = f"the server has {self.total_limit} sessions, its limit; delete some"
                raise Refusal(429, "too_many_sessions", message)
            self._make_room()
            session = Session(secrets.token_hex(16), state, self.clock())
            self._all[session.id] = session
            return session.id

    def take(self, id: str) -> Session:
        """Return a session, loaded and marked busy. Raises Refusal if it is unknown or busy."""
        with self._moving:
            session = self._free(id)
            if session.state is None:
                self._make_room()
                session.state = self._load(session)
                self.loaded += 1
            session.busy = True
            return session

    def give(self, session: Session, state: State | None = None) -> None:
        """End a request: the session has the new state, or its old one without."""
        if state is not None:
            session.state = state
        session.used = self.clock()
        session.busy = False

    @contextmanager
    def taken(self, id: str) -> Iterator[Session]:
        """Take a session for the time of the `with` block."""
        session = self.take(id)
        try:
            yield session
        finally:
            self.give(session)

    def save(self, id: str) -> State:
        """Save the state of a session to a file, for `restore` and for a restart after a crash."""
        if self.folder is None:
            raise _no_folder("saved")
        with self.taken(id) as session:
            self._write(session, SAVED)
            self._path(session, AWAY).unlink(missing_ok=True)  # older than the saved file
            assert session.state is not None
            return session.state

    def restore(self, id: str) -> State:
        """Reset a session to its last saved state."""
        if self.folder is None:
            raise _no_folder("restored")
        with self._moving:
            session = self._free(id)
            saved = self._path(session, SAVED)
            if not saved.is_file():
                raise Refusal(409, "never_saved", f"session {id} was never saved; save it first")
            if session.state is None:
                self._make_room()
            session.state = state = self._read(session, saved)
            session.used = self.clock()
            self._path(session, AWAY).unlink(missing_ok=True)
            return state

    def delete(self, id: str) -> None:
        """Delete a session and its files."""
        with self._moving:
            session = self._free(id)
            if self.folder is not None:
                for ending in (AWAY, SAVED):
                    self._path(session, ending).unlink(missing_ok=True)
            del self._all[id]

    def store_idle(self) -> None:
        """Store idle sessions to disk, or delete them if there is no folder."""
        with self._moving:
            now = self.clock()
            for session in list(self._all.values()):
                if session.state is None or session.busy or now - session.used < self.idle:
                    continue
                if self.folder is None:
                    del self._all[session.id]
                    self.forgotten += 1
                else:
                    self._store(session)

    def store_all(self) -> None:
        """Store all sessions to disk before shutdown; without a folder they are lost."""
        with self._moving:
            for session in self._all.values():
                if session.state is not None and self.folder is not None:
                    with suppress(Refusal):  # it is in the log; the others are stored all the same
                        self._store(session)

    def _free(self, id: str) -> Session:
        # Only ids that the server made become part of a path.
        session = self._all.get(id) if NAME.fullmatch(id) else None
        if session is None:
            raise Refusal(404, "no_such_session", "no such session; it may have been deleted, or have expired")
        if session.busy:
            raise Refusal(409, "session_busy", f"session {id} is in use by another request; wait for its end")
        return session

    def _make_room(self) -> None:
        resident = [session for session in self._all.values() if session.state is not None]
        if len(resident) < self.resident_limit:
            return
        if self.folder is None:
            message = f"the server has {self.resident_limit} sessions, its limit without --sessions DIR; delete one"
            raise Refusal(429, "too_many_sessions", message)
        free = [session for session in resident if not session.busy]
        if not free:
            message = f"all {self.resident_limit} sessions in memory are in use; try again later"
            raise Refusal(429, "too_many_sessions", message, retry_after=1)
        self._store(min(free, key=lambda session: session.used))

    def _store(self, session: Session) -> None:
        self._write(session, AWAY)
        session.state = None
        self.stored += 1

    def _write(self, session: Session, ending: str) -> None:
        assert session.state is not None
        try:
            self.states.write(self._path(session, ending), session.state)
        except CompressiveError as error:
            logging.getLogger(__name__).error("%s", error)
            raise Refusal(507, "storage", f"session {session.id} could not be written to disk; see the log") from None

    def _load(self, session: Session) -> State:
        away = self._path(session, AWAY)
        return self._read(session, away if away.is_file() else self._path(session, SAVED))

    def _read(self, session: Session, path: Path) -> State:
        try:
            return self.states.read(path)
        except CompressiveError as error:
            message = str(error).removeprefix(f"{path}: ")  # clients must not learn paths
            raise Refusal(409, "session_unreadable", f"session {session.id} cannot be loaded: {message}") from None

    def _path(self, session: Session, ending: str) -> Path:
        assert self.folder is not None
        return self.folder / (session.id + ending)


def _no_folder(what: str) -> Refusal:
    return Refusal(409, "no_folder", f"sessions cannot be {what}: the server was started without --sessions DIR")
