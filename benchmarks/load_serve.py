"""A server under load: tokens per second, latencies, memory per session, for more and more clients at once.

    python benchmarks/load_serve.py > benchmarks/load_serve.json

Starts `compressive serve` on a free port of loopback and asks it from threads of this process. Each client has a
session of its own, and again and again appends a piece of a book and lets the model write on, for a bounded time and a
bounded number of rounds. Without a run it serves an untrained model of the sizes of configs/small.toml, which takes as
long as a trained one. Asserts nothing: it prints what it found. Takes about two minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import compressive_transformer as ct
from compressive_transformer.data.tokenizers import ByteTokenizer
from machine import conditions

CLIENTS = (1, 4, 16, 64)
ROUNDS = 1000
"""Rounds of one client, at most; time ends most of them before."""
PIECE = 512
"""Characters that a round appends."""
TOKENS = 32
"""Tokens that it then writes."""
HELD = 64
"""Sessions that are made to see what one takes in main memory."""
REQUEST_SECONDS = 120
SIZES = Path(__file__).parents[1] / "configs" / "small.toml"


@dataclass
class Latencies:
    """Seconds of each request at one number of clients, by kind."""

    append: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    generate: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return percentiles in milliseconds."""
        return {name: percentiles(values) for name, values in vars(self).items()}


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p95, p99 in milliseconds, and the count."""
    ordered = sorted(seconds)
    found = {f"p{share}": 1000 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95, 99)}
    return {**{name: round(value, 2) for name, value in found.items()}, "count": len(ordered)}


class Client:
    """One connection to the server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_SECONDS)

    def ask(self, method: str, path: str, content: Any = None) -> http.client.HTTPResponse:
        """Send a request and return the unread response. Raises RuntimeError for an error status."""
        body = None if content is None else json.dumps(content)
        self._connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.read().decode()}")
        return answer

    def json(self, method: str, path: str, content: Any = None) -> Any:
        """Send a request and return the content of the response."""
        return json.loads(self.ask(method, path, content).read() or "null")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def work(port: int, number: int, text: str, until: float, latencies: Latencies) -> None:
    """Run one client: a session, and rounds of appending and generating until the deadline."""
    client = Client(port)
    path = f"/sessions/{client.json('POST', '/sessions')['id']}"
    for turn in range(ROUNDS):
        if time.perf_counter() >= until:
            break
        at = (number * 7919 + turn * PIECE) % (len(text) - PIECE)
        began = time.perf_counter()
        client.json("POST", f"{path}/append", {"text": text[at : at + PIECE]})
        latencies.append.append(time.perf_counter() - began)
        began = before = time.perf_counter()
        answer = client.ask("POST", f"{path}/generate", {"tokens": TOKENS, "seed": turn})
        for line in answer:
            if line.startswith(b"event: token"):
                now = time.perf_counter()
                (latencies.first_token if before == began else latencies.between_tokens).append(now - before)
                before = now
        latencies.generate.append(time.perf_counter() - began)
    client.json("DELETE", path)
    client.close()


