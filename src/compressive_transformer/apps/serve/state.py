"""What a session is: memory, what is expected next, and the newest tokens as they were read."""

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
    """Makes, writes and reads the states of one model."""

    def __init__(self, model: CompressiveTransformer, tokenizer: Tokenizer) -> None:
        self.model = model
        self.reach = max(
            layout.segment_length + layout.recent_length + layout.compression_rate * layout.compressed_length
            for layout in model.layouts
        )
        """Tokens that all slots together can stand for."""
        self._fingerprint: Mapping[str, str] = fingerprint(model, tokenizer)  # reads all weights: once

    def empty(self) -> State:
        """The state before a document begins."""
        return State.start(self.model)

    def after(self, state: State, memory: Memory, logits: Tensor, tokens: Tensor) -> State:
        """The state once `tokens [tokens]` were read, too."""
        return State(memory, logits.clone(), torch.cat([state.tail, tokens])[-self.reach :])

    def write(self, path: Path, state: State) -> None:
        """Write a state into a file that `Stream.load` reads, too: the whole file or none."""
        state.save(path, self._fingerprint)

    def read(self, path: Path) -> State:
        """The state in a file. Raises CompressiveError where it is damaged or another model's."""
        state = State.load(path, self.model, self._fingerprint)
        if (state.logits is None) != (state.seen == 0):
            raise CompressiveError(f"{path}: damaged: next-token logits are missing")
        return state
