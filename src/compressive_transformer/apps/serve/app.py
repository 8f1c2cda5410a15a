"""The web application: sessions, completions in OpenAI's format, health, metrics and the page."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from ...generate import StreamState
from .completions import router as completions
from .engine import Engine
from .errors import Refusal
from .events import run_job
from .jobs import Finished, TokensRead, TokenWritten
from .memory_view import pieces_of, slots_of
from .metrics import Metrics
from .middleware import Guard
from .page import page
from .requests import Append, Generate
from .responses import ERROR_HANDLERS, event_stream

BITS = 1 / math.log(2)
MAX_PIECES_BYTES = 65_536
"""Bytes of a text whose pieces are returned, at most: they take many times its size."""
OFFLOAD_EVERY = 30.0
"""Seconds between two searches for idle sessions, at most."""


def create_app(engine: Engine, name: str, *, token: str | None = None, hosts: tuple[str, ...] | None = None) -> FastAPI:
    """Return the application of an engine, which it stops at its end.

    Args:
        engine: The engine.
        name: Name of the model.
        token: Token that requests must have, but for the page and /health; None for no token.
        hosts: Allowed host names; None for any.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        offloading = asyncio.create_task(_offload_idle(engine))
        try:
            yield
        finally:
            offloading.cancel()
            await run_in_threadpool(engine.stop)

    # Without FastAPI's pages, which load scripts from other hosts.
    app = FastAPI(
        title="Compressive Transformer",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
        exception_handlers=ERROR_HANDLERS,
    )
    app.state.engine, app.state.name, app.state.metrics = engine, name, Metrics(engine)
    for router in (sessions, completions, page):
        app.include_router(router)
    on_response = app.state.metrics.on_response
    app.add_middleware(Guard, max_bytes=engine.limits.request_bytes, token=token, hosts=hosts, on_response=on_response)
    return app


async def _offload_idle(engine: Engine) -> None:
    while True:
        await asyncio.sleep(min(OFFLOAD_EVERY, engine.limits.idle / 2))
        with contextlib.suppress(Refusal):  # a full disk, which is logged
            await run_in_threadpool(engine.sessions.offload_idle)


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


RequestEngine = Annotated[Engine, Depends(_engine)]
sessions = APIRouter()


@sessions.get("/health")
def health(engine: RequestEngine) -> JSONResponse:
    """Return status 200, or 503 if the server stops."""
    alive = engine.worker.alive
    content = {"status": "ok" if alive else "stopping", "sessions": len(engine.sessions)}
    return JSONResponse({**content, "queue": engine.worker.unfinished}, 200 if alive else 503)


@sessions.get("/metrics")
def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' format."""
    return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@sessions.post("/sessions", status_code=201)
def create(engine: RequestEngine) -> dict[str, Any]:
    """Create a session."""
    return {"id": engine.create(), "tokens": 0}


@sessions.get("/sessions/{id}")
def describe(id: str, engine: RequestEngine) -> dict[str, Any]:
    """Return the number of tokens in a session."""
    return _summary(id, engine.state(id))


@sessions.delete("/sessions/{id}", status_code=204)
def delete(id: str, engine: RequestEngine) -> None:
    """Delete a session and its files."""
    engine.sessions.delete(id)


@sessions.post("/sessions/{id}/fork", status_code=201)
def fork(id: str, engine: RequestEngine) -> dict[str, Any]:
    """Create a session with the state of another one."""
    new = engine.fork(id)
    return _summary(new, engine.state(new))


@sessions.post("/sessions/{id}/save")
def save(id: str, engine: RequestEngine) -> dict[str, Any]:
    """Save the state of a session to disk."""
    return _summary(id, engine.sessions.save(id))


@sessions.post("/sessions/{id}/restore")
def restore(id: str, engine: RequestEngine) -> dict[str, Any]:
    """Return a session to its saved state."""
    return _summary(id, engine.sessions.restore(id))


@sessions.get("/sessions/{id}/memory")
def memory(id: str, engine: RequestEngine, layer: int = 0) -> dict[str, Any]:
    """Return the content of each slot of a layer, also while the session is busy."""
    return slots_of(engine.model, engine.tokenizer, engine.current_state(id), layer)


@sessions.post("/sessions/{id}/append")
async def append(id: str, content: Append, request: Request, engine: RequestEngine) -> JSONResponse:
    """Read a text and return its bits."""
    size = len(content.text.encode("utf-8", "surrogatepass"))  # the tokenizer refuses surrogates
    if content.pieces and size > MAX_PIECES_BYTES:
        message = f"a text with pieces may have {MAX_PIECES_BYTES:,} bytes, got {size:,}; append it in parts"
        raise Refusal(413, "too_large", message)
    tokens = await run_in_threadpool(engine.encode, content.text)
    events = await run_job(request, lambda on_event: engine.read(id, tokens, on_event))
    parts = [event.nats async for event in events if isinstance(event, TokensRead)]
    nats = torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
    bits = float(nats.sum()) * BITS
    answer: dict[str, Any] = {"tokens": len(nats), "bytes": size, "bits": bits}
    answer["bits_per_byte"] = bits / size if size else None
    if content.pieces:
        pieces = await run_in_threadpool(pieces_of, engine.tokenizer, tokens.tolist(), nats.tolist())
        answer["pieces"] = [{"text": text, "bits": nats * BITS} for text, nats in pieces]
    return JSONResponse(answer)


@sessions.post("/sessions/{id}/generate")
async def generate(id: str, content: Generate, request: Request, engine: RequestEngine) -> Response:
    """Generate text, as a stream of server-sent events or as one response."""
    events = await run_job(request, lambda on_event: engine.write(id, content.tokens, content, on_event))

    async def parts() -> AsyncIterator[tuple[str, dict[str, Any]]]:
        count, bits = 0, 0.0
        async for event in events:
            if isinstance(event, TokenWritten):
                count, bits = count + 1, bits + event.nats * BITS
                yield "token", {"text": event.text, "bits": event.nats * BITS}
            elif isinstance(event, Finished):
                yield "done", {"text": event.text, "reason": event.reason, "tokens": count, "bits": bits}

    if content.stream:
        return event_stream(parts(), error_name="error")
    answers = [part async for _, part in parts()]
    return JSONResponse({**answers[-1], "text": "".join(part["text"] for part in answers)})


def _summary(id: str, state: StreamState) -> dict[str, Any]:
    return {"id": id, "tokens": max(0, state.seen - 1)}  # without the start of the document
