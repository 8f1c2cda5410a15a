"""Events of a job, from the worker's thread to the request that waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from .errors import gone
from .jobs import Event, Failed, Finished, Job, OnEvent, TokensRead, TokenWritten

Progress = TokensRead | TokenWritten | Finished


class Start(Protocol):
    """Starts a job."""

    def __call__(self, on_event: OnEvent, /) -> Job:
        """Return the job, which calls `on_event` with its events."""


async def run_job(request: Request, start: Start) -> AsyncIterator[Progress]:
    """Start a job and return its events, of which `Finished` is the last; it is cancelled if the client disconnects.

    Raises Refusal if the job cannot start, before any event, and if it fails.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def on_event(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(queue.put_nowait, event)

    # Taking a session may read a file.
    job = await run_in_threadpool(start, on_event)
    return _events(request, queue, job)


async def _events(request: Request, queue: asyncio.Queue[Event], job: Job) -> AsyncIterator[Progress]:
    left = asyncio.ensure_future(_disconnected(request))
    left.add_done_callback(lambda _: queue.put_nowait(Failed(gone())))
    try:
        while True:
            event = await queue.get()
            if isinstance(event, Failed):
                raise event.refusal
            yield event
            if isinstance(event, Finished):
                return
    finally:
        job.cancelled = True
        left.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
