"""The command that serves a model."""

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
    """Serve a model: sessions with unbounded history, OpenAI's completions, and a page that shows the memory at work
    (extra `serve`).

    Ctrl-C or SIGTERM ends it; with --sessions, sessions go on when it is started again.

    Args:
        run: A run that `compressive train` wrote; the folder's name is the model's.
        host: The address to listen at; only this machine can reach the default.
        port: The port; 0 for any that is free.
        sessions: A folder for sessions that are saved or not used; it belongs to this server alone.
        token_file: A file with the token that requests must bear; the environment variable COMPRESSIVE_TOKEN holds
            one, too.
        names: Names under which a proxy before the server asks it; on loopback it answers to no others than these and
            its own.
        limits: What the server takes in.
    """
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        optional(module, extra="serve", purpose="compressive serve")
    from ..apps.serve.running import bind
    from ..apps.serve.running import serve as serve_engine

    token = _token(token_file)
    with bind(host, port) as listening:  # before the model is read, which may take long
        model, tokenizer = load(run)
        engine = Engine(model.to(default_device()), tokenizer, limits, sessions)
        address, own_port = listening.getsockname()[:2]
        if token is None and host not in ("127.0.0.1", "localhost", "::1"):
            say("anybody who reaches this address can use the server: give it a token, --token-file FILE")
        name = run.resolve().name
        say(f"{name} at http://{f'[{address}]' if ':' in address else address}:{own_port}/; Ctrl-C ends it")
        serve_engine(engine, name, listening, token=token, names=names)
    kept = f"{len(engine.sessions)} sessions are in {sessions}" if sessions else "sessions were not kept"
    say(f"stopped; {kept}")


def _token(path: Path | None) -> str | None:
    """The token in a file, else in the environment; None without either. It never is an argument, which all can see."""
    token = os.environ.get(TOKEN_VARIABLE)
    if path is not None:
        token = path.read_text(encoding="utf-8", errors="replace").strip()
    if token is not None and not (len(token) >= SHORTEST_TOKEN and token.isascii() and token.isprintable()):
        source = TOKEN_VARIABLE if path is None else path
        raise CompressiveError(
            f"{source}: a token must be {SHORTEST_TOKEN} or more printable ASCII characters in one line, "
            'as python -c "import secrets; print(secrets.token_urlsafe())" prints them'
        )
    return token
