"""Documents encoded by several processes, in their order.

The processes are new ones of Python, which get documents through a pipe: a fork would copy locks that threads of
PyTorch and of progress bars may hold, and those of `multiprocessing` would run the user's script once more.
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
from .encoding import Encoded, encode
from .sources.source import Text
from .tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

CHARACTERS = 2**18
"""Documents go to a process together until they are so long; one that is longer goes alone."""

LARGE = 2**24
"""Bytes of a source that several processes are worth starting for."""

Chunk = list[tuple[str, Text]]


def encode_all(
    texts: Iterable[tuple[str, Text]], tokenizer: Tokenizer, file: Path, *, processes: int
) -> Generator[Encoded]:
    """The documents, each after the name of its split, encoded in their order by so many processes.

    `tokenizer` is the one in `file`. A mistake is that of the first document that has one, as with one process. A
    few chunks of documents for each process are in memory at a time.
    """
    if processes == 1:
        for split, text in texts:
            yield encode(tokenizer, split, text)
        return
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(processes))  # one waits for each process
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(processes):
            idle.put(stack.enter_context(contextlib.closing(_Worker(file))))
        waiting: deque[Future[list[Encoded]]] = deque()
        for chunk in _chunks(texts):
            waiting.append(threads.submit(_encode_chunk, idle, chunk))
            if len(waiting) > 2 * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _chunks(texts: Iterable[tuple[str, Text]]) -> Iterator[Chunk | Exception]:
    """Documents that are encoded together; where reading fails, the reason after the documents before it."""
    chunk: Chunk = []
    size = 0
    try:
        for split, text in texts:
            chunk.append((split, text))
            size += len(text.text)
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
    """Another process that encodes what it is sent. It ends with us, whatever ends us: nothing more can be read."""

    def __init__(self, tokenizer: Path) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work({str(tokenizer)!r})"
        # A group of its own, so that Ctrl-C on a terminal comes to us alone.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )

    def encode(self, chunk: Chunk) -> list[Encoded]:
        """The documents encoded. Raises what encoding raises there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(chunk, self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            code = self._process.wait()
            reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit {code}"
            raise CompressiveError(
                f"a process that encodes was ended {reason}; was there too little memory? Give fewer processes"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()


def work(tokenizer: str) -> None:
    """What each process does: answer every chunk of documents on stdin with `Encoded` ones, or what went wrong."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may be written among the answers
    loaded = load_tokenizer(tokenizer)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            chunk: Chunk = pickle.load(sys.stdin.buffer)
            answer: list[Encoded] | Exception
            try:
                answer = [encode(loaded, split, text) for split, text in chunk]
            except Exception as error:
                answer = error
            pickle.dump(answer, answers)
            answers.flush()


def default_processes(tokenizer: Tokenizer, size: int) -> int:
    """One for a small source, for one of unknown size, and for tokenizers as quick as reading; else one a core."""
    if size < LARGE or isinstance(tokenizer, ByteTokenizer):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
