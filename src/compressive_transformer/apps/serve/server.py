"""A server in its process, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType

import uvicorn

from ...errors import CompressiveError
from .app import create_app
from .engine import Engine
from .middleware import LOOPBACK

GRACE = 10
"""Seconds in which responses can end after the signal."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is any free port. Raises CompressiveError if the address is not available."""
    if not 0 <= port < 65_536:
        raise CompressiveError(f"port ({port}) must be 0 (any free port) to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        message = f"cannot serve at {host} port {port}: {error}; choose another --host or --port"
        raise CompressiveError(message) from None


def serve(
    engine: Engine, name: str, listener: socket.socket, *, token: str | None = None, names: Sequence[str] = ()
) -> None:
    """Serve until Ctrl-C or SIGTERM, then end all jobs and offload sessions.

    Args:
        engine: The engine.
        name: Name of the model.
        listener: A listening socket, from `bind`.
        token: Token that requests must have; None for no token.
        names: Allowed host names besides those of loopback; without any, and not on loopback, all are allowed.
    """
    any_name = not names and listener.getsockname()[0] not in LOOPBACK
    app = create_app(engine, name, token=token, hosts=None if any_name else (*LOOPBACK, *names))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=GRACE
    )
    # uvicorn raises the signal again after a graceful end.
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        _Server(config, engine).run([listener])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        engine.stop()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the engine first: its streams end, so uvicorn need not wait for them."""
        threading.Thread(target=self._engine.stop).start()
        super().handle_exit(sig, frame)
