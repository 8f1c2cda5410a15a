"""The one thread that reads and writes with the model: for all sessions at once, a segment or a token at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future

import torch
from torch import Tensor

from ...attention.positions import PositionCache
from ...generate import CachedDecoder
from ...memory import Memory, join
from ...model import CompressiveTransformer
from ...model.embedding import token_nats
from .errors import Refusal, gone, stopping
from .jobs import Job
from .state import State


class Worker:
    """Takes turns: at most a segment of text of each of some sessions, then one token of each that is being written.

    So a long text holds nobody up for longer than its share, and what is done together is one batch of the model,
    whose lanes stand anywhere in their segments.
    """

    def __init__(self, model: CompressiveTransformer, *, batch_size: int, queue: int) -> None:
        """
        batch: Sessions that are read, and those that are written, in one pass.
        queue: Requests that may wait or be worked on at once.
        """
        self.model, self.batch_size, self.queue = model, batch_size, queue
        self.tokens_read = self.tokens_written = 0
        self._decoder, self._distances = CachedDecoder(model), PositionCache()
        self._changed = threading.Condition()
        self._new: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        self._joining: deque[Job] = deque()
        self._writing: list[Job] = []  # by their places in the decoder
        self._logits: Tensor = model.embedding.weight.new_zeros(0)  # of the lanes that are written
        self._looks: deque[tuple[Job, Future[State]]] = deque()
        self._unfinished = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Requests that wait or are worked on."""
        return self._unfinished

    @property
    def alive(self) -> bool:
        """Whether work goes on."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, job: Job) -> None:
        """Take a job in. Raises Refusal where too many wait, and when stopping."""
        with self._changed:
            if self._stopping:
                raise stopping()
            if self._unfinished >= self.queue:
                raise Refusal(
                    429,
                    "queue_full",
                    f"{self.queue} requests are waiting or being worked on, which is all that this server takes in at "
                    "once; ask again later",
                    retry_after=1,
                )
            self._unfinished += 1
            self._new.append(job)
            self._changed.notify()

    def look(self, job: Job) -> State:
        """Where a job stands now, between two of its tokens or segments. Raises Refusal when stopping."""
        future: Future[State] = Future()
        with self._changed:
            if self._stopping:
                raise stopping()
            self._looks.append((job, future))
            self._changed.notify()
        return future.result()

    def stop(self) -> None:
        """End: what is being written ends where it is, what is being read is not kept; both are told so."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while self._take_in():
            self._drop_cancelled()
            self._show()
            if self._reading:
                self._read()
            self._take_turns()
            if self._writing:
                self._write()
        for place in reversed(range(len(self._writing))):
            self._leave(place, "stopping")
        for job in self._joining:
            self._end(job, "stopping")
        for job in (*self._new, *self._reading):
            self._fail(job, stopping())
        for _, future in self._looks:
            future.set_exception(stopping())

    def _take_in(self) -> bool:
        """Wait until there is work, and sort new jobs in; False when stopping."""
        with self._changed:
            while not (self._stopping or self._new or self._looks or self._reading or self._joining or self._writing):
                self._changed.wait()
            while self._new and not self._stopping:
                self._sort(self._new.popleft())
            return not self._stopping

    def _show(self) -> None:
        while self._looks:
            job, future = self._looks.popleft()
            state = job.state
            if job in self._writing:
                place = self._writing.index(job)
                state = job.written(self._decoder.lane(place), self._logits[place])
            future.set_result(state)

    def _sort(self, job: Job) -> None:
        if len(job.left):
            self._reading.append(job)
        elif job.writing is not None:
            self._joining.append(job)
        else:
            self._end(job, "read")

    def _drop_cancelled(self) -> None:
        """Stop working for those who have gone; what was written for them stays, what was not read whole does not."""
        for place in reversed(range(len(self._writing))):
            if self._writing[place].cancelled:
                self._leave(place, "cancelled")
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
            output = self.model(tokens.to(device), memory, lengths, position_cache=self._distances)
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
        """Let those who wait write, in free places or in those of others who have written a segment in their turn."""
        while self._joining:
            if len(self._writing) == self.batch_size:
                place = max(range(self.batch_size), key=lambda at: self._writing[at].turn)
                if self._writing[place].turn < self.model.config.segment_length:
                    return
                job, memory, logits = self._taken_out(place)
                job.pause(memory, logits)
                self._joining.append(job)
            self._join(self._joining.popleft())

    def _join(self, job: Job) -> None:
        try:
            self._decoder.join(job.state.memory)
            assert job.state.logits is not None
            logits = job.state.logits[None]
            self._logits = torch.cat([self._logits, logits]) if self._writing else logits
        except Exception as error:
            self._fail(job, _unexpected(error))
            return
        self._writing.append(job)

    @torch.no_grad()
    def _write(self) -> None:
        """Write one token for each session that is being written."""
        try:
            drawn = torch.tensor([job.draw(own) for job, own in zip(self._writing, self._logits, strict=True)])
            tokens = drawn.to(self._logits.device)
            nats = token_nats(self._logits[None], tokens[None])[0].tolist()
            self._logits = self._decoder.step(tokens)
        except Exception as error:
            for job in self._writing:
                self._fail(job, _unexpected(error))
            self._writing, self._decoder = [], CachedDecoder(self.model)
            return
        self.tokens_written += len(nats)
        for job, token, own in zip(self._writing, drawn.tolist(), nats, strict=True):
            job.wrote(token, own)
        for place in reversed(range(len(self._writing))):
            if self._writing[place].reason:
                self._leave(place, self._writing[place].reason)

    def _leave(self, place: int, reason: str) -> None:
        """End what is written at a place of the decoder."""
        job, memory, logits = self._taken_out(place)
        job.pause(memory, logits)
        self._end(job, reason)

    def _taken_out(self, place: int) -> tuple[Job, Memory, Tensor]:
        """The job at a place of the decoder, and where it stands; the last one takes its place, as there."""
        job, last = self._writing[place], self._writing.pop()
        memory, logits = self._decoder.leave(place), self._logits[place].clone()
        if job is not last:
            self._writing[place] = last
            self._logits[place] = self._logits[-1]
        self._logits = self._logits[:-1]
        return job, memory, logits

    def _end(self, job: Job, reason: str) -> None:
        self._unfinished -= 1
        job.finish(reason)

    def _fail(self, job: Job, refusal: Refusal) -> None:
        self._unfinished -= 1
        job.fail(refusal)


def _unexpected(error: Exception) -> Refusal:
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return Refusal(500, "internal", "the server failed to carry this out; nothing was kept of it, its log says more")
