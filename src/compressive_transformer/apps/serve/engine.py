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
from .jobs import Event, Job, Writing
from .sessions import Sessions
from .state import State, States
from .worker import Worker


@dataclass(frozen=True)
class Limits:
    """What a server takes in; more is refused and told so."""

    resident: int = 64
    """Sessions in main memory; with --sessions those used least recently go to disk and return when asked for."""
    stored: int = 1024
    """Sessions altogether, those on disk included."""
    idle: float = 3600.0
    """Seconds after which an unused session goes to disk; without --sessions it is forgotten."""
    queue: int = 128
    """Requests that wait or are worked on at once."""
    batch_size: int = 16
    """Sessions that the model reads, and writes, in one pass."""
    request_bytes: int = 1_048_576
    """Bytes of one request."""
    max_tokens: int = 4096
    """Tokens that one request may write."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) <= 0:
                raise CompressiveError(f"{limit.name} ({getattr(self, limit.name)}) must be more than 0")


class Engine:
    """What the server does, without the web: each method is safe to call from any thread.

    Work on the model is done by one thread; `read`, `write` and `complete` return at once with a job, whose events are
    told from there. What is asked too much raises Refusal.
    """

    def __init__(
        self,
        model: CompressiveTransformer,
        tokenizer: Tokenizer,
        limits: Limits = Limits(),
        folder: str | Path | None = None,
    ) -> None:
        """
        folder: Where sessions go that are saved, or not used; without it they are in main memory alone.

        Raises CompressiveError for a tokenizer that is not the model's and for a folder that cannot be used.
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
        self._jobs: dict[str, Job] = {}  # those that work with a session, by its id
        self._working = threading.Lock()  # held while they begin and end, never while anything is done
        self._stopped, self._stopping = False, threading.Lock()

    def create(self) -> str:
        """The id of a new session, at the start of a document."""
        return self.sessions.add(self.states.empty())

    def fork(self, id: str) -> str:
        """The id of a new session that stands where this one does; they share nothing that changes."""
        return self.sessions.add(self.state(id))

    def state(self, id: str) -> State:
        """Where a session stands."""
        with self.sessions.taken(id) as session:
            assert session.state is not None
            return session.state

    def look(self, id: str) -> State:
        """Where a session stands now, also while another request works with it."""
        with self._working:
            job = self._jobs.get(id)
        return self.state(id) if job is None else self.worker.look(job)

    def encode(self, text: str) -> torch.Tensor:
        """The ids `[tokens]` of a text. Raises CompressiveError for one that the tokenizer cannot hold."""
        return torch.as_tensor(self.tokenizer.encode(text), dtype=torch.int64)

    def read(self, id: str, tokens: torch.Tensor, tell: Callable[[Event], None]) -> Job:
        """Append `tokens [tokens]` to a session. `tell` has their nats in order, then the end.

        What cannot be read to its end leaves the session where it was.
        """
        return self._on_session(id, tokens, None, tell)

    def write(self, id: str, tokens: int, sampling: Sampling, tell: Callable[[Event], None]) -> Job:
        """Let the model go on in a session. `tell` has each token as it is written, then the end."""
        return self._on_session(id, torch.zeros(0, dtype=torch.int64), self._writing(tokens, sampling), tell)

    def complete(self, prompt: torch.Tensor, tokens: int, sampling: Sampling, tell: Callable[[Event], None]) -> Job:
        """What the model writes after `prompt [tokens]`, with a memory of its own that nothing is kept of."""
        writing = self._writing(tokens, sampling)
        job = self._job(self.states.empty(), prompt, writing, tell, lambda state: None)
        self.worker.submit(job)
        return job

    def stop(self) -> None:
        """End all work, and put sessions away where there is a folder. Once is enough, more do no harm."""
        with self._stopping:  # who calls while another does so waits until all is kept
            if not self._stopped:
                self.worker.stop()
                self.sessions.put_away_all()
                self._stopped = True

    def _on_session(self, id: str, tokens: torch.Tensor, writing: Writing | None, tell: Callable[[Event], None]) -> Job:
        if not self.worker.alive:
            raise stopping()
        session = self.sessions.take(id)
        try:
            assert session.state is not None

            def ended(state: State | None) -> None:
                with self._working:  # so that it is either busy with this job, or free
                    self._jobs.pop(id, None)
                    self.sessions.give(session, state)

            job = self._job(session.state, tokens, writing, tell, ended)
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
        tell: Callable[[Event], None],
        ended: Callable[[State | None], None],
    ) -> Job:
        return Job(self.states, state, tokens, tokenizer=self.tokenizer, writing=writing, tell=tell, ended=ended)

    def _writing(self, tokens: int, sampling: Sampling) -> Writing:
        if not 1 <= tokens <= self.limits.max_tokens:
            raise Refusal(
                422,
                "too_many_tokens",
                f"tokens ({tokens}) must be 1 to {self.limits.max_tokens}, the server's --max-tokens",
            )
        return Writing(tokens, sampling)
