"""How far a training run has come, and what must be the same where it goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import TrainConfig, check_range, check_types
from ..data import Corpus
from ..errors import CompressiveError
from ..model import CompressiveTransformer
from .distributed import Processes


@dataclass
class Counters:
    """How far a run has come."""

    step: int = 0
    since_update: int = 0
    tokens: int = 0
    """Targets that were learned from, over all processes."""
    best: float | None = None
    """Fewest bits per byte at a validation."""
    skipped: int = 0
    """Updates that were left out because their gradients were not finite."""
    skipped_in_a_row: int = 0
    """Those since the last update."""

    def __post_init__(self) -> None:
        check_types(self)  # they may come from a damaged file
        check_range(self, ("step", "since_update", "tokens", "skipped", "skipped_in_a_row"), low=0)
        if self.best is not None and not (isinstance(self.best, float) and math.isfinite(self.best)):
            raise CompressiveError(f"best ({self.best!r}) must be a number, or none")


def check_fits(model: CompressiveTransformer, corpus: Corpus, config: TrainConfig, processes: Processes) -> None:
    """Raise CompressiveError where model, corpus and settings do not fit one another."""
    if corpus.vocab_size != model.config.vocab_size:
        raise CompressiveError(
            f"vocab_size ({model.config.vocab_size}) must be {corpus.vocab_size}, the number of ids of {corpus.path}"
        )
    parts = processes.world * config.micro_batches
    if config.batch_size % parts:
        raise CompressiveError(
            f"batch_size ({config.batch_size}) must be a multiple of {parts}, processes times micro_batches"
        )


def check_same(folder: Path, part: str, stored: Any, now: Any) -> None:
    """Raise CompressiveError where a run would go on under other conditions than it began with."""
    if isinstance(now, dict) and isinstance(stored, dict):
        for name in sorted({*now, *stored}):
            check_same(folder, f"{part}.{name}", stored.get(name), now.get(name))
    elif stored != now:
        raise CompressiveError(
            f"{folder}: cannot resume, {part} was {stored!r} and is {now!r} now; set it back, or begin a new run"
        )
