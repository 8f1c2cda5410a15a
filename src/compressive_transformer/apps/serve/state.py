"""States of sessions: memory, logits of the next token, and the newest tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...data.tokenizers import Tokenizer
from ...errors import CompressiveError
from ...generate.stream_state import StreamState, fingerprint
from ...memory import Memory
from ...model import CompressiveTransformer

State = StreamState


class States:
    """Factory and files of the states of one model."""

    def __init__(self, model: CompressiveTransformer, tokenizer: Tokenizer) -> None:
        self.model = model
        self.reach = max(
            layout.segment_length + layout.recent_length + layout.compression_rate * layout.compressed_length
            for layout in model.layouts
        )
        """Number of newest tokens that a state keeps: those that slots can stand for."""
        self._fingerprint: Mapping[str, str] = fingerprint(model, tokenizer)  # reads all weights: once

    def empty(self) -> State:
        """Return the state before a document."""
        return State.start(self.model)

    def after(self, state: State, memory: Memory, logits: Tensor, tokens: Tensor) -> State:
        """Return the state after `tokens [tokens]`."""
        return State(memory, logits.clone(), torch.cat([state.tail, tokens])[-self.reach :])

    def write(self, path: Path, state: State) -> None:
        """Write a state to a file atomically; `Stream.load` reads it too."""
        state.save(path, self._fingerprint)

    def read(self, path: Path) -> State:
        """Read a state from a file. Raises CompressiveError if it is damaged or belongs to another model."""
        state = State.load(path, self.model, self._fingerprint)
        if (state.logits is None) != (state.seen == 0):
            raise CompressiveError(f"{path}: damaged: next-token logits are missing")
        return state
