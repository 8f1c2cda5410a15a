"""Events of a job, from the worker's thread to the request that waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from .errors import gone
from .jobs import Done, Event, Failed, Job, Read, Wrote


class Begin(Protocol):
    """What begins a job once it knows whom to tell."""

    def __call__(self, tell: Callable[[Event], None], /) -> Job:
        """The job, whose events `tell` is told."""


async def begun(request: Request, begin: Begin) -> AsyncIterator[Read | Wrote | Done]:
    """The events of the job that `begin` begins, the last one `Done`; when the client goes, the job is cancelled.

    Raises Refusal where the job cannot begin, before any event, and where it fails.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def tell(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
            loop.call_soon_threadsafe(queue.put_nowait, event)

    # Taking a session may read a file.
    job = await run_in_threadpool(begin, tell)
    return _events(request, queue, job)


async def _events(request: Request, queue: asyncio.Queue[Event], job: Job) -> AsyncIterator[Read | Wrote | Done]:
    left = asyncio.ensure_future(_disconnected(request))
    left.add_done_callback(lambda _: queue.put_nowait(Failed(gone())))
    try:
        while True:
            event = await queue.get()
            if isinstance(event, Failed):
                raise event.refusal
            yield event
            if isinstance(event, Done):
                return
    finally:
        job.cancelled = True
        left.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
