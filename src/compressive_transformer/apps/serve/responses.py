"""Responses that endpoints share: errors in OpenAI's format, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ...errors import CompressiveError
from .errors import Refusal

CODES = {404: "not_found", 405: "method_not_allowed"}


def error_response(refusal: Refusal, param: str | None = None) -> JSONResponse:
    """Return the response to a refused request; `param` is the field at fault."""
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
    if refusal.retry_after is not None:
        headers["Retry-After"] = str(refusal.retry_after)
    return JSONResponse(_error(refusal, param), refusal.status, headers)


def event_stream(events: AsyncIterator[tuple[str, Any]], *, error_name: str = "") -> StreamingResponse:
    """Return a stream of server-sent events, from names and data; an error is the last event.

    An event without a name has none; data that are not a text are sent as JSON.
    """

    async def frames() -> AsyncIterator[str]:
        try:
            async for name, data in events:
                yield _frame(name, data)
        except Refusal as refusal:
            yield _frame(error_name, _error(refusal))

    return StreamingResponse(frames(), media_type="text/event-stream")


def _frame(name: str, data: Any) -> str:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def _error(refusal: Refusal, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": str(refusal), "type": kind, "param": param, "code": refusal.code}}


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, Refusal):
        return error_response(error)
    # OpenAI's clients expect 400.
    return error_response(Refusal(400 if request.url.path.startswith("/v1/") else 422, "invalid", str(error)))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, CompressiveError):
        return await _refused(request, cause)
    field = ".".join(str(part) for part in first["loc"] if part not in ("body", "query"))
    return error_response(Refusal(422, "invalid", f"{field or 'content'}: {first['msg']}"), field or None)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "invalid")
    response = error_response(Refusal(error.status_code, code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _failed(_: Request, error: Exception) -> Response:
    # Starlette raises the error again, so it is logged.
    return error_response(Refusal(500, "internal", "internal error; see the server's log"))


ERROR_HANDLERS: dict[Any, Any] = {
    CompressiveError: _refused,
    RequestValidationError: _invalid,
    HTTPException: _http,
    Exception: _failed,
}
