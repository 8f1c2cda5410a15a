"""A server in a process of its own, from the first request to an end in good order."""

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
"""Seconds in which answers that are on their way can be sent, once the server was told to stop."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, port 0 for any that is free. Raises CompressiveError where the address cannot be had."""
    if not 0 <= port < 65_536:
        raise CompressiveError(f"port ({port}) must be 0 (any that is free) to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise CompressiveError(
            f"cannot serve at {host} port {port}: {error}; choose another --host or --port"
        ) from None


def serve(
    engine: Engine, name: str, listening: socket.socket, *, token: str | None = None, names: Sequence[str] = ()
) -> None:
    """Answer requests until Ctrl-C or SIGTERM, then end what runs and put sessions away.

    token: What requests must bear; None for none.
    names: Names under which it may be asked, besides those of loopback; without any, and listening elsewhere, any name.
    """
    any_name = not names and listening.getsockname()[0] not in LOOPBACK
    app = create_app(engine, name, token=token, hosts=None if any_name else (*LOOPBACK, *names))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=GRACE
    )
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        _Server(config, engine).run([listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        engine.stop()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Tell the engine first: streams that it writes end, so that the server need not wait for them."""
        threading.Thread(target=self._engine.stop).start()
        super().handle_exit(sig, frame)
