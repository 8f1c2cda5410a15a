"""A real server on a free port of this machine: what tests of the web share."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from compressive_transformer.apps.serve import Engine, Limits
from compressive_transformer.apps.serve.app import create_app
from compressive_transformer.apps.serve.middleware import LOOPBACK
from compressive_transformer.apps.serve.server import bind
from compressive_transformer.data.tokenizers import ByteTokenizer
from compressive_transformer.model import CompressiveTransformer


@dataclass
class Served:
    """A server, and a client that asks it."""

    engine: Engine
    url: str
    client: httpx.Client

    def post(self, path: str, content: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=content, **options)

    def new(self) -> str:
        """Return the id of a new session."""
        id: str = self.post("/sessions").raise_for_status().json()["id"]
        return id

    def events(self, path: str, content: Any) -> list[tuple[str, Any]]:
        """Return name and data of each server-sent event of a response."""
        answer = self.post(path, content).raise_for_status()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer.text)


def events_of(text: str) -> list[tuple[str, Any]]:
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


@contextlib.contextmanager
def served(
    model: CompressiveTransformer, *, folder: Path | None = None, token: str | None = None, port: int = 0, **limits: Any
) -> Iterator[Served]:
    engine = Engine(model, ByteTokenizer(), Limits(**limits), folder)
    listener = bind("127.0.0.1", port)
    config = uvicorn.Config(
        create_app(engine, "tiny", token=token, hosts=(*LOOPBACK, "example.com")), log_level="error"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            yield Served(engine, url, client)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
