"""Web application: sessions, OpenAI's completions, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, get_type_hints

import torch
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ...errors import CompressiveError
from ...generate.sampling import Sampling
from .completions import router as completions
from .engine import Engine
from .errors import Refusal
from .events import run_job
from .jobs import Finished, TokensRead, TokenWritten
from .memory_view import pieces_of, slots_of
from .metrics import Metrics
from .middleware import Guard, error_body
from .page import page
from .state import State

BITS = 1 / math.log(2)
PIECES = 65_536
"""Limit of the bytes of a text with `pieces`, which take many times its memory."""
TIDY_EVERY = 30.0
"""Longest time between two checks for idle sessions, in seconds."""


class Strict(BaseModel):
    """Content of a request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class Append(Strict):
    """Text to read."""

    text: str
    pieces: bool = False
    """True to get the bits of each piece of the text."""


SAMPLING = {option.name: option for option in dataclasses.fields(Sampling)}
Options = create_model(  # type: ignore[call-overload]
    "Options",
    __base__=Strict,
    **{name: (get_type_hints(Sampling)[name], option.default) for name, option in SAMPLING.items()},
)


class Generate(Options):  # type: ignore[misc, valid-type]
    """Generation of text: the options of `Sampling`, and how much."""

    tokens: int = 200
    stop: str | Annotated[list[str], Field(max_length=4)] = Field(default_factory=list)
    stream: bool = True

    def sampling(self) -> Sampling:
        """Return the options of sampling."""
        return Sampling(**{name: getattr(self, name) for name in SAMPLING})


