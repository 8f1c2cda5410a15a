"""Events of a job, from the worker thread to the request that waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from .engine import OnEvent
from .errors import cancelled
from .jobs import Event, Failed, Finished, Job, TokensRead, TokenWritten


async def run_job(
    request: Request, start: Callable[[OnEvent], Job]
) -> AsyncIterator[TokensRead | TokenWritten | Finished]:
    """Start a job and return an iterator over its events, the last one `Finished`.

    If the client disconnects, the job is cancelled. Raises Refusal if the job cannot start, before any event, or fails.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def on_event(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(queue.put_nowait, event)

    # Acquiring a session may read a file.
    return _events(request, queue, await run_in_threadpool(start, on_event))


async def _events(
    request: Request, queue: asyncio.Queue[Event], job: Job
) -> AsyncIterator[TokensRead | TokenWritten | Finished]:
    metrics, first = request.app.state.metrics, True
    disconnect = asyncio.ensure_future(_disconnected(request))
    disconnect.add_done_callback(lambda _: queue.put_nowait(Failed(cancelled())))
    try:
        while True:
            event = await queue.get()
            if isinstance(event, Failed):
                raise event.refusal
            if first and isinstance(event, TokenWritten):
                first = False
                metrics.first_token.observe(time.perf_counter() - request.scope["began"])
            yield event
            if isinstance(event, Finished):
                return
    finally:
        job.cancelled = True
        if disconnect.done():
            metrics.cancelled.inc()
        disconnect.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
