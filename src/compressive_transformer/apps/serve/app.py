"""The web application: sessions, completions in OpenAI's shape, health and metrics, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ...errors import CompressiveError
from ...generate.sampling import Sampling
from .completions import router as completions
from .engine import Engine
from .errors import Refusal
from .events import begun
from .jobs import Done, Read, Wrote
from .memory_view import pieces_of, slots_of
from .metrics import Measures
from .middleware import Guard, error_body
from .page import page
from .state import State

BITS = 1 / math.log(2)
PIECES = 65_536
"""Bytes of a text whose pieces are told, at most: they take many times its room."""
TIDY_EVERY = 30.0
"""Seconds between two looks for idle sessions, at most."""


class Strict(BaseModel):
    """Content of a request; a field that there is not is refused."""

    model_config = ConfigDict(extra="forbid")


class Append(Strict):
    """Text to read."""

    text: str
    pieces: bool = False
    """Whether to say how surprising each piece of the text was."""


class Generate(Strict):
    """What to write."""

    tokens: int = 200
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] = []
    stream: bool = True

    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed, stop)


def create_app(engine: Engine, name: str, *, token: str | None = None, hosts: tuple[str, ...] | None = None) -> FastAPI:
    """The application of an engine; when it ends, the engine is stopped and sessions are put away.

    name: What clients call the model.
    token: What requests must bear, but for the page and /health; None for none.
    hosts: Names under which the server may be asked; None for any.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tidying = asyncio.create_task(_tidy(engine))
        try:
            yield
        finally:
            tidying.cancel()
            await run_in_threadpool(engine.stop)

    # The pages that FastAPI makes of itself load scripts from elsewhere.
    app = FastAPI(title="Compressive Transformer", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.engine, app.state.name, app.state.measures = engine, name, Measures(engine)
    app.include_router(sessions)
    app.include_router(completions)
    app.include_router(page)
    app.add_middleware(
        Guard, largest=engine.limits.request_bytes, token=token, hosts=hosts, observe=app.state.measures.request
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
    """Whether the server works."""
    alive = engine.worker.alive
    content = {"status": "ok" if alive else "stopping", "sessions": len(engine.sessions)}
    return JSONResponse({**content, "queue": engine.worker.unfinished}, 200 if alive else 503)


@sessions.get("/metrics")
def metrics(request: Request) -> Response:
    """What Prometheus asks for."""
    return Response(request.app.state.measures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@sessions.post("/sessions", status_code=201)
def create(engine: Served) -> dict[str, Any]:
    """A new session."""
    return {"id": engine.create(), "tokens": 0}


@sessions.get("/sessions/{id}")
def describe(id: str, engine: Served) -> dict[str, Any]:
    """How far a session is."""
    return _about(id, engine.state(id))


@sessions.delete("/sessions/{id}", status_code=204)
def delete(id: str, engine: Served) -> None:
    """Forget a session and its files."""
    engine.sessions.delete(id)


@sessions.post("/sessions/{id}/fork", status_code=201)
def fork(id: str, engine: Served) -> dict[str, Any]:
    """A new session that stands where this one does."""
    new = engine.fork(id)
    return _about(new, engine.state(new))


@sessions.post("/sessions/{id}/save")
def save(id: str, engine: Served) -> dict[str, Any]:
    """Keep on disk where a session stands."""
    return _about(id, engine.sessions.save(id))


@sessions.post("/sessions/{id}/restore")
def restore(id: str, engine: Served) -> dict[str, Any]:
    """Go back to what was saved."""
    return _about(id, engine.sessions.restore(id))


@sessions.get("/sessions/{id}/memory")
def memory(id: str, engine: Served, layer: int = 0) -> dict[str, Any]:
    """What each slot of a layer holds, also while the session reads or writes."""
    return slots_of(engine.model, engine.tokenizer, engine.look(id), layer)


@sessions.post("/sessions/{id}/append")
async def append(id: str, content: Append, request: Request, engine: Served) -> JSONResponse:
    """Read a text, and say how surprising it was."""
    size = len(content.text.encode("utf-8", "surrogatepass"))  # what is no text is refused below
    if content.pieces and size > PIECES:
        raise Refusal(
            413, "too_large", f"a text of which pieces are asked may have {PIECES:,} bytes; append it in parts"
        )
    tokens = await run_in_threadpool(engine.encode, content.text)
    parts = [torch.zeros(0, dtype=torch.float64)]
    async for event in await begun(request, lambda tell: engine.read(id, tokens, tell)):
        if isinstance(event, Read):
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
        found = await run_in_threadpool(pieces_of, engine.tokenizer, tokens.tolist(), nats.tolist())
        answer["pieces"] = [{"text": text, "bits": own * BITS} for text, own in found]
    return JSONResponse(answer)


@sessions.post("/sessions/{id}/generate")
async def generate(id: str, content: Generate, request: Request, engine: Served) -> Response:
    """Let the model write on, token by token as server-sent events, or all at once."""
    began, sampling, measures = time.perf_counter(), content.sampling(), request.app.state.measures
    events = await begun(request, lambda tell: engine.write(id, content.tokens, sampling, tell))

    async def told() -> AsyncIterator[tuple[str, dict[str, Any]]]:
        count, bits = 0, 0.0
        async for event in events:
            if isinstance(event, Wrote):
                if not count:
                    measures.first_token.observe(time.perf_counter() - began)
                count, bits = count + 1, bits + event.nats * BITS
                yield "token", {"text": event.text, "bits": event.nats * BITS}
            elif isinstance(event, Done):
                yield "done", {"text": event.text, "reason": event.reason, "tokens": count, "bits": bits}

    if content.stream:
        return StreamingResponse(_sent(told(), measures), media_type="text/event-stream")
    texts: list[str] = []
    async for _, part in told():
        texts.append(part["text"])
    return JSONResponse({**part, "text": "".join(texts)})


async def _sent(told: AsyncIterator[tuple[str, dict[str, Any]]], measures: Measures) -> AsyncIterator[str]:
    """Server-sent events; an error is the last of them."""
    try:
        async for kind, part in told:
            yield f"event: {kind}\ndata: {json.dumps(part)}\n\n"
    except Refusal as refusal:
        if refusal.code == "cancelled":
            measures.cancelled()
        yield f"event: error\ndata: {json.dumps(error_body(refusal))}\n\n"


async def _failed(_: Request, error: Exception) -> Response:
    # It is raised on, too, and so in the log.
    return JSONResponse(error_body(Refusal(500, "internal", "the server failed to carry this out")), 500)


def _about(id: str, state: State) -> dict[str, Any]:
    return {"id": id, "tokens": max(0, state.seen - 1)}  # the start is nobody's text


async def _tidy(engine: Engine) -> None:
    while True:
        await asyncio.sleep(min(TIDY_EVERY, engine.limits.idle / 2))
        with contextlib.suppress(Refusal):  # a full disk, which the log tells of
            await run_in_threadpool(engine.sessions.put_away_idle)


async def _refused(request: Request, error: Exception) -> Response:
    refusal = error if isinstance(error, Refusal) else Refusal(422, "invalid", str(error))
    if refusal.code == "cancelled":
        request.app.state.measures.cancelled()
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
