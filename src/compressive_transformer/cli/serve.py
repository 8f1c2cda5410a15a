"""`compressive serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes

from ..apps.serve import Engine, Limits
from ..apps.serve.limits import DEFAULT_LIMITS
from ..errors import CompressiveError, optional
from ._common import RunArgument, checked, load_model, say

TOKEN_VARIABLE = "COMPRESSIVE_TOKEN"
MIN_TOKEN_LENGTH = 16


def serve(
    run: RunArgument,
    /,
    host: str = "127.0.0.1",
    port: int = 8000,
    sessions: Path | None = None,
    token_file: Path | None = None,
    names: tuple[str, ...] = (),
    limits: OmitArgPrefixes[Annotated[Limits, checked(Limits)]] = DEFAULT_LIMITS,
) -> None:
    """Serve a model over HTTP: sessions with unbounded history, OpenAI-compatible completions, and a page that shows
    the memory (extra `serve`).

    Ctrl-C or SIGTERM stops the server; with --sessions, the next start resumes all sessions.

    Args:
        run: A run of `compressive train`; the name of the folder is the name of the model.
        host: Address to listen on; the default is reachable from this machine only.
        port: Port; 0 for any free port.
        sessions: Folder for saved and unused sessions. Only one server may use it.
        token_file: File with the token that requests must have; the environment variable COMPRESSIVE_TOKEN is an
            alternative.
        names: Additional allowed host names, for example that of a reverse proxy.
        limits: Limits of sessions and requests.
    """
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        optional(module, extra="serve", purpose="compressive serve")
    from ..apps.serve.server import bind
    from ..apps.serve.server import serve as serve_engine

    token = _token(token_file)
    with bind(host, port) as listener:  # before the model is loaded, which may take long
        engine = Engine(*load_model(run), limits, sessions)
        address, bound_port = listener.getsockname()[:2]
        if token is None and host not in ("127.0.0.1", "localhost", "::1"):
            say("warning: anyone who can reach this address can use the server; set a token with --token-file FILE")
        name = run.resolve().name
        url = f"http://{f'[{address}]' if ':' in address else address}:{bound_port}/"
        say(f"{name} at {url}; Ctrl-C stops it")
        serve_engine(engine, name, listener, token=token, names=names)
    say(f"stopped; {f'{len(engine.sessions)} sessions are in {sessions}' if sessions else 'sessions were not saved'}")


def _token(path: Path | None) -> str | None:
    """Return the token of a file or of the environment, or None. It is no argument: other users could see it."""
    token = os.environ.get(TOKEN_VARIABLE)
    if path is not None:
        token = path.read_text(encoding="utf-8", errors="replace").strip()
    if token is not None and not (len(token) >= MIN_TOKEN_LENGTH and token.isascii() and token.isprintable()):
        source = TOKEN_VARIABLE if path is None else path
        raise CompressiveError(
            f"{source}: a token must be one line of {MIN_TOKEN_LENGTH} or more printable ASCII characters; "
            'python -c "import secrets; print(secrets.token_urlsafe())" prints one'
        )
    return token
