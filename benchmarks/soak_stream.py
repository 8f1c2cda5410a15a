"""Soak test: a million tokens in one stream and in `evaluate`: memory, time and positions.

    python benchmarks/soak_stream.py > benchmarks/soak_stream.json

Reads the books of the package as one document. Asserts nothing: it prints the results.
"""

from __future__ import annotations

import json
import math
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import compressive_transformer as ct
from compressive_transformer.data.tokenizers import ByteTokenizer

TOKENS = 1_000_000
PARTS = 50
CONFIG = ct.ModelConfig(
    vocab_size=257,
    d_model=64,
    n_layers=2,
    n_heads=2,
    segment_length=64,
    memory_length=64,
    compressed_length=64,
    compression_rate=4,
)


def text() -> bytes:
    """Return the sample's training books, repeated to the length."""
    folder = files("compressive_transformer.apps.demo") / "sample" / "train"
    books = sorted((book for book in folder.iterdir() if book.name.endswith(".txt")), key=lambda book: book.name)
    content = b"".join(book.read_bytes() for book in books)
    return (content * math.ceil(TOKENS / len(content)))[:TOKENS]


def resident() -> int:
    """Return the resident bytes of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def read(content: bytes) -> tuple[ct.Stream, list[dict[str, float]]]:
    """Return a stream that has read the text, and seconds and resident bytes of each part."""
    torch.manual_seed(0)
    stream = ct.Stream(ct.CompressiveTransformer(CONFIG).eval(), ByteTokenizer())
    parts = []
    for part in chunks(content, len(content) // PARTS):
        began = time.perf_counter()
        stream.read(part)
        parts.append({"seconds": time.perf_counter() - began, "resident": resident()})
    return stream, parts


def written(stream: ct.Stream, tokens: int) -> dict[str, float]:
    """Return seconds per generated token of the first and the last tenth, and resident bytes."""
    times, before = [], resident()
    for _ in range(10):
        began = time.perf_counter()
        stream.write(tokens // 10, seed=0)
        times.append((time.perf_counter() - began) / (tokens // 10))
    return {"first": times[0], "last": times[-1], "resident_before": before, "resident_after": resident()}


def chunks(content: bytes, size: int) -> Iterator[bytes]:
    for first in range(0, len(content), size):
        yield content[first : first + size]


def drift(stream: ct.Stream, content: bytes) -> float:
    """Return the largest difference of the last logits to those of a model that has read only their temporal range.

    In double precision: accumulated errors, above all of positions, would show here.
    """
    model = ct.CompressiveTransformer(CONFIG).double().eval()
    model.load_state_dict(stream.model.state_dict())
    step, reach = CONFIG.segment_length * CONFIG.compression_rate, CONFIG.temporal_range
    tokens = torch.tensor([[ByteTokenizer().start, *content]])
    first = (tokens.shape[1] - reach - 4 * step * CONFIG.n_layers) // step * step
    whole = model.empty_memory(1)
    with torch.no_grad():
        for piece in tokens.split(CONFIG.segment_length, dim=1):
            output = model(piece, whole)
            whole = output.memory
        alone = model(tokens[:, first:])
    return float((output.logits[:, -1] - alone.logits[:, -1]).abs().max())


def evaluated(content: bytes, model: ct.CompressiveTransformer) -> list[dict[str, float]]:
    """Return seconds and resident bytes of each tenth while `evaluate` scores the text as one document."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_bytes(content.decode("utf-8", "ignore").replace("\r", " ").encode())
        corpus = ct.prepare(Path(folder, "text.txt"), Path(folder, "data"), holdout=0)
        parts: list[dict[str, float]] = []
        done, began = 0, time.perf_counter()

        def progress(tokens: int) -> None:
            nonlocal done, began
            done += tokens
            if done >= len(content) // 10 * (len(parts) + 1):
                parts.append({"seconds": time.perf_counter() - began, "resident": resident()})
                began = time.perf_counter()

        ct.evaluate(model, corpus.train, batch_size=1, progress=progress)
    return parts


def main() -> None:
    """Print all results as JSON."""
    content = text()
    stream, parts = read(content)
    seconds, held = [part["seconds"] for part in parts], [part["resident"] for part in parts]
    tenth = PARTS // 10
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "tokens": len(content),
        "seen": int(stream.memory.seen),
        "read": {
            "last_tenth_of_time_to_first": statistics.median(seconds[-tenth:]) / statistics.median(seconds[:tenth]),
            # The first part warms up allocators and threads.
            "resident_growth": held[-1] / held[1] - 1,
            "tokens_per_second": len(content) / sum(seconds),
            "parts": parts,
        },
        "write": written(stream, 20_000),
        "evaluate": evaluated(content, stream.model),
        "largest_drift_of_logits": drift(stream, content),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
