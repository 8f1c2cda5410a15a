"""A stream's state in a file, and what the file says of the model and the tokenizer that it belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..checkpoint import digest, load_tensors, read_metadata, save_tensors
from ..config.toml import to_dict, with_defaults
from ..data.tokenizers import Tokenizer
from ..errors import CompressiveError
from ..memory import Memory
from ..model import CompressiveTransformer

FORMAT, VERSION = "compressive-transformer stream", "1"


def belongs_to(model: CompressiveTransformer, tokenizer: Tokenizer) -> dict[str, str]:
    """The metadata of the file: what must be the same where the stream goes on."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": json.dumps(to_dict(model.config), sort_keys=True),
        "weights": digest(model.state_dict()),
        "tokenizer": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
    }


def write_state(
    path: Path, memory: Memory, logits: Tensor | None, owner: Mapping[str, str], notes: Mapping[str, str] | None = None
) -> None:
    """Write memory of one lane and the logits `[vocab_size]` of its next token, the whole file or none.

    `owner` is what `belongs_to` says; `notes` are kept beside it. Raises CompressiveError where the file cannot be
    written.
    """
    tensors = memory.state_dict()
    if logits is not None:
        tensors["logits"] = logits
    save_tensors(path, tensors, metadata={**(notes or {}), **owner})


def read_state(path: Path, model: CompressiveTransformer, owner: Mapping[str, str]) -> tuple[Memory, Tensor | None]:
    """What `write_state` wrote, on the model's device.

    Raises CompressiveError where the file is missing or damaged, or belongs to another owner.
    """
    _require_same(path, model, owner)
    tensors = load_tensors(path)
    logits = tensors.pop("logits", None)
    device, vocab_size = model.embedding.weight.device, model.config.vocab_size
    try:
        memory = Memory.from_state_dict(tensors).to(device)
        model.check_memory(memory, 1)
    except CompressiveError as error:
        raise CompressiveError(f"{path}: damaged: {error}") from None
    if logits is not None and logits.shape != (vocab_size,):
        raise CompressiveError(f"{path}: damaged: it must hold logits [vocab_size = {vocab_size}]")
    return memory, None if logits is None else logits.to(device)


def _require_same(path: Path, model: CompressiveTransformer, owner: Mapping[str, str]) -> None:
    """Raise CompressiveError unless the file at `path` belongs to this owner."""
    kept = read_metadata(path)
    kept["config"] = _with_defaults(kept.get("config", ""), model)
    for what, now in owner.items():
        if kept.get(what) != now:
            raise CompressiveError(f"{path}: not a stream of this model: its {what} differs; begin a new stream")


def _with_defaults(stored: str, model: CompressiveTransformer) -> str:
    """The config of an earlier version, fields that are newer at their defaults; what is no config as it is."""
    try:
        return json.dumps(with_defaults(model.config, json.loads(stored)), sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return stored
