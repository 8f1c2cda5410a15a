"""The thread that runs the model, for all sessions."""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future

import torch

from ...attention.positions import PositionCache
from ...generate import StreamState
from ...memory import join
from ...model import CompressiveTransformer
from .errors import Refusal, cancelled, stopping
from .jobs import Job
from .lanes import JobLanes


class Worker:
    """Continuous batching in one thread.

    Each iteration prefills at most one segment per waiting job, then decodes one token per generating job, so a long
    text does not block the others. Jobs that generate more than a segment take turns if there are more than lanes.

    Args:
        model: The model.
        batch_size: Jobs per forward pass.
        queue: Waiting and running jobs, at most.
    """

    def __init__(self, model: CompressiveTransformer, *, batch_size: int, queue: int) -> None:
        self.model = model
        self.batch_size = batch_size
        self.queue = queue
        self.tokens_read = self.tokens_written = 0
        self._lanes, self._position_cache = JobLanes(model), PositionCache()
        self._changed = threading.Condition()
        self._new: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        self._waiting: deque[Job] = deque()  # for a lane
        self._state_requests: deque[tuple[Job, Future[StreamState]]] = deque()
        self._unfinished = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Number of waiting and running jobs."""
        return self._unfinished

    @property
    def alive(self) -> bool:
        """True until the worker stops."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, job: Job) -> None:
        """Enqueue a job. Raises Refusal if the queue is full or the worker stops."""
        with self._changed:
            if self._stopping:
                raise stopping()
            if self._unfinished >= self.queue:
                message = f"the queue is full: {self.queue} requests are waiting or running; retry later"
                raise Refusal(429, "queue_full", message, retry_after=1)
            self._unfinished += 1
            self._new.append(job)
            self._changed.notify()

    def current_state(self, job: Job) -> StreamState:
        """Return the state of a job between two tokens or segments. Raises Refusal if the worker stops."""
        future: Future[StreamState] = Future()
        with self._changed:
            if self._stopping:
                raise stopping()
            self._state_requests.append((job, future))
            self._changed.notify()
        return future.result()

    def stop(self) -> None:
        """Stop, and wait for it: generation ends with what was written, texts that are being read are discarded."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while self._accept():
            self._drop_cancelled()
            while self._state_requests:
                job, future = self._state_requests.popleft()
                future.set_result(self._lanes.state_of(job))
            if self._reading:
                self._prefill()
            self._fill_lanes()
            if self._lanes:
                self._decode()
        for job in (*map(self._lanes.leave, self._lanes), *self._waiting):
            self._finish(job, "stopping")
        for job in (*self._new, *self._reading):
            self._fail(job, stopping())
        for _, future in self._state_requests:
            future.set_exception(stopping())

    def _accept(self) -> bool:
        """Wait for work and enqueue new jobs; return False to stop."""
        with self._changed:
            while not any((self._stopping, self._new, self._state_requests, self._reading, self._waiting, self._lanes)):
                self._changed.wait()
            while self._new and not self._stopping:
                self._schedule(self._new.popleft())
            return not self._stopping

    def _schedule(self, job: Job) -> None:
        """Put a job where its next step is done, or end it."""
        if len(job.left):
            self._reading.append(job)
        elif job.writer.reason:
            self._finish(job, job.writer.reason)
        else:
            self._waiting.append(job)

    def _drop_cancelled(self) -> None:
        """End jobs of disconnected clients: generated text is kept, texts that were not read completely are not."""
        for lane in self._lanes:
            if lane.job.cancelled:
                self._finish(self._lanes.leave(lane), "cancelled")
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._finish(job, "cancelled")
        for job in [job for job in self._reading if job.cancelled]:
            self._reading.remove(job)
            self._fail(job, cancelled())

    def _prefill(self) -> None:
        """Read up to the next commit for the first jobs of the queue."""
        jobs = [self._reading.popleft() for _ in range(min(self.batch_size, len(self._reading)))]
        try:
            self._read(jobs)
        except Exception as error:
            self._fail_unexpectedly(jobs, error)
        else:
            for job in jobs:
                self._schedule(job)

    @torch.no_grad()
    def _read(self, jobs: list[Job]) -> None:
        chunks = [job.chunk for job in jobs]
        lengths = torch.tensor([len(chunk) for chunk in chunks])
        tokens = torch.nn.utils.rnn.pad_sequence(chunks, batch_first=True).to(self.model.embedding.weight.device)
        memory = join([job.state.memory for job in jobs])
        output = self.model(tokens, memory, lengths, position_cache=self._position_cache)
        for lane, (job, chunk) in enumerate(zip(jobs, chunks, strict=True)):
            job.read(output.memory.select(torch.tensor([lane])), output.logits[lane, : len(chunk)])
        self.tokens_read += int(lengths.sum())

    def _fill_lanes(self) -> None:
        """Let waiting jobs generate, in free lanes or instead of jobs that have generated a segment in their turn."""
        while self._waiting:
            if len(self._lanes) == self.batch_size:
                longest = max(self._lanes, key=lambda lane: lane.job.turn)
                if longest.job.turn < self.model.config.segment_length:
                    return
                self._schedule(self._lanes.leave(longest))
            job = self._waiting.popleft()
            try:
                self._lanes.join(job)
            except Exception as error:
                self._fail_unexpectedly([job], error)

    def _decode(self) -> None:
        """Generate one token in each lane."""
        try:
            self._lanes.step()
        except Exception as error:
            self._fail_unexpectedly([lane.job for lane in self._lanes], error)
            self._lanes = JobLanes(self.model)  # the state of the old ones is unknown
            return
        self.tokens_written += len(self._lanes)
        for lane in self._lanes:
            if lane.job.writer.reason:
                self._schedule(self._lanes.leave(lane))

    def _finish(self, job: Job, reason: str) -> None:
        self._unfinished -= 1
        job.finish(reason)

    def _fail(self, job: Job, refusal: Refusal) -> None:
        self._unfinished -= 1
        job.fail(refusal)

    def _fail_unexpectedly(self, jobs: list[Job], error: Exception) -> None:
        logging.getLogger(__name__).error("a request failed", exc_info=error)
        for job in jobs:
            self._fail(job, Refusal(500, "internal", "internal error: nothing was changed; see the server's log"))
