"""Encoding of documents in several processes, in their order.

The workers are Python processes that read documents from a pipe. `concurrent.futures.ProcessPoolExecutor` would run
the user's script again in each of them (so scripts would need a `__main__` guard), leave them running when this
process is killed, and wait for running tasks after Ctrl-C. A fork would copy locks that threads of PyTorch may hold.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from ..errors import CompressiveError
from .sources.source import RawDocument
from .tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from .writer import Encoded, encode

CHARACTERS = 2**18
"""Size of a chunk of documents (characters); a longer document is a chunk."""

LARGE = 2**24
"""Size of a source from which several processes are started (bytes)."""

Chunk = list[tuple[str, RawDocument]]


def encode_all(
    documents: Iterable[tuple[str, RawDocument]], tokenizer: Tokenizer, file: Path, *, processes: int
) -> Generator[Encoded]:
    """Yield the documents encoded, in their order.

    An error is that of the first wrong document, for any number of processes. A few chunks of documents per process
    are in memory at a time.

    Args:
        documents: Pairs of the name of a split and a document.
        tokenizer: The tokenizer in `file`.
        file: A `tokenizer.json` for the workers.
        processes: Number of workers; 1 encodes in this process.
    """
    if processes == 1:
        for split, document in documents:
            yield encode(tokenizer, split, document)
        return
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(processes))  # one waits for each process
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(processes):
            idle.put(stack.enter_context(contextlib.closing(_Worker(file))))
        waiting: deque[Future[list[Encoded]]] = deque()
        for chunk in _chunks(documents):
            waiting.append(threads.submit(_encode_chunk, idle, chunk))
            if len(waiting) > 2 * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _chunks(documents: Iterable[tuple[str, RawDocument]]) -> Iterator[Chunk | Exception]:
    """Yield chunks of documents; where reading fails, the error after the documents before it."""
    chunk: Chunk = []
    size = 0
    try:
        for split, document in documents:
            chunk.append((split, document))
            size += len(document.content)
            if size >= CHARACTERS:
                yield chunk
                chunk, size = [], 0
    except Exception as error:
        yield chunk
        yield error
    else:
        yield chunk


def _encode_chunk(idle: SimpleQueue[_Worker], chunk: Chunk | Exception) -> list[Encoded]:
    if isinstance(chunk, Exception):
        raise chunk
    worker = idle.get()
    try:
        return worker.encode(chunk)
    finally:
        idle.put(worker)


class _Worker:
    """A worker process. It ends when this process does, in whatever way, as its pipe closes."""

    def __init__(self, tokenizer: Path) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work({str(tokenizer)!r})"
        # Another process group, so that Ctrl-C on a terminal reaches only this process.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )

    def encode(self, chunk: Chunk) -> list[Encoded]:
        """Return the documents encoded. Raises the error of the worker."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(chunk, self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            code = self._process.wait()
            reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise CompressiveError(f"an encoder process {reason} (out of memory?): use fewer processes") from error
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


def work(tokenizer: str) -> None:
    """Run a worker: answer each chunk of documents on stdin with `Encoded` ones, or an exception."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries that print must not write between the answers
    loaded = load_tokenizer(tokenizer)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            chunk: Chunk = pickle.load(sys.stdin.buffer)
            answer: list[Encoded] | Exception
            try:
                answer = [encode(loaded, split, document) for split, document in chunk]
            except Exception as error:
                answer = error
            pickle.dump(answer, answers)
            answers.flush()


def default_processes(tokenizer: Tokenizer, size: int) -> int:
    """Return 1 for sources that are small or of unknown size and for bytes, else the number of cores."""
    return 1 if size < LARGE or isinstance(tokenizer, ByteTokenizer) else available_cores()


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
