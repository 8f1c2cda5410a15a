"""Checks of every request: host, origin, token, size; and headers of every response."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from .errors import Refusal

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OPEN = ("/", "/health")
"""Paths that need no token: the page asks for one itself."""
DRAINED = 16_777_216
"""Limit of the bytes that are read of a refused request."""
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
}


def error_body(refusal: Refusal, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error response, in OpenAI's format."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": str(refusal), "type": kind, "param": param, "code": refusal.code}}


class Guard:
    """ASGI middleware that refuses requests by their head and size, and adds headers to all responses.

    Starlette's TrustedHostMiddleware and FastAPI's HTTPBearer do not fit: their errors are not in OpenAI's format, and
    the latter runs after the body was read.
    """

    def __init__(
        self,
        app: Any,
        *,
        largest: int,
        token: str | None,
        hosts: tuple[str, ...] | None,
        on_request: Callable[[Message, int, float], None],
    ) -> None:
        """Wrap `app`.

        Args:
            app: ASGI application.
            largest: Limit of the bytes of a request's body.
            token: Token that requests must carry; None for none.
            hosts: Host names that requests may use; None for any.
            on_request: Called with scope, status and seconds of each request.
        """
        self.app, self.largest, self.hosts, self.on_request = app, largest, hosts, on_request
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name for name, _ in message.get("headers", ())}
                added = [(name, value) for name, value in HEADERS.items() if name not in present]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        try:
            refusal = self._refused(scope)
            if refusal is not None:
                await _drain(receive)
                raise refusal
            await self.app(scope, await self._whole(receive) if scope["method"] == "POST" else receive, answer)
        except Refusal as refusal:
            await _refuse(refusal, answer)
        finally:
            self.on_request(scope, status, time.perf_counter() - began)

    def _refused(self, scope: Message) -> Refusal | None:
        """Return why the head of a request is refused; None if it is not."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        # Against DNS rebinding: a foreign name that points to this address.
        if self.hosts is not None and _split(f"//{host}")[1] not in self.hosts:
            return Refusal(403, "wrong_host", f"Host header not allowed: {host[:100]!r}; see --names")
        # Browsers send the origin of a request; only this server's page may send requests.
        origin = headers.get(b"origin")
        if origin is not None and _split(origin)[0] != host:
            return Refusal(403, "wrong_origin", "requests from other sites' pages are not allowed")
        if self._token is not None and scope["path"] not in OPEN:
            kind, _, given = headers.get(b"authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._token):
                return Refusal(401, "unauthorized", "missing or wrong token; send Authorization: Bearer TOKEN")
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length) > self.largest:
            return self._too_large()
        kind = headers.get(b"content-type", "application/json").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            return Refusal(415, "not_json", f"the content type must be application/json, got {kind[:100]!r}")
        return None

    async def _whole(self, receive: Receive) -> Receive:
        """Read the whole body; return a `receive` that replays it. Raises Refusal if it is too large."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return receive
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.largest:
                if more:
                    await _drain(receive)
                raise self._too_large()
        given = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Message:
            return given.pop() if given else await receive()

        return replayed

    def _too_large(self) -> Refusal:
        return Refusal(413, "too_large", f"a request may have {self.largest:,} bytes; append a longer text in parts")


def _split(url: str) -> tuple[str, str | None]:
    """Return host and port of a URL, and the host alone; nothing if it is invalid."""
    try:
        parts = urlsplit(url)
        return parts.netloc, parts.hostname
    except ValueError:
        return "", None


async def _drain(receive: Receive) -> None:
    """Read the rest of a body of moderate size: many clients send all of it before they read the response."""
    size, more = 0, True
    while more and size < DRAINED:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)


async def _refuse(refusal: Refusal, send: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error_body(refusal)).encode()})
