"""OpenAI's completions, for existing clients: /v1/completions and /v1/models."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool

from ...errors import CompressiveError
from ...generate.sampling import Sampling
from .engine import Engine
from .errors import Refusal
from .events import run_job
from .jobs import Finished, TokenWritten
from .middleware import error_body

router = APIRouter(prefix="/v1")

# Fields of OpenAI's completions that this server does not support, and the values that ask for nothing.
UNSUPPORTED = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Completion(BaseModel):
    """Content of a request; a field that is missing is None."""

    model_config = ConfigDict(extra="allow")
    model: str
    prompt: str | list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Name of the user; it has no effect."""


@router.get("/models")
def models(request: Request) -> dict[str, Any]:
    """List the model."""
    return {"object": "list", "data": [_model(request)]}


@router.get("/models/{name}")
def model(name: str, request: Request) -> dict[str, Any]:
    """Return the model by its name."""
    _check_name(request, name)
    return _model(request)


@router.post("/completions")
async def complete(content: Completion, request: Request) -> Response:
    """Generate a completion of a prompt; no session is kept."""
    engine: Engine = request.app.state.engine
    _check_name(request, content.model)
    _check_fields(content)
    prompt, sampling = _prompt(content), _sampling(content)
    count = 16 if content.max_tokens is None else content.max_tokens
    began, metrics = time.perf_counter(), request.app.state.metrics
    tokens = await run_in_threadpool(engine.encode, prompt)
    events = await run_job(request, lambda on_event: engine.complete(tokens, count, sampling, on_event))
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": content.model,
    }
    usage = {"prompt_tokens": len(tokens), "completion_tokens": 0, "total_tokens": len(tokens)}

    async def parts() -> AsyncIterator[tuple[str, str | None]]:
        """Yield texts, with the reason of the end beside the last one."""
        async for event in events:
            if isinstance(event, TokenWritten):
                if not usage["completion_tokens"]:
                    metrics.first_token.observe(time.perf_counter() - began)
                usage["completion_tokens"] += 1
                usage["total_tokens"] += 1
                yield event.text, None
            elif isinstance(event, Finished):
                if event.reason not in ("stop", "length"):
                    raise Refusal(503, "stopping", "the server stopped before the completion was finished")
                yield event.text, event.reason

    if content.stream:
        wants_usage = content.stream_options is not None and content.stream_options.include_usage
        return StreamingResponse(_sent(parts(), head, usage if wants_usage else None), media_type="text/event-stream")
    texts = [part async for part in parts()]
    choice = _choice("".join(text for text, _ in texts), texts[-1][1])
    return JSONResponse({**head, "choices": [choice], "usage": usage})


async def _sent(
    parts: AsyncIterator[tuple[str, str | None]], head: dict[str, Any], usage: dict[str, int] | None
) -> AsyncIterator[str]:
    try:
        async for text, reason in parts:
            if text or reason:
                yield _data({**head, "choices": [_choice(text, reason)]})
        if usage is not None:
            yield _data({**head, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"
    except Refusal as refusal:
        if refusal.code != "cancelled":
            yield _data(error_body(refusal))


def _data(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}


def _model(request: Request) -> dict[str, Any]:
    return {"id": request.app.state.name, "object": "model", "created": 0, "owned_by": "compressive-transformer"}


def _check_name(request: Request, name: str) -> None:
    if name != request.app.state.name:
        message = f"unknown model {name[:100]!r}; this server has {request.app.state.name!r}"
        raise Refusal(404, "model_not_found", message)


def _check_fields(content: Completion) -> None:
    """Refuse fields that are not supported: none is ignored."""
    for field, value in (content.model_extra or {}).items():
        if field not in UNSUPPORTED:
            raise Refusal(400, "unknown_field", f"unknown field {field[:100]}")
        if value not in UNSUPPORTED[field]:
            raise Refusal(400, "unsupported", f"{field} is not supported; leave it out")


def _prompt(content: Completion) -> str:
    if isinstance(content.prompt, list):
        if len(content.prompt) != 1:
            raise Refusal(
                400, "unsupported", f"prompt must be one text, got {len(content.prompt)}; send one request each"
            )
        return content.prompt[0]
    return content.prompt or ""


def _sampling(content: Completion) -> Sampling:
    stop = [content.stop] if isinstance(content.stop, str) else content.stop or []
    if len(stop) > 4:
        raise Refusal(400, "invalid", f"stop may have at most 4 strings, got {len(stop)}")
    try:
        given = {"temperature": content.temperature, "top_p": content.top_p, "seed": content.seed, "stop": stop}
        return Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except CompressiveError as error:
        raise Refusal(400, "invalid", str(error)) from None
