"""The command `serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from ..apps.serve import Engine, Limits
from ..checkpoint import load
from ..errors import CompressiveError, optional
from ._common import checked, default_device, say

TOKEN_VARIABLE = "COMPRESSIVE_TOKEN"
SHORTEST_TOKEN = 16
DEFAULT_LIMITS = Limits()


def serve(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    host: str = "127.0.0.1",
    port: int = 8000,
    sessions: Path | None = None,
    token_file: Path | None = None,
    names: tuple[str, ...] = (),
    limits: OmitArgPrefixes[Annotated[Limits, checked(Limits)]] = DEFAULT_LIMITS,
) -> None:
    """Serve a model over HTTP: sessions with unbounded history, OpenAI's completions, and a page that shows the memory
    at work (extra `serve`).

    Ctrl-C or SIGTERM stops it. With --sessions, sessions continue after a restart.

    Args:
        run: Folder of a run that `compressive train` wrote; its name is the name of the model.
        host: Address to listen on; the default is reachable from this machine only.
        port: Port; 0 for any free port.
        sessions: Folder for sessions that are saved or unused; no other server may use it.
        token_file: File with the token that requests must carry; or set the environment variable COMPRESSIVE_TOKEN.
        names: Host names of a proxy in front of the server; on loopback, all but these and its own are refused.
        limits: Limits of sessions and requests.
    """
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        optional(module, extra="serve", purpose="compressive serve")
    from ..apps.serve.running import bind
    from ..apps.serve.running import serve as serve_engine

    token = _token(token_file)
    with bind(host, port) as listening:  # before the model is loaded, which may take long
        model, tokenizer = load(run)
        engine = Engine(model.to(default_device()), tokenizer, limits, sessions)
        address, own_port = listening.getsockname()[:2]
        if token is None and host not in ("127.0.0.1", "localhost", "::1"):
            say("warning: anyone who can reach this address can use the server; set a token with --token-file FILE")
        name = run.resolve().name
        say(f"{name} at http://{f'[{address}]' if ':' in address else address}:{own_port}/; Ctrl-C to stop")
        serve_engine(engine, name, listening, token=token, names=names)
    stored = f"{len(engine.sessions)} sessions are in {sessions}" if sessions else "sessions were not stored"
    say(f"stopped; {stored}")


def _token(path: Path | None) -> str | None:
    """Return the token in a file, else in the environment, else None. As an argument, other users could see it."""
    token = os.environ.get(TOKEN_VARIABLE)
    if path is not None:
        token = path.read_text(encoding="utf-8", errors="replace").strip()
    if token is not None and not (len(token) >= SHORTEST_TOKEN and token.isascii() and token.isprintable()):
        source = TOKEN_VARIABLE if path is None else path
        raise CompressiveError(
            f"{source}: a token must be {SHORTEST_TOKEN} or more printable ASCII characters in one line, "
            'such as python -c "import secrets; print(secrets.token_urlsafe())" prints them'
        )
    return token