def level(port: int, clients: int, text: str, seconds: float) -> dict[str, Any]:
    """Return the results of a number of concurrent clients."""
    latencies, before = Latencies(), tokens_of(port)
    began = time.perf_counter()
    threads = [
        threading.Thread(target=work, args=(port, number, text, began + seconds, latencies))
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, after = time.perf_counter() - began, tokens_of(port)
    return {
        "clients": clients,
        "seconds": round(took, 2),
        "tokens_read_per_second": round((after["read"] - before["read"]) / took, 1),
        "tokens_written_per_second": round((after["written"] - before["written"]) / took, 1),
        "milliseconds": latencies.to_dict(),
    }


def tokens_of(port: int) -> dict[str, float]:
    """Return the tokens that the server has read and generated so far."""
    client = Client(port)
    text = client.ask("GET", "/metrics").read().decode()
    client.close()
    found = re.findall(r"^compressive_tokens_(read|written)_total (\S+)$", text, flags=re.MULTILINE)
    return {name: float(value) for name, value in found}


def held(port: int, process: int, text: str, *, reach: int, segment: int) -> dict[str, float]:
    """Return bytes of main memory per session with full memory, the mean over many."""
    client = Client(port)
    first = client.json("POST", "/sessions")["id"]
    while client.json("GET", f"/sessions/{first}")["tokens"] < reach:
        client.json("POST", f"/sessions/{first}/append", {"text": text[:2000]})
    ids, before = [first], resident(process)
    for _ in range(HELD):
        id = client.json("POST", f"/sessions/{first}/fork")["id"]
        client.json("POST", f"/sessions/{id}/append", {"text": text[: segment + 1]})  # after a commit nothing is shared
        ids.append(id)
    after = resident(process)
    for id in ids:
        client.json("DELETE", f"/sessions/{id}")
    client.close()
    return {"sessions": HELD, "bytes_per_session": round((after - before) / HELD)}


def resident(process: int) -> int:
    """Return the resident bytes of a process."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


@contextmanager
def server(run: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """Start a server; return its port and its process."""
    command = [sys.executable, "-m", "compressive_transformer.cli", "serve", str(run), "--port", "0"]
    limits = ["--sessions", str(folder), "--resident", "512", "--queue", "256"]
    environment = {name: value for name, value in os.environ.items() if name != "COMPRESSIVE_TOKEN"}
    with subprocess.Popen([*command, *limits], stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
            if not found:
                raise RuntimeError(said + process.stderr.read())
            yield int(found[1]), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def untrained(folder: Path) -> Path:
    """Save a run whose untrained model has the sizes of configs/small.toml."""
    torch.manual_seed(0)
    sizes = tomllib.loads(SIZES.read_text(encoding="utf-8"))["model"]
    ct.save(folder / "untrained", ct.CompressiveTransformer(ct.ModelConfig(vocab_size=257, **sizes)), ByteTokenizer())
    return folder / "untrained"


def measured(run: Path, folder: Path, clients: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return all results for the model of a run."""
    model, _ = ct.load(run)
    text = (files("compressive_transformer.apps.demo") / "sample/test/356.txt").read_text(encoding="utf-8")
    reach = max(
        layout.segment_length + layout.recent_length + layout.compression_rate * layout.compressed_length
        for layout in model.layouts
    )
    memory = sum(
        states.numel() * states.element_size()
        for tier in (model.empty_memory(1).compressed, model.empty_memory(1).recent)
        for states in tier
    )
    # In a server of its own: one that has freed much would take new sessions in without growing.
    with server(run, folder / "held") as (port, process):
        memory_held = held(port, process, text, reach=reach, segment=model.config.segment_length)
    with server(run, folder / "levels") as (port, _):
        levels = []
        for count in clients:
            levels.append(level(port, count, text, seconds))
            said = f"{count} clients: {levels[-1]['tokens_written_per_second']} tokens written a second"
            print(said, file=sys.stderr, flush=True)
        return {
            "model": model.config.__dict__ | {"parameters": sum(each.numel() for each in model.parameters())},
            "bytes_of_both_tiers": memory,
            "memory": memory_held,
            "levels": levels,
        }


def main() -> None:
    """Print all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a run to serve")
    parser.add_argument(
        "--clients", type=int, nargs="+", default=CLIENTS, help="clients at once, one level after another"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="how long a level lasts, about")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = chosen.run or untrained(Path(folder))
        report = {
            "command": shlex.join(["python", *sys.argv]),
            **conditions(),
            "servers": {name: importlib.metadata.version(name) for name in ("fastapi", "uvicorn")},
            "round": {"characters_appended": PIECE, "tokens_written": TOKENS},
            **measured(run, Path(folder, "sessions"), chosen.clients, chosen.seconds),
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
