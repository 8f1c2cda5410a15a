"""What a session is: memory, what is expected next, and the newest tokens as they were read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint import read_metadata
from ...data.tokenizers import Tokenizer
from ...errors import CompressiveError
from ...generate.stream_file import belongs_to, read_state, write_state
from ...memory import Memory
from ...model import CompressiveTransformer


@dataclass(frozen=True, eq=False)
class State:
    """One lane of text, as it stands between two requests. It never changes; reading makes another one."""

    memory: Memory
    logits: Tensor | None
    """`[vocab_size]`, of the next token; None before the document's start was read."""
    tail: Tensor
    """The newest tokens that were read, `[tokens]`, as many as memory can stand for."""

    @property
    def seen(self) -> int:
        """Tokens that were read, the document's start included."""
        return int(self.memory.seen)


class States:
    """Makes, writes and reads the states of one model."""

    def __init__(self, model: CompressiveTransformer, tokenizer: Tokenizer) -> None:
        self.model = model
        self.reach = max(
            layout.segment_length + layout.recent_length + layout.compression_rate * layout.compressed_length
            for layout in model.layouts
        )
        """Tokens that all slots together can stand for."""
        self._owner: Mapping[str, str] = belongs_to(model, tokenizer)  # reads all weights: once

    def empty(self) -> State:
        """The state before a document begins."""
        return State(self.model.empty_memory(1), None, torch.zeros(0, dtype=torch.int64))

    def after(self, state: State, memory: Memory, logits: Tensor, tokens: Tensor) -> State:
        """The state once `tokens [tokens]` were read, too."""
        return State(memory, logits.clone(), torch.cat([state.tail, tokens])[-self.reach :])

    def write(self, path: Path, state: State) -> None:
        """Write a state into a file that `Stream.load` reads, too: the whole file or none."""
        notes = {"tail": json.dumps(state.tail.tolist())}
        write_state(path, state.memory, state.logits, self._owner, notes)

    def read(self, path: Path) -> State:
        """The state in a file. Raises CompressiveError where it is damaged or another model's."""
        memory, logits = read_state(path, self.model, self._owner)
        try:
            tail = torch.tensor(json.loads(read_metadata(path).get("tail", "[]")), dtype=torch.int64)
        except (ValueError, TypeError, RuntimeError):
            raise CompressiveError(f"{path}: damaged: its last tokens are no list of ids") from None
        if (logits is None) != (int(memory.seen) == 0) or tail.ndim != 1:
            raise CompressiveError(f"{path}: damaged: what it expects next is missing")
        return State(memory, logits, tail)
