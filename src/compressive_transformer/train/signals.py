"""Ctrl-C and SIGTERM: stop a run after its current step."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Handler that records the first signal and raises KeyboardInterrupt at the second; main thread only."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Ignored signals stay ignored, as `nohup` and background jobs of shells want; None is a handler that is
            # not Python's, which could not be restored.
            chosen = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
            self._before = {number: signal.signal(number, self._receive) for number in chosen}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        text = "stopping after this step, with a checkpoint; a second signal stops immediately"
        print(text, file=sys.stderr, flush=True)
