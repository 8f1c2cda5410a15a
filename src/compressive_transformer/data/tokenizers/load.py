"""Tokenizers from files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from ...errors import CompressiveError
from .base import Tokenizer
from .bytes import BYTES_FILE, ByteTokenizer
from .hugging_face import HuggingFaceTokenizer, first_line
from .mu_law import MU_LAW_FILE, MuLawTokenizer
from .sentencepiece import SENTENCE_PIECE_FILE, SentencePieceTokenizer
from .words import WORDS_FILE, WordTokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of a folder that has one (as Hugging Face models do), or of a `.model`.

    The last is a model of SentencePiece.

    Raises CompressiveError for a file that is missing or no tokenizer.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CompressiveError(
            f"no tokenizer at {file}: give a tokenizer.json or a folder that has one"
            " (save_pretrained of a fast Hugging Face tokenizer writes it), or a .model of SentencePiece"
        )
    if file.suffix == ".model":
        return _sentence_piece(file)
    try:
        content = file.read_bytes().decode("utf-8")
        description = json.loads(content)
        if not (isinstance(description, dict) and "compressive_transformer" in description):
            from tokenizers import Tokenizer as LibraryTokenizer  # who reads bytes never needs it

            return HuggingFaceTokenizer(LibraryTokenizer.from_str(content))
    except Exception as error:  # the Rust library raises nothing more specific
        raise CompressiveError(f"{file} is not a tokenizer.json: {first_line(error)}") from error
    try:
        tokenizer = _ours(description)
    except CompressiveError as error:
        raise CompressiveError(f"{file}: {error}") from error
    if tokenizer is None:
        raise CompressiveError(f"{file} is of a kind or version that this release does not know: update it")
    return tokenizer


def _sentence_piece(file: Path) -> Tokenizer:
    try:
        return SentencePieceTokenizer(file.read_bytes())
    except CompressiveError as error:
        raise CompressiveError(f"{file}: {error}") from error


def _ours(description: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer of a file of our own; None where it is not whole, or newer than this release."""
    content = {key: value for key, value in description.items() if key not in BYTES_FILE}
    kind = {key: description.get(key) for key in BYTES_FILE}
    if kind == BYTES_FILE and not content:
        return ByteTokenizer()
    if kind == MU_LAW_FILE and content.keys() == {"rate"} and isinstance(content["rate"], int):
        return MuLawTokenizer(content["rate"])
    if kind == WORDS_FILE and content.keys() == {"words"} and isinstance(content["words"], list):
        return WordTokenizer(content["words"])
    if kind == SENTENCE_PIECE_FILE and content.keys() == {"model"} and isinstance(content["model"], str):
        try:
            model = base64.b64decode(content["model"])
        except ValueError as error:
            raise CompressiveError("the model of SentencePiece in it is damaged") from error
        return SentencePieceTokenizer(model)
    return None
