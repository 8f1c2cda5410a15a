"""Sessions with unbounded history at constant memory, for many clients of one model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from ...data.tokenizers import Tokenizer
from ...errors import CompressiveError
from ...generate.sampling import Sampling
from ...model import CompressiveTransformer
from .errors import Refusal, stopping
from .jobs import Job, OnEvent, Writing
from .sessions import Sessions
from .state import State, States
from .worker import Worker


@dataclass(frozen=True)
class Limits:
    """Limits of a server; requests beyond them are refused with an error."""

    resident: int = 64
    """Sessions in main memory; with --sessions the least recently used are stored to disk and loaded on demand."""
    stored: int = 1024
    """Sessions in all, in memory and on disk."""
    idle: float = 3600.0
    """Seconds after which an unused session is stored to disk; without --sessions it is deleted."""
    queue: int = 128
    """Requests that wait or run at the same time."""
    batch_size: int = 16
    """Sessions that the model reads, or writes, in one batch."""
    request_bytes: int = 1_048_576
    """Bytes of a request."""
    max_tokens: int = 4096
    """Tokens that a request may generate."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) <= 0:
                raise CompressiveError(f"{limit.name} ({getattr(self, limit.name)}) must be more than 0")


class Engine:
    """The server without the web: every method is safe to call from any thread.

    One thread works with the model; `read`, `write` and `complete` return immediately with a job, whose events come
    from that thread. Requests beyond the limits raise Refusal.
    """

    def __init__(
        self,
        model: CompressiveTransformer,
        tokenizer: Tokenizer,
        limits: Limits = Limits(),
        folder: str | Path | None = None,
    ) -> None:
        """Start the engine.

        Args:
            model: The model.
            tokenizer: Its tokenizer.
            limits: Limits of sessions and requests.
            folder: Folder for sessions that are saved or unused; without it they live in main memory only.

        Raises:
            CompressiveError: The tokenizer does not belong to the model, or the folder cannot be used.
        """
        if tokenizer.vocab_size != model.config.vocab_size:
            raise CompressiveError(
                f"the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}; "
                "use the tokenizer that the model was trained with"
            )
        self.model, self.tokenizer, self.limits = model.eval(), tokenizer, limits
        self.states = States(model, tokenizer)
        self.sessions = Sessions(
            self.states, None if folder is None else Path(folder), limits.resident, limits.stored, limits.idle
        )
        self.worker = Worker(model, batch_size=limits.batch_size, queue=limits.queue)
        self._jobs: dict[str, Job] = {}  # running jobs, by the id of their session
        self._working = threading.Lock()  # held while jobs start and end, never while they run
        self._stopped, self._stopping = False, threading.Lock()

    def create(self) -> str:
        """Create a session at the start of a document, and return its id."""
        return self.sessions.add(self.states.empty())

    def fork(self, id: str) -> str:
        """Create a session from the state of another, and return its id; they share nothing that changes."""
        return self.sessions.add(self.state(id))

    def state(self, id: str) -> State:
        """Return the state of a session that is not busy."""
        with self.sessions.taken(id) as session:
            assert session.state is not None
            return session.state

    def current_state(self, id: str) -> State:
        """Return the state of a session, also while another request uses it."""
        with self._working:
            job = self._jobs.get(id)
        return self.state(id) if job is None else self.worker.current_state(job)

    def encode(self, text: str) -> torch.Tensor:
        """Return the ids `[tokens]` of a text. Raises CompressiveError if the tokenizer cannot encode it."""
        return torch.from_numpy(self.tokenizer.encode(text))

    def read(self, id: str, tokens: torch.Tensor, on_event: OnEvent) -> Job:
        """Append `tokens [tokens]` to a session; `on_event` gets their nats in order, then the end.

        If the job fails, the session is unchanged.
        """
        return self._on_session(id, tokens, None, on_event)

    def write(self, id: str, tokens: int, sampling: Sampling, on_event: OnEvent) -> Job:
        """Generate text in a session; `on_event` gets each token, then the end."""
        return self._on_session(id, torch.zeros(0, dtype=torch.int64), self._writing(tokens, sampling), on_event)

    def complete(self, prompt: torch.Tensor, tokens: int, sampling: Sampling, on_event: OnEvent) -> Job:
        """Generate text after `prompt [tokens]` in a temporary session."""
        writing = self._writing(tokens, sampling)
        job = self._job(self.states.empty(), prompt, writing, on_event, lambda state: None)
        self.worker.submit(job)
        return job

    def stop(self) -> None:
        """End all jobs, and store sessions if there is a folder; it may be called several times."""
        with self._stopping:  # a second caller waits until all is stored
            if not self._stopped:
                self.worker.stop()
                self.sessions.store_all()
                self._stopped = True

    def _on_session(self, id: str, tokens: torch.Tensor, writing: Writing | None, on_event: OnEvent) -> Job:
        if not self.worker.alive:
            raise stopping()
        session = self.sessions.take(id)
        try:
            assert session.state is not None

            def ended(state: State | None) -> None:
                with self._working:  # so that the session is either busy with this job, or free
                    self._jobs.pop(id, None)
                    self.sessions.give(session, state)

            job = self._job(session.state, tokens, writing, on_event, ended)
            with self._working:
                self._jobs[id] = job
            self.worker.submit(job)
        except BaseException:
            with self._working:
                self._jobs.pop(id, None)
                self.sessions.give(session)
            raise
        return job

    def _job(
        self,
        state: State,
        tokens: torch.Tensor,
        writing: Writing | None,
        on_event: OnEvent,
        ended: Callable[[State | None], None],
    ) -> Job:
        return Job(
            self.states, state, tokens, tokenizer=self.tokenizer, writing=writing, on_event=on_event, ended=ended
        )

    def _writing(self, tokens: int, sampling: Sampling) -> Writing:
        if not 1 <= tokens <= self.limits.max_tokens:
            raise Refusal(
                422,
                "too_many_tokens",
                f"tokens ({tokens}) must be 1 to {self.limits.max_tokens} (--max-tokens of the server)",
            )
        return Writing(tokens, sampling)
