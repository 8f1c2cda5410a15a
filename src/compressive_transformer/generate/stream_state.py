"""State of a stream between two calls, and its safetensors file."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ..checkpoint import digest, load_tensors, read_metadata, save_tensors
from ..config.toml import to_dict, with_defaults
from ..data.tokenizers import Tokenizer
from ..errors import CompressiveError
from ..memory import Memory
from ..model import CompressiveTransformer

FORMAT, VERSION = "compressive-transformer stream", "1"


def fingerprint(model: CompressiveTransformer, tokenizer: Tokenizer) -> dict[str, str]:
    """Return what must be equal where a stream is saved and where it is loaded; reads all weights."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": json.dumps(to_dict(model.config), sort_keys=True),
        "weights": digest(model.state_dict()),
        "tokenizer": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
    }


@dataclass(frozen=True, eq=False)
class StreamState:
    """State of one lane between two calls. It never changes: reading makes a new one, so copies are free.

        state = stream.state                          # of a `Stream`, which can be set back: stream.state = state

        model_id = fingerprint(model, tokenizer)      # reads all weights: compute it once, for all states of a model
        state = StreamState.start(model)
        output = model(tokens[None], state.memory)
        state = StreamState(output.memory, output.logits[0, -1].clone(), tail=torch.cat([state.tail, tokens])[-100:])
        state.save(path, model_id)
        state = StreamState.load(path, model, model_id)

    Files of `Stream.save` and of `StreamState.save` are the same.
    """

    memory: Memory
    """Memory of one lane."""
    logits: Tensor | None = None
    """Logits of the next token, `[vocab_size]`; None before the start of the document was read, or if unknown."""
    tail: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """The newest tokens that were read, `[tokens]`, as many as the user of the state wants to keep."""

    @classmethod
    def start(cls, model: CompressiveTransformer) -> Self:
        """Return the state before a document, whose first token must be the tokenizer's `start`."""
        return cls(model.empty_memory(1))

    @property
    def seen(self) -> int:
        """Tokens that were read, the start of the document included."""
        return int(self.memory.seen)

    def save(self, path: Path, model_id: Mapping[str, str]) -> None:
        """Write the state to a file atomically.

        Args:
            path: The file.
            model_id: The `fingerprint` of the model and its tokenizer.

        Raises:
            CompressiveError: The file cannot be written.
        """
        tensors = self.memory.state_dict()
        if self.logits is not None:
            tensors["logits"] = self.logits
        save_tensors(path, tensors, {"tail": json.dumps(self.tail.tolist()), **model_id})

    @classmethod
    def load(cls, path: Path, model: CompressiveTransformer, model_id: Mapping[str, str]) -> Self:
        """Read a state from a file, to the device of the model.

        Args:
            path: The file.
            model: The model of `model_id`.
            model_id: The `fingerprint` of the model and its tokenizer.

        Raises:
            CompressiveError: The file is missing or damaged, or was saved with another config, other weights or
                another tokenizer.
        """
        metadata = read_metadata(path)
        _require_same(path, metadata, model, model_id)
        tensors, device = load_tensors(path), model.embedding.weight.device
        logits = tensors.pop("logits", None)
        try:
            if logits is not None and logits.shape != (model.config.vocab_size,):
                raise CompressiveError(f"logits must be [vocab_size = {model.config.vocab_size}]")
            memory = Memory.from_state_dict(tensors).to(device)
            model.check_memory(memory, 1)
            return cls(memory, None if logits is None else logits.to(device), _tail(metadata.get("tail", "[]")))
        except CompressiveError as error:
            raise CompressiveError(f"{path}: damaged: {error}") from None


def _tail(text: str) -> Tensor:
    try:
        tail = torch.tensor(json.loads(text), dtype=torch.int64)
    except (ValueError, TypeError, RuntimeError, RecursionError):
        tail = torch.tensor(0)
    if tail.ndim != 1:
        raise CompressiveError("its last tokens are not a list of ids")
    return tail


def _require_same(
    path: Path, metadata: dict[str, str], model: CompressiveTransformer, model_id: Mapping[str, str]
) -> None:
    """Raise CompressiveError unless the file belongs to this model."""
    config = metadata.get("config", "")
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):  # what is not a config differs
        config = json.dumps(with_defaults(model.config, json.loads(config)), sort_keys=True)
    for name, value in model_id.items():
        if {**metadata, "config": config}.get(name) != value:
            raise CompressiveError(
                f"{path}: not a stream of this model: its {name} differs; load it with the model that it was saved "
                "with, or start a new stream"
            )
