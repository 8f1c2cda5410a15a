"""What a file of a stream's state says of the model and the tokenizer that it belongs to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from .checkpoint import digest, read_metadata
from .errors import CompressiveError
from .model import CompressiveTransformer
from .settings import as_table, with_defaults
from .tokenizer import Tokenizer

FORMAT, VERSION = "compressive-transformer stream", "1"


def belongs_to(model: CompressiveTransformer, tokenizer: Tokenizer) -> dict[str, str]:
    """The metadata of the file: what must be the same where the stream goes on."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": json.dumps(as_table(model.config), sort_keys=True),
        "weights": digest(model.state_dict()),
        "tokenizer": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
    }


def require_same(path: Path, model: CompressiveTransformer, tokenizer: Tokenizer) -> None:
    """Raise CompressiveError unless the file at `path` belongs to this model and this tokenizer."""
    kept = read_metadata(path)
    kept["config"] = _with_defaults(kept.get("config", ""), model)
    for what, now in belongs_to(model, tokenizer).items():
        if kept.get(what) != now:
            raise CompressiveError(f"{path}: not a stream of this model: its {what} differs; begin a new stream")


def _with_defaults(stored: str, model: CompressiveTransformer) -> str:
    """The config of an earlier version, fields that are newer at their defaults; what is no config as it is."""
    try:
        return json.dumps(with_defaults(model.config, json.loads(stored)), sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return stored
