"""The server without HTTP: many sessions of one model, at constant memory each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ...data.tokenizers import Tokenizer
from ...errors import CompressiveError
from ...generate import Sampling, StreamState
from ...model import CompressiveTransformer
from .errors import Refusal, stopping
from .jobs import Event, Job, Writer
from .limits import DEFAULT_LIMITS, Limits
from .sessions import Sessions
from .worker import Worker

OnEvent = Callable[[Event], None]
NO_TOKENS = torch.zeros(0, dtype=torch.int64)


class Engine:
    """Sessions of one model. All methods are thread-safe, and raise Refusal beyond the limits.

    One thread runs the model. `read`, `write` and `complete` return a job without waiting for it, and call `on_event`
    in that thread: `TokensRead` or `TokenWritten` in order, then `Finished` or `Failed`. Set `job.cancelled` to end it.

    Args:
        model: The model, which is set to evaluation mode.
        tokenizer: Its tokenizer.
        limits: Limits of sessions and requests.
        folder: Folder for sessions that are saved or unused; without one, sessions are in main memory only.

    Raises:
        CompressiveError: The tokenizer is not the model's, or the folder cannot be used.
    """

    def __init__(
        self,
        model: CompressiveTransformer,
        tokenizer: Tokenizer,
        limits: Limits = DEFAULT_LIMITS,
        folder: str | Path | None = None,
    ) -> None:
        if tokenizer.vocab_size != model.config.vocab_size:
            raise CompressiveError(
                f"the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}; "
                "use the tokenizer that the model was trained with"
            )
        self.model, self.tokenizer, self.limits = model.eval(), tokenizer, limits
        self.sessions = Sessions(model, tokenizer, limits, None if folder is None else Path(folder))
        self.worker = Worker(model, batch_size=limits.batch_size, queue=limits.queue)
        self._jobs: dict[str, Job] = {}  # running, by id of the session
        self._changing = threading.Lock()  # held for a moment while a job of a session starts or ends
        self._stopped, self._stopping = False, threading.Lock()

    def create(self) -> str:
        """Return the id of a new session, at the start of a document."""
        return self.sessions.add(StreamState.start(self.model))

    def fork(self, id: str) -> str:
        """Return the id of a new session with the same state; afterwards they are independent."""
        return self.sessions.add(self.state(id))

    def state(self, id: str) -> StreamState:
        """Return the state of a session. Raises Refusal if it is busy."""
        with self.sessions.acquired(id) as state:
            return state

    def current_state(self, id: str) -> StreamState:
        """Return the present state of a session, also while it is busy."""
        with self._changing:
            job = self._jobs.get(id)
        return self.state(id) if job is None else self.worker.current_state(job)

    def encode(self, text: str) -> Tensor:
        """Return the token ids of a text, `[tokens]`. Raises CompressiveError if the tokenizer cannot encode it."""
        return torch.as_tensor(self.tokenizer.encode(text), dtype=torch.int64)

    def read(self, id: str, tokens: Tensor, on_event: OnEvent) -> Job:
        """Append a text to a session. If it cannot be read completely, the session is unchanged.

        Args:
            id: The session.
            tokens: The text, `[tokens]`.
            on_event: Callback for events.

        Returns:
            The job.

        Raises:
            Refusal: The session is unknown or busy, the queue is full, or the engine stops.
        """
        return self._start(id, tokens, Writer(self.tokenizer, 0, Sampling()), on_event)

    def write(self, id: str, tokens: int, sampling: Sampling, on_event: OnEvent) -> Job:
        """Generate text in a session.

        Args:
            id: The session.
            tokens: Number of tokens to generate.
            sampling: How they are chosen, and where the text ends early.
            on_event: Callback for events.

        Returns:
            The job.

        Raises:
            Refusal: `tokens` is out of range, the session is unknown or busy, the queue is full, or the engine stops.
        """
        return self._start(id, NO_TOKENS, self._writer(tokens, sampling), on_event)

    def complete(self, prompt: Tensor, tokens: int, sampling: Sampling, on_event: OnEvent) -> Job:
        """Generate text after a prompt `[tokens]`, without a session. It takes and raises the same as `write`."""
        writer = self._writer(tokens, sampling)
        start = StreamState.start(self.model)
        job = Job(self.model, start, prompt, writer, on_event=on_event, on_end=lambda state: None)
        self.worker.submit(job)
        return job

    def stop(self) -> None:
        """End all jobs, and offload sessions if there is a folder. It may be called again."""
        with self._stopping:  # a second caller waits until everything is written
            if not self._stopped:
                self.worker.stop()
                self.sessions.offload_all()
                self._stopped = True

    def _start(self, id: str, tokens: Tensor, writer: Writer, on_event: OnEvent) -> Job:
        """Start a job that has a session until it ends."""
        if not self.worker.alive:
            raise stopping()
        session = self.sessions.acquire(id)
        assert session.state is not None

        def end(state: StreamState | None) -> None:
            with self._changing:
                self._jobs.pop(id, None)
                self.sessions.release(session, state)

        try:
            job = Job(self.model, session.state, tokens, writer, on_event=on_event, on_end=end)
            with self._changing:
                self._jobs[id] = job
            self.worker.submit(job)
        except BaseException:
            end(None)
            raise
        return job

    def _writer(self, tokens: int, sampling: Sampling) -> Writer:
        limit = self.limits.max_tokens
        if not 1 <= tokens <= limit:
            message = f"tokens ({tokens}) must be 1 to {limit}, the server's --max-tokens"
            raise Refusal(422, "too_many_tokens", message)
        return Writer(self.tokenizer, tokens, sampling)
