"""The thread that works with the model: for all sessions together, a segment or a token at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention.positions import PositionCache
from ...generate import CachedDecoder
from ...memory import join
from ...model import CompressiveTransformer
from ...model.embedding import token_nats
from .errors import Refusal, gone, stopping
from .jobs import Job
from .state import State


@dataclass(eq=False)
class Slot:
    """A job that writes. Its place in the list of slots is that of its lane in the decoder."""

    job: Job
    logits: Tensor
    """Logits of the next token, `[vocab_size]`."""


class Worker:
    """Continuous batching: each iteration prefills at most a segment for some sessions, then decodes a token for each
    session that writes.

    So no text delays others for longer than its share. Each batch is one pass of the model, whose lanes may have any
    ages.
    """

    def __init__(self, model: CompressiveTransformer, *, batch_size: int, queue: int) -> None:
        """Start the thread.

        Args:
            model: The model, in evaluation mode.
            batch_size: Sessions that are read, or written, in one pass.
            queue: Requests that may wait or run at the same time.
        """
        self.model, self.batch_size, self.queue = model, batch_size, queue
        self.tokens_read = self.tokens_written = 0
        self._decoder, self._position_cache = CachedDecoder(model), PositionCache()
        self._changed = threading.Condition()
        self._new: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        self._joining: deque[Job] = deque()
        self._slots: list[Slot] = []
        self._state_requests: deque[tuple[Job, Future[State]]] = deque()
        self._unfinished = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return self._unfinished

    @property
    def alive(self) -> bool:
        """True until the worker stops."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, job: Job) -> None:
        """Queue a job. Raises Refusal if too many wait, and while stopping."""
        with self._changed:
            if self._stopping:
                raise stopping()
            if self._unfinished >= self.queue:
                message = f"{self.queue} requests wait or run, the limit of this server; try again later"
                raise Refusal(429, "queue_full", message, retry_after=1)
            self._unfinished += 1
            self._new.append(job)
            self._changed.notify()

    def current_state(self, job: Job) -> State:
        """Return the state of a job between two of its tokens or segments. Raises Refusal while stopping."""
        future: Future[State] = Future()
        with self._changed:
            if self._stopping:
                raise stopping()
            self._state_requests.append((job, future))
            self._changed.notify()
        return future.result()

    def stop(self) -> None:
        """Stop: written text is kept up to here, texts that are not read to their end are discarded."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while self._wait():
            self._drop_cancelled()
            self._answer_state_requests()
            if self._reading:
                self._read()
            self._take_turns()
            if self._slots:
                self._write()
        while self._slots:
            self._end(self._free(len(self._slots) - 1), "stopping")
        for job in self._joining:
            self._end(job, "stopping")
        for job in (*self._new, *self._reading):
            self._fail(job, stopping())
        for _, future in self._state_requests:
            future.set_exception(stopping())

    def _wait(self) -> bool:
        """Wait for work, and sort new jobs in; return False when stopping."""
        with self._changed:
            work = (self._new, self._state_requests, self._reading, self._joining, self._slots)
            while not (self._stopping or any(work)):
                self._changed.wait()
            while self._new and not self._stopping:
                self._sort(self._new.popleft())
            return not self._stopping

    def _answer_state_requests(self) -> None:
        while self._state_requests:
            job, future = self._state_requests.popleft()
            state = job.state
            for place, slot in enumerate(self._slots):
                if slot.job is job:
                    state = job.written(self._decoder.lane(place), slot.logits)
            future.set_result(state)

    def _sort(self, job: Job) -> None:
        if len(job.left):
            self._reading.append(job)
        elif job.writing is not None:
            self._joining.append(job)
        else:
            self._end(job, "read")

    def _drop_cancelled(self) -> None:
        """End jobs of clients that disconnected: written text is kept, a text that was not read whole is not."""
        self._end_slots(lambda job: "cancelled" if job.cancelled else "")
        for job in [job for job in self._joining if job.cancelled]:
            self._joining.remove(job)
            self._end(job, "cancelled")
        for job in [job for job in self._reading if job.cancelled]:
            self._reading.remove(job)
            self._fail(job, gone())

    @torch.no_grad()
    def _read(self) -> None:
        """Read up to the end of a segment for the sessions whose turn it is."""
        jobs = [self._reading.popleft() for _ in range(min(self.batch_size, len(self._reading)))]
        lengths = torch.tensor([job.room for job in jobs])
        tokens = torch.zeros(len(jobs), int(lengths.max()), dtype=torch.int64)
        for row, job in zip(tokens, jobs, strict=True):
            row[: job.room] = job.left[: job.room]
        try:
            memory = join([job.state.memory for job in jobs])
            device = self.model.embedding.weight.device
            output = self.model(tokens.to(device), memory, lengths, position_cache=self._position_cache)
            for lane, (job, length) in enumerate(zip(jobs, lengths.tolist(), strict=True)):
                job.read(output.memory.select(torch.tensor([lane])), output.logits[lane, :length])
        except Exception as error:
            for job in jobs:
                self._fail(job, _unexpected(error))
            return
        self.tokens_read += int(lengths.sum())
        for job in jobs:
            self._sort(job)

    def _take_turns(self) -> None:
        """Give slots to waiting jobs: free ones, or those of jobs that have written a segment in their turn."""
        while self._joining:
            if len(self._slots) == self.batch_size:
                place = max(range(self.batch_size), key=lambda place: self._slots[place].job.turn)
                if self._slots[place].job.turn < self.model.config.segment_length:
                    return
                self._joining.append(self._free(place))
            self._join(self._joining.popleft())

    def _join(self, job: Job) -> None:
        try:
            assert job.state.logits is not None
            self._decoder.join(job.state.memory)
        except Exception as error:
            self._fail(job, _unexpected(error))
            return
        self._slots.append(Slot(job, job.state.logits))

    @torch.no_grad()
    def _write(self) -> None:
        """Write one token for each slot."""
        try:
            drawn = torch.tensor([slot.job.draw(slot.logits) for slot in self._slots])
            logits = torch.stack([slot.logits for slot in self._slots])
            tokens = drawn.to(logits.device)
            nats = token_nats(logits[None], tokens[None])[0].tolist()
            logits = self._decoder.step(tokens)
        except Exception as error:
            for slot in self._slots:
                self._fail(slot.job, _unexpected(error))
            self._slots, self._decoder = [], CachedDecoder(self.model)
            return
        self.tokens_written += len(nats)
        for slot, row, token, token_nat in zip(self._slots, logits, drawn.tolist(), nats, strict=True):
            slot.logits = row
            slot.job.wrote(token, token_nat)
        self._end_slots(lambda job: job.reason)

    def _end_slots(self, reason: Callable[[Job], str]) -> None:
        """End the jobs of slots for which there is a reason."""
        for place in reversed(range(len(self._slots))):
            if why := reason(self._slots[place].job):
                self._end(self._free(place), why)

    def _free(self, place: int) -> Job:
        """Free a slot and return its job, paused; the last slot moves there, as its lane does in the decoder."""
        slot, last = self._slots[place], self._slots.pop()
        if slot is not last:
            self._slots[place] = last
        slot.job.pause(self._decoder.leave(place), slot.logits.clone())
        return slot.job

    def _end(self, job: Job, reason: str) -> None:
        self._unfinished -= 1
        job.finish(reason)

    def _fail(self, job: Job, refusal: Refusal) -> None:
        self._unfinished -= 1
        job.fail(refusal)


def _unexpected(error: Exception) -> Refusal:
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return Refusal(500, "internal", "internal server error; the session is unchanged, see the log of the server")
