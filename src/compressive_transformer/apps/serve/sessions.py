"""The sessions of a server: some in main memory, the others in files under names that the server made."""

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
    """One session; `state` is None while it is in a file only."""

    id: str
    state: State | None
    used: float
    """When it was last used, by the clock of its `Sessions`."""
    busy: bool = False
    """Whether a request works with it."""


@dataclass
class Sessions:
    """All sessions by their ids. Those used least recently go to `folder` where there are too many, and come back.

    A request takes a session, so that no other does, and gives it back. `Refusal` says what cannot be done.
    """

    states: States
    folder: Path | None
    resident_limit: int
    """Sessions in main memory."""
    total_limit: int
    """Sessions altogether."""
    idle: float
    """Seconds without a request after which a session goes to `folder`, or is forgotten where there is none."""
    clock: Callable[[], float] = time.monotonic
    put_away: int = 0
    """How often a session went to its file."""
    came_back: int = 0
    """How often one came back."""
    forgotten: int = 0
    """How many were forgotten for want of a folder."""
    _all: dict[str, Session] = field(default_factory=dict)
    # Held while sessions come, go, or move between memory and disk; the worker, which gives back, never waits for it.
    _moving: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = {path.name.partition(".")[0] for path in self.folder.glob(f"*{AWAY}")}
        except OSError as error:
            raise CompressiveError(f"{self.folder}: cannot hold sessions: {error.strerror}") from None
        self._all = {name: Session(name, None, self.clock()) for name in names if NAME.fullmatch(name)}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def resident(self) -> int:
        """Sessions in main memory."""
        return sum(session.state is not None for session in list(self._all.values()))

    def add(self, state: State) -> str:
        """The id of a new session."""
        with self._moving:
            if len(self._all) >= self.total_limit:
                message = f"there are {self.total_limit} sessions, the most that this server keeps; delete some"
                raise Refusal(429, "too_many_sessions", message)
            self._make_room()
            session = Session(secrets.token_hex(16), state, self.clock())
            self._all[session.id] = session
            return session.id

    def take(self, id: str) -> Session:
        """The session of an id, in main memory and busy. Raises Refusal for an unknown one and for one that is busy."""
        with self._moving:
            session = self._free(id)
            if session.state is None:
                self._make_room()
                session.state = self._load(session)
                self.came_back += 1
            session.busy = True
            return session

    def give(self, session: Session, state: State | None = None) -> None:
        """End of a request; the session stands at `state` now, where it was before without one."""
        if state is not None:
            session.state = state
        session.used = self.clock()
        session.busy = False

    @contextmanager
    def taken(self, id: str) -> Iterator[Session]:
        """`take` and `give` around what is done at once."""
        session = self.take(id)
        try:
            yield session
        finally:
            self.give(session)

    def save(self, id: str) -> State:
        """Write where a session stands to a file, to which `restore` goes back, and a server that has crashed."""
        if self.folder is None:
            raise _no_folder("saved")
        with self.taken(id) as session:
            self._write(session, SAVED)
            self._path(session, AWAY).unlink(missing_ok=True)  # what is older than the saved file is not gone back to
            assert session.state is not None
            return session.state

    def restore(self, id: str) -> State:
        """Set a session back to where it was last saved."""
        if self.folder is None:
            raise _no_folder("restored")
        with self._moving:
            session = self._free(id)
            saved = self._path(session, SAVED)
            if not saved.is_file():
                raise Refusal(409, "never_saved", f"session {id} was never saved: save it before")
            if session.state is None:
                self._make_room()
            session.state = state = self._read(session, saved)
            session.used = self.clock()
            self._path(session, AWAY).unlink(missing_ok=True)
            return state

    def delete(self, id: str) -> None:
        """Forget a session, and its files."""
        with self._moving:
            session = self._free(id)
            if self.folder is not None:
                for ending in (AWAY, SAVED):
                    self._path(session, ending).unlink(missing_ok=True)
            del self._all[id]

    def put_away_idle(self) -> None:
        """Bring sessions that nobody uses to their files, or forget them where there is no folder."""
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

    def put_away_all(self) -> None:
        """Bring all to their files, for the time when the server is not there; without a folder nothing is kept."""
        with self._moving:
            for session in self._all.values():
                if session.state is not None and self.folder is not None:
                    with suppress(Refusal):  # the log has it; the others are to be kept all the same
                        self._store(session)

    def _free(self, id: str) -> Session:
        # An id is looked up among those that the server made; nothing else of a request becomes part of a path.
        session = self._all.get(id) if NAME.fullmatch(id) else None
        if session is None:
            raise Refusal(404, "no_such_session", "there is no such session; it may have been deleted or forgotten")
        if session.busy:
            raise Refusal(
                409, "session_busy", f"session {id} is in use by another request; wait for its end, or fork it before"
            )
        return session

    def _make_room(self) -> None:
        resident = [session for session in self._all.values() if session.state is not None]
        if len(resident) < self.resident_limit:
            return
        if self.folder is None:
            message = (
                f"there are {self.resident_limit} sessions, the most that this server keeps, since it was started "
                "without --sessions DIR; delete one"
            )
            raise Refusal(429, "too_many_sessions", message)
        free = [session for session in resident if not session.busy]
        if not free:
            message = f"all {self.resident_limit} sessions that fit into memory are in use; ask again later"
            raise Refusal(429, "too_many_sessions", message, retry_after=1)
        self._store(min(free, key=lambda session: session.used))

    def _store(self, session: Session) -> None:
        self._write(session, AWAY)
        session.state = None
        self.put_away += 1

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
            message = str(error).removeprefix(f"{path}: ")  # where files lie is nobody's affair
            raise Refusal(409, "session_unreadable", f"session {session.id} cannot come back: {message}") from None

    def _path(self, session: Session, ending: str) -> Path:
        assert self.folder is not None
        return self.folder / (session.id + ending)


def _no_folder(what: str) -> Refusal:
    return Refusal(409, "no_folder", f"sessions cannot be {what}: the server was started without --sessions DIR")
