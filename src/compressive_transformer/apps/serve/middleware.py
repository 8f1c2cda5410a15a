"""Checks of each request before it is parsed: host, origin, token, content type and size."""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Refusal
from .responses import error_response

LOOPBACK = ("127.0.0.1", "localhost", "::1")
OPEN_PATHS = ("/", "/health")
"""Paths that need no token: the page asks for one."""
MAX_DRAINED = 16_777_216
"""Bytes of a refused request that are still read, at most."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


class Guard:
    """ASGI middleware that refuses invalid requests and adds security headers to all responses.

    Args:
        app: The application.
        max_bytes: Size of a request's body, at most.
        token: Token that requests must have; None for no token.
        hosts: Allowed host names; None for any.
        on_response: Callback with scope, status and seconds of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int,
        token: str | None,
        hosts: tuple[str, ...] | None,
        on_response: Callable[[Scope, int, float], None],
    ) -> None:
        self._app, self._max_bytes, self._hosts, self._on_response = app, max_bytes, hosts, on_response
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["began"], status = time.perf_counter(), 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            refusal = self._refusal(scope, Headers(scope=scope))
            if refusal is not None:
                await _drain(receive)
                raise refusal
            await self._app(scope, await self._read(receive), send_with_headers)
        except Refusal as refusal:
            await error_response(refusal)(scope, receive, send_with_headers)
        finally:
            self._on_response(scope, status, time.perf_counter() - scope["began"])

    def _refusal(self, scope: Scope, headers: Headers) -> Refusal | None:
        """Return why a request is refused because of its head, or None."""
        host, origin = headers.get("host", ""), headers.get("origin")
        # Against DNS rebinding: a website could let its host name point to this address.
        if self._hosts is not None and _split(f"//{host}")[1] not in self._hosts:
            allowed = ", ".join(self._hosts)
            return Refusal(403, "wrong_host", f"Host header not allowed: {host[:100]!r}; expected one of {allowed}")
        # Browsers send the origin of a page; only the page of this server may send requests.
        if origin is not None and _split(origin)[0] != host:
            return Refusal(403, "wrong_origin", f"Origin header not allowed: {origin[:100]!r} is another website")
        if self._token is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), self._token):
                return Refusal(
                    401, "unauthorized", "token missing or wrong; send the header Authorization: Bearer TOKEN"
                )
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            return Refusal(415, "not_json", f"Content-Type must be application/json, got {kind[:100]!r}")
        return None

    async def _read(self, receive: Receive) -> Receive:
        """Return a `receive` that repeats the body, which is read here: not all endpoints do. Raises Refusal."""
        messages: deque[Message] = deque()
        size, more = 0, True
        while more:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if size > self._max_bytes:
                if more:
                    await _drain(receive)
                text = f"the body of a request may have {self._max_bytes:,} bytes; append a longer text in pieces"
                raise Refusal(413, "too_large", text)

        async def repeat() -> Message:
            return messages.popleft() if messages else await receive()

        return repeat


def _split(url: str) -> tuple[str, str | None]:
    """Return host with port, and host name of a URL; neither if it is not a URL."""
    try:
        parts = urlsplit(url)
        return parts.netloc, parts.hostname
    except ValueError:
        return "", None


async def _drain(receive: Receive) -> None:
    """Read the rest of a body of moderate size: many clients read no response before they have sent everything."""
    size, more = 0, True
    while more and size < MAX_DRAINED:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