def create_app(engine: Engine, name: str, *, token: str | None = None, hosts: tuple[str, ...] | None = None) -> FastAPI:
    """Return the application of an engine; at its shutdown the engine stops and sessions are stored.

    Args:
        engine: The engine.
        name: Name of the model for clients.
        token: Token that requests must carry, except for the page and /health; None for none.
        hosts: Host names that requests may use; None for any.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tidying = asyncio.create_task(_tidy(engine))
        try:
            yield
        finally:
            tidying.cancel()
            await run_in_threadpool(engine.stop)

    # FastAPI's pages about itself load scripts from other servers.
    app = FastAPI(title="Compressive Transformer", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.engine, app.state.name, app.state.metrics = engine, name, Metrics(engine)
    app.include_router(sessions)
    app.include_router(completions)
    app.include_router(page)
    app.add_middleware(
        Guard, largest=engine.limits.request_bytes, token=token, hosts=hosts, on_request=app.state.metrics.request
    )
    app.add_exception_handler(CompressiveError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _failed)
    return app


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


Served = Annotated[Engine, Depends(_engine)]
sessions = APIRouter()


@sessions.get("/health")
def health(engine: Served) -> JSONResponse:
    """Report if the server works."""
    alive = engine.worker.alive
    content = {"status": "ok" if alive else "stopping", "sessions": len(engine.sessions)}
    return JSONResponse({**content, "queue": engine.worker.unfinished}, 200 if alive else 503)


@sessions.get("/metrics")
def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@sessions.post("/sessions", status_code=201)
def create(engine: Served) -> dict[str, Any]:
    """Create a session."""
    return {"id": engine.create(), "tokens": 0}


@sessions.get("/sessions/{id}")
def describe(id: str, engine: Served) -> dict[str, Any]:
    """Return the number of tokens in a session."""
    return _about(id, engine.state(id))


@sessions.delete("/sessions/{id}", status_code=204)
def delete(id: str, engine: Served) -> None:
    """Delete a session and its files."""
    engine.sessions.delete(id)


@sessions.post("/sessions/{id}/fork", status_code=201)
def fork(id: str, engine: Served) -> dict[str, Any]:
    """Create a session that continues from the current state of this one."""
    new = engine.fork(id)
    return _about(new, engine.state(new))


@sessions.post("/sessions/{id}/save")
def save(id: str, engine: Served) -> dict[str, Any]:
    """Save the state of a session to disk."""
    return _about(id, engine.sessions.save(id))


@sessions.post("/sessions/{id}/restore")
def restore(id: str, engine: Served) -> dict[str, Any]:
    """Reset a session to its saved state."""
    return _about(id, engine.sessions.restore(id))


@sessions.get("/sessions/{id}/memory")
def memory(id: str, engine: Served, layer: int = 0) -> dict[str, Any]:
    """Return the contents of the slots of a layer, also while the session reads or writes."""
    return slots_of(engine.model, engine.tokenizer, engine.current_state(id), layer)


@sessions.post("/sessions/{id}/append")
async def append(id: str, content: Append, request: Request, engine: Served) -> JSONResponse:
    """Read a text, and return its bits."""
    size = len(content.text.encode("utf-8", "surrogatepass"))  # invalid text is refused below
    if content.pieces and size > PIECES:
        raise Refusal(413, "too_large", f"a text with pieces may have at most {PIECES:,} bytes; append it in parts")
    tokens = await run_in_threadpool(engine.encode, content.text)
    parts = [torch.zeros(0, dtype=torch.float64)]
    async for event in await run_job(request, lambda on_event: engine.read(id, tokens, on_event)):
        if isinstance(event, TokensRead):
            parts.append(event.nats)
    nats = torch.cat(parts)
    bits = float(nats.sum()) * BITS
    answer: dict[str, Any] = {
        "tokens": len(nats),
        "bytes": size,
        "bits": bits,
        "bits_per_byte": bits / size if size else None,
    }
    if content.pieces:
        pieces = await run_in_threadpool(pieces_of, engine.tokenizer, tokens.tolist(), nats.tolist())
        answer["pieces"] = [{"text": text, "bits": piece_nats * BITS} for text, piece_nats in pieces]
    return JSONResponse(answer)


@sessions.post("/sessions/{id}/generate")
async def generate(id: str, content: Generate, request: Request, engine: Served) -> Response:
    """Generate text, token by token as server-sent events, or in one response."""
    began, sampling, metrics = time.perf_counter(), content.sampling(), request.app.state.metrics
    events = await run_job(request, lambda on_event: engine.write(id, content.tokens, sampling, on_event))

    async def parts() -> AsyncIterator[tuple[str, dict[str, Any]]]:
        count, bits = 0, 0.0
        async for event in events:
            if isinstance(event, TokenWritten):
                if not count:
                    metrics.first_token.observe(time.perf_counter() - began)
                count, bits = count + 1, bits + event.nats * BITS
                yield "token", {"text": event.text, "bits": event.nats * BITS}
            elif isinstance(event, Finished):
                yield "done", {"text": event.text, "reason": event.reason, "tokens": count, "bits": bits}

    if content.stream:
        return StreamingResponse(_sent(parts(), metrics), media_type="text/event-stream")
    texts: list[str] = []
    async for _, part in parts():
        texts.append(part["text"])
    return JSONResponse({**part, "text": "".join(texts)})


async def _sent(parts: AsyncIterator[tuple[str, dict[str, Any]]], metrics: Metrics) -> AsyncIterator[str]:
    """Yield server-sent events; an error is the last one."""
    try:
        async for kind, part in parts:
            yield f"event: {kind}\ndata: {json.dumps(part)}\n\n"
    except Refusal as refusal:
        if refusal.code == "cancelled":
            metrics.cancelled()
        yield f"event: error\ndata: {json.dumps(error_body(refusal))}\n\n"


async def _failed(_: Request, error: Exception) -> Response:
    # It is raised again, too, and so in the log.
    return JSONResponse(error_body(Refusal(500, "internal", "internal server error; see the log of the server")), 500)


def _about(id: str, state: State) -> dict[str, Any]:
    return {"id": id, "tokens": max(0, state.seen - 1)}  # the start is no part of the text


async def _tidy(engine: Engine) -> None:
    while True:
        await asyncio.sleep(min(TIDY_EVERY, engine.limits.idle / 2))
        with contextlib.suppress(Refusal):  # a full disk, which is in the log
            await run_in_threadpool(engine.sessions.store_idle)


async def _refused(request: Request, error: Exception) -> Response:
    refusal = error if isinstance(error, Refusal) else Refusal(422, "invalid", str(error))
    if refusal.code == "cancelled":
        request.app.state.metrics.cancelled()
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    return JSONResponse(error_body(refusal), refusal.status, headers)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query"))
    return JSONResponse(
        error_body(Refusal(422, "invalid", f"{where or 'content'}: {first['msg']}"), where or None), 422
    )


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid")
    return JSONResponse(
        error_body(Refusal(error.status_code, code, str(error.detail))), error.status_code, error.headers
    )
