"""What each request must pass before it is looked at: where it comes from, who sends it, how large it is."""

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
"""Bytes of a refused request that are read all the same, at most."""
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
}


def error_body(refusal: Refusal, param: str | None = None) -> dict[str, Any]:
    """How a client is told, in the shape of OpenAI's errors."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": str(refusal), "type": kind, "param": param, "code": refusal.code}}


class Guard:
    """An ASGI application around another: it refuses what must not get there, and adds headers to all answers."""

    def __init__(
        self,
        app: Any,
        *,
        largest: int,
        token: str | None,
        hosts: tuple[str, ...] | None,
        observe: Callable[[Message, int, float], None],
    ) -> None:
        """
        largest: Bytes that the body of a request may have.
        token: What requests must bear; None for none.
        hosts: Names under which the server may be asked; None for any.
        observe: Is told scope, status and seconds of each request.
        """
        self.app, self.largest, self.hosts, self.observe = app, largest, hosts, observe
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
                own = {name for name, _ in message.get("headers", ())}
                added = [(name, value) for name, value in HEADERS.items() if name not in own]
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
            self.observe(scope, status, time.perf_counter() - began)

    def _refused(self, scope: Message) -> Refusal | None:
        """Why a request is refused for what its head says; None where it is not."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        # A name that somebody points to this address would make their page one of ours (DNS rebinding).
        if self.hosts is not None and _split(f"//{host}")[1] not in self.hosts:
            return Refusal(403, "wrong_host", f"the server is asked under a name that is not its own: {host[:100]!r}")
        # Browsers say where a request comes from; only the page that this server gave may ask.
        origin = headers.get(b"origin")
        if origin is not None and _split(origin)[0] != host:
            return Refusal(403, "wrong_origin", "pages from elsewhere may not use this server")
        if self._token is not None and scope["path"] not in OPEN:
            kind, _, given = headers.get(b"authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._token):
                return Refusal(401, "unauthorized", "this server needs its token: Authorization: Bearer TOKEN")
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length) > self.largest:
            return self._too_large()
        kind = headers.get(b"content-type", "application/json").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            return Refusal(415, "not_json", f"a request's content must be application/json, got {kind[:100]!r}")
        return None

    async def _whole(self, receive: Receive) -> Receive:
        """What gives the whole body at once, and then what `receive` gives. Raises Refusal where it is too large."""
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
        return Refusal(413, "too_large", f"a request may have {self.largest:,} bytes; append a longer text in pieces")


def _split(url: str) -> tuple[str, str | None]:
    """The part of a URL that names a server, and the name alone; neither where it is no URL."""
    try:
        parts = urlsplit(url)
        return parts.netloc, parts.hostname
    except ValueError:
        return "", None


async def _drain(receive: Receive) -> None:
    """Take in the rest of a body of moderate size: many clients read no answer before they have sent all."""
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
