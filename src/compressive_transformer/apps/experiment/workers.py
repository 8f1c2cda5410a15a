"""Runs side by side: each in a process with one thread, whose output goes to a log."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import NamedTuple

import torch

from ...compression import COMPRESSIONS
from ...data import open_corpus
from ...data.pool import available_cores
from ...errors import CompressiveError
from ...files import import_file, locked
from .plan import Run
from .running import finish

LOCK = "experiment.lock"
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_TERMINATE = 20.0


@contextlib.contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Create the folder of an experiment if need be, and lock it.

    Raises CompressiveError if another process holds the lock, and for a folder of something else.
    """
    lock = out / LOCK
    if out.exists() and not lock.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CompressiveError(f"{out}: exists already and is not an experiment's folder; choose another")
    out.mkdir(parents=True, exist_ok=True)
    with locked(lock, f"{out}: another process runs an experiment there; wait for its end, or choose another folder"):
        yield


def device_count() -> int:
    """Return the number of GPUs where there are any, else the number of cores that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else available_cores()


def log_of(run: Run, out: Path) -> Path:
    """Return the file that the output of a run goes to, beside its folder."""
    return (out / run.path).with_suffix(".log")


def finish_all(
    runs: Sequence[Run],
    corpus: Path,
    out: Path,
    *,
    processes: int,
    look: Callable[[Sequence[Run]], None],
    ended: Callable[[Run, str | None], None],
) -> None:
    """Finish the runs in their order, `processes` of them side by side, each with one thread.

    `look` is called every second with the runs at work, `ended` for each run that has ended, with the reason where it
    failed. On an interrupt all processes are terminated first.
    """
    waiting = deque((run, origin_of(run.setting.model.compression)) for run in runs)
    places = list(range(processes))
    active: dict[BaseProcess, tuple[Run, int]] = {}
    try:
        while waiting or active:
            while waiting and places:
                (run, origin), place = waiting.popleft(), places.pop(0)
                active[_start(run, origin, corpus, out, place)] = run, place
            connection.wait([process.sentinel for process in active], timeout=SECONDS_BETWEEN_LOOKS)
            for process in [process for process in active if process.exitcode is not None]:
                run, place = active.pop(process)
                places.append(place)
                ended(run, _reason(process.exitcode or 0, log_of(run, out)))
            look([run for run, _ in active.values()])
    finally:
        for process in active:
            process.terminate()
        for process in active:
            process.join(SECONDS_TO_TERMINATE)
            # An exception of a signal handler is lost where Python ignores exceptions, in a finalizer for example.
            process.kill()
            process.join()


def _start(run: Run, origin: Origin, corpus: Path, out: Path, place: int) -> BaseProcess:
    log = log_of(run, out)
    log.parent.mkdir(parents=True, exist_ok=True)
    spawned = multiprocessing.get_context("spawn")
    process = spawned.Process(target=_work, args=(run, origin, corpus, out, log, place), daemon=True)
    # Ctrl-C on a terminal goes to all processes of the group. Only this one takes it and terminates the others, which
    # inherit the mask. The resource tracker would lift it when it starts.
    ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return process


def _work(run: Run, origin: Origin, corpus: Path, out: Path, log: Path, place: int) -> None:
    """Do the work of one process."""
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # as an exception: it cleans up
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = str(place % torch.cuda.device_count())
    register(origin)
    try:
        finish(run, open_corpus(corpus), out)
    except CompressiveError as error:
        sys.exit(str(error))


class Origin(NamedTuple):
    """Origin of a compression function, for a process in which it is not registered."""

    name: str
    module: str
    file: str
    attribute: str


def origin_of(name: str) -> Origin:
    """Return the origin of a registered function. Raises CompressiveError for a class defined inside a function."""
    kind = COMPRESSIONS[name]
    if "<locals>" in kind.__qualname__:
        raise CompressiveError(
            f"compression {name!r}: {kind.__qualname__} is defined inside a function, where other processes cannot "
            "import it; define it at the top level of a module"
        )
    file = getattr(sys.modules[kind.__module__], "__file__", None)
    return Origin(name, kind.__module__, file or "", kind.__qualname__)


def register(origin: Origin) -> None:
    """Register the function in this process."""
    if origin.name in COMPRESSIONS:
        return
    try:
        module = importlib.import_module(origin.module)
    except ModuleNotFoundError:
        if not origin.file:
            raise
        module = None
    if origin.file and getattr(module, "__file__", None) != origin.file:
        module = import_file(Path(origin.file))  # a plugin: it is not on the module path, or shares a name on it
    COMPRESSIONS[origin.name] = getattr(module, origin.attribute)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _reason(code: int, log: Path) -> str | None:
    """Return why a process failed; None if it did not."""
    if code <= 0:
        return f"ended by {signal.Signals(-code).name}" if code else None
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), f"exit {code}")
