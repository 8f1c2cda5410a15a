"""Tokenizers from files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from ...errors import CompressiveError, first_line
from .base import Tokenizer
from .bytes import BYTES_FILE, ByteTokenizer
from .hugging_face import HuggingFaceTokenizer
from .mu_law import MU_LAW_FILE, MuLawTokenizer
from .sentencepiece import SENTENCE_PIECE_FILE, SentencePieceTokenizer
from .words import WORDS_FILE, WordTokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a file.

    Args:
        path: A `tokenizer.json` (written by `Tokenizer.save`, or any of the library `tokenizers`), a folder with one
            such as a Hugging Face model, or the `.model` of SentencePiece.

    Returns:
        The tokenizer.

    Raises:
        CompressiveError: for a file that is missing or not a tokenizer.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CompressiveError(
            f"no tokenizer at {file}: give a tokenizer.json or a folder that has one"
            " (save_pretrained of a fast Hugging Face tokenizer writes it), or a SentencePiece .model"
        )
    if file.suffix == ".model":
        return _sentence_piece(file)
    try:
        content = file.read_bytes().decode("utf-8")
        description = json.loads(content)
        if not (isinstance(description, dict) and "compressive_transformer" in description):
            from tokenizers import Tokenizer as LibraryTokenizer  # byte models never need it

            return HuggingFaceTokenizer(LibraryTokenizer.from_str(content))
    except Exception as error:  # the Rust library raises nothing more specific
        raise CompressiveError(f"{file} is not a tokenizer.json: {first_line(error)}") from error
    try:
        tokenizer = _ours(description)
    except CompressiveError as error:
        raise CompressiveError(f"{file}: {error}") from error
    if tokenizer is None:
        raise CompressiveError(f"{file} has a kind or version that this release does not know: update the package")
    return tokenizer


def _sentence_piece(file: Path) -> Tokenizer:
    try:
        return SentencePieceTokenizer(file.read_bytes())
    except CompressiveError as error:
        raise CompressiveError(f"{file}: {error}") from error


def _ours(description: dict[str, Any]) -> Tokenizer | None:
    """Return the tokenizer of a file of this package; None where it is incomplete, or newer than this release."""
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
            raise CompressiveError("its SentencePiece model is damaged") from error
        return SentencePieceTokenizer(model)
    return None
