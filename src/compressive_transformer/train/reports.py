"""Where all that a training run finds out goes: to callbacks first, then to the log, the terminal and the tracker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..model import CompressiveTransformer
from .distributed import Processes
from .log import Progress

Callback = Callable[[dict[str, Any], CompressiveTransformer], bool | None]
"""Takes an entry of the log before it is written, to which it may add plain values, and the model, which it may read;
True ends the run after this step."""


class Reports:
    """What a run tells. All processes call the same methods; only the leading one writes and calls the callbacks."""

    def __init__(
        self,
        model: CompressiveTransformer,
        processes: Processes,
        progress: Progress | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """`progress` is None where this process does not lead; `callbacks` are as many in each."""
        self.model, self.processes = model, processes
        self.progress, self.callbacks = progress, callbacks
        self.stopped = False
        """Whether a callback has ended the run, the same in each process."""

    def write(self, entry: dict[str, Any]) -> None:
        """Tell an entry of the log; `step` is one of its values."""
        stops = False
        if self.progress is not None:
            for callback in self.callbacks:
                stops = callback(entry, self.model) is True or stops
            self.progress.write(entry)
        if self.callbacks:
            told = self.processes.total(torch.tensor(float(stops), device=self.processes.device))
            self.stopped = self.stopped or bool(told)
