"""Endpoints in OpenAI's format, for existing clients: /v1/completions and /v1/models."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from .engine import Engine
from .errors import Refusal
from .events import run_job
from .jobs import Finished, TokenWritten
from .requests import Completion
from .responses import event_stream

router = APIRouter(prefix="/v1")


@router.get("/models")
def models(request: Request) -> dict[str, Any]:
    """Return the list of models, which has one."""
    return {"object": "list", "data": [model(request.app.state.name, request)]}


@router.get("/models/{name}")
def model(name: str, request: Request) -> dict[str, Any]:
    """Return the model."""
    if name != request.app.state.name:
        raise Refusal(404, "model_not_found", f"no model {name[:100]!r}, only {request.app.state.name!r}")
    return {"id": name, "object": "model", "created": 0, "owned_by": "compressive-transformer"}


@router.post("/completions")
async def complete(content: Completion, request: Request) -> Response:
    """Generate text after a prompt, without a session."""
    engine: Engine = request.app.state.engine
    model(content.model, request)
    tokens = await run_in_threadpool(engine.encode, _prompt(content))
    events = await run_job(request, lambda on_event: engine.complete(tokens, content.max_tokens, content, on_event))
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": content.model,
    }
    usage = {"prompt_tokens": len(tokens), "completion_tokens": 0, "total_tokens": len(tokens)}

    async def choices() -> AsyncIterator[dict[str, Any]]:
        async for event in events:
            if isinstance(event, TokenWritten):
                usage["completion_tokens"] += 1
                usage["total_tokens"] += 1
                yield _choice(event.text, None)
            elif isinstance(event, Finished):
                if event.reason not in ("stop", "length"):
                    raise Refusal(503, "stopping", "the server stopped before the end of this completion")
                yield _choice(event.text, event.reason)

    async def chunks() -> AsyncIterator[tuple[str, Any]]:
        async for choice in choices():
            if choice["text"] or choice["finish_reason"]:
                yield "", {**head, "choices": [choice]}
        if content.stream_options.include_usage:
            yield "", {**head, "choices": [], "usage": usage}
        yield "", "[DONE]"

    if content.stream:
        return event_stream(chunks())
    parts = [choice async for choice in choices()]
    whole = _choice("".join(part["text"] for part in parts), parts[-1]["finish_reason"])
    return JSONResponse({**head, "choices": [whole], "usage": usage})


def _choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}


def _prompt(content: Completion) -> str:
    prompts = [content.prompt] if isinstance(content.prompt, str) else content.prompt
    if len(prompts) != 1:
        message = f"prompt must be one text, got {len(prompts)}; send a request for each"
        raise Refusal(400, "unsupported", message)
    return prompts[0]
