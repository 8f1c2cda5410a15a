"""Tokenizers of the library `tokenizers`: byte-level BPE trained here, and any `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError, first_line
from .base import TextDecoder, Tokenizer
from .bytes import ByteDecoder, to_utf8

if TYPE_CHECKING:  # byte models never need the library
    import tokenizers

LARGEST_VOCABULARY = 2**24


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`: one trained here by `train_bpe`, or any `tokenizer.json`.

    Special tokens such as `<|endoftext|>` are neither recognized in text nor added, and documents are neither truncated
    nor padded, whatever the file says.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Wrap `tokenizer`, which must not be changed afterwards."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise CompressiveError("the tokenizer has no tokens: train it first")
        # The largest id, not the number of tokens: vocabularies may have holes, which the library walks through.
        self.vocab_size = max(vocabulary.values()) + 2
        if self.vocab_size > LARGEST_VOCABULARY:
            raise CompressiveError(f"token id {self.vocab_size - 2} must be less than {LARGEST_VOCABULARY - 1}")
        description = json.loads(tokenizer.to_str())
        self._unknown = _unknown_id(description["model"], tokenizer)
        self._pieces: dict[int, bytes] | None = None
        if (description["decoder"] or {}).get("type") == "ByteLevel":
            self._pieces = {id: _piece(token) for token, id in vocabulary.items()}

    def _encode(self, text: str) -> NDArray[np.int64]:
        to_utf8(text)
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the Rust library raises nothing more specific
            raise CompressiveError(f"the tokenizer cannot encode the text: {first_line(error)}") from error
        ids = np.array(encoding.ids, dtype=np.int64)
        places = np.flatnonzero(ids == self._unknown)[:5]
        if places.size:
            unknown = ", ".join(repr(text[slice(*encoding.offsets[place])]) for place in places)
            raise CompressiveError(f"the tokenizer has no token for {unknown}: use one that has, such as bytes or bpe")
        return ids

    def _decode(self, ids: NDArray[np.int64]) -> str:
        if self._pieces is None:
            return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        pieces = self._pieces
        return b"".join(pieces.get(id, b"") for id in ids.tolist()).decode("utf-8", errors="replace")

    def decoder(self) -> TextDecoder:
        """Return a decoder whose joined output is `decode` of all ids.

        Where tokens are not bytes, this holds only for ids that a text encodes to: other decoders may depend on any
        earlier token.
        """
        return WindowDecoder(self) if self._pieces is None else ByteDecoder(self._pieces, self.vocab_size)

    def to_json(self) -> str:
        """Return the file format of `tokenizers`, which all tools of Hugging Face read."""
        return self._tokenizer.to_str()


def train_bpe(texts: Iterable[str], vocab_size: int = 32_000) -> HuggingFaceTokenizer:
    """Train a lossless byte-level BPE on `texts`, with at most `vocab_size` ids, `start` included.

    All 256 bytes are tokens and nothing is normalized, so every text can be encoded and is decoded unchanged.
    """
    if vocab_size < 257:
        raise CompressiveError(f"vocab_size ({vocab_size}) must be at least 257: 256 bytes and the start")
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return HuggingFaceTokenizer(tokenizer)


class WindowDecoder(TextDecoder):
    """A decoder of all other tokens: it decodes the last ids again with each new one and returns what was added.

    The ids before the new ones stay in the window because many decoders treat the first token specially. The library's
    `DecodeStream` discards an incomplete rest, ignores ids that do not exist, and does not serve SentencePiece.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def __call__(self, id: int) -> str:
        self._waiting.append(id)
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""  # the rest of a character may follow
        self._shown, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._shown, self._waiting = [], []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._waiting)[len(before) :]


def _unknown_id(model: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the id for unknown characters or words, None where there is none."""
    if model.get("unk_id") is not None:  # Unigram
        return int(model["unk_id"])
    token = model.get("unk_token")
    return tokenizer.token_to_id(token) if token is not None else None


def _byte_letters() -> tuple[str, ...]:
    """Return GPT-2's alphabet: printable bytes as they print, the others as characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_LETTERS = _byte_letters()
"""The letter that byte-level tokens are written with, by byte."""
_BYTES = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}


def _piece(token: str) -> bytes:
    """Return the bytes of a byte-level token; added tokens are not written in the alphabet."""
    in_alphabet = all(character in _BYTES for character in token)
    return bytes(_BYTES[character] for character in token) if in_alphabet else token.encode("utf-8")
