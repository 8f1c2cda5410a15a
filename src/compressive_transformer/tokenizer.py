"""Text to token ids and back: bytes, byte-level BPE, and any Hugging Face tokenizer.

Beside its tokens a tokenizer has one more id, `start`, that stands before a document as its first input.
No text encodes to it and it is never a target.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from .errors import CompressiveError
from .files import whole_file

BYTES_FILE = {"compressive_transformer": "bytes", "version": 1}


class Tokenizer(ABC):
    """What encodes text to ids and decodes ids to text."""

    vocab_size: int
    """Number of ids, `start` included."""

    @property
    def start(self) -> int:
        """The id that stands before every document; the largest one."""
        return self.vocab_size - 1

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids `[tokens]` of a text. Raises CompressiveError for text that it cannot hold."""

    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        """The text of ids; "" for `start`, U+FFFD where the bytes are not UTF-8."""
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            raise _no_such_id(wrong[0], self.vocab_size)
        return self._decode(array[array != self.start])

    @abstractmethod
    def _decode(self, ids: NDArray[np.int64]) -> str:
        """The text of ids that are known to be tokens."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """A new incremental decoder, for output that is shown while it is written."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json` that `load_tokenizer` reads: the whole file or, on an error, none."""
        with whole_file(Path(path)) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8", newline="\n")


class Decoder(ABC):
    """Turns ids into text one by one: `decoder(id)` gives the text that this id completes, maybe ""."""

    @abstractmethod
    def __call__(self, id: int) -> str:
        """The text that became complete with `id`."""

    @abstractmethod
    def flush(self) -> str:
        """The rest, complete or not; the decoder is then as new."""


class ByteTokenizer(Tokenizer):
    """The bytes of the UTF-8 form: id = byte, `start` = 256."""

    vocab_size = 257

    def encode(self, text: str) -> NDArray[np.int64]:
        """The bytes of a text `[bytes]`. Raises CompressiveError for a lone surrogate."""
        return np.frombuffer(_to_utf8(text), dtype=np.uint8).astype(np.int64)

    def _decode(self, ids: NDArray[np.int64]) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def decoder(self) -> Decoder:
        """A decoder that holds back at most the three bytes of a character that is not complete."""
        return _ByteDecoder({byte: bytes([byte]) for byte in range(256)}, self.vocab_size)

    def to_json(self) -> str:
        """A few words: there is nothing to store."""
        return json.dumps(BYTES_FILE) + "\n"


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`: one trained here by `train_bpe`, or any `tokenizer.json`.

    Text is always text: special tokens such as `<|endoftext|>` are neither looked for in it nor added, and a
    document is neither cut nor padded, whatever the file says.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Take over `tokenizer`, which must not be changed afterwards."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise CompressiveError("the tokenizer has no tokens: train it first")
        # The largest id, not the number of tokens: vocabularies of others have holes.
        self.vocab_size = max(vocabulary.values()) + 2
        description = json.loads(tokenizer.to_str())
        self._unknown = _unknown_id(description["model"], tokenizer)
        self._pieces: dict[int, bytes] | None = None
        if (description["decoder"] or {}).get("type") == "ByteLevel":
            self._pieces = {id: _piece(token) for token, id in vocabulary.items()}

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids `[tokens]` of a text, encoded as a whole, since cutting it up would change them.

        Raises CompressiveError for a lone surrogate, and for characters that the vocabulary lacks.
        """
        _to_utf8(text)
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the Rust library raises nothing more specific
            raise CompressiveError(f"the tokenizer cannot encode the text: {_first_line(error)}") from error
        ids = np.array(encoding.ids, dtype=np.int64)
        places = np.flatnonzero(ids == self._unknown)[:5]
        if places.size:
            unknown = ", ".join(repr(text[slice(*encoding.offsets[place])]) for place in places)
            raise CompressiveError(f"the tokenizer has no token for {unknown}: use one that has, as bytes or bpe")
        return ids

    def _decode(self, ids: NDArray[np.int64]) -> str:
        if self._pieces is None:
            return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        pieces = self._pieces
        return b"".join(pieces.get(id, b"") for id in ids.tolist()).decode("utf-8", errors="replace")

    def decoder(self) -> Decoder:
        """A decoder whose output, joined, is `decode` of all the ids.

        Where the tokens are not bytes this is promised only for ids that a text encodes to, since the
        decoders of others may look back at will.
        """
        return _WindowDecoder(self) if self._pieces is None else _ByteDecoder(self._pieces, self.vocab_size)

    def to_json(self) -> str:
        """The file format of `tokenizers`, readable by every tool of Hugging Face."""
        return self._tokenizer.to_str()


def train_bpe(texts: Iterable[str], vocab_size: int = 32_000) -> HuggingFaceTokenizer:
    """A lossless byte-level BPE learnt from `texts`, with at most `vocab_size` ids, `start` included.

    All 256 bytes are tokens and nothing is normalised, so every text can be encoded and comes back as it was.
    """
    if vocab_size < 257:
        raise CompressiveError(f"vocab_size ({vocab_size}) must be at least 257: 256 bytes and the start")
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


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of a folder that has one (as Hugging Face models do).

    Raises CompressiveError for a file that is missing or no tokenizer.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CompressiveError(
            f"no tokenizer at {file}: give a tokenizer.json or a folder that has one"
            " (save_pretrained of a fast Hugging Face tokenizer writes it)"
        )
    try:
        content = file.read_bytes().decode("utf-8")
        description = json.loads(content)
        if not (isinstance(description, dict) and "compressive_transformer" in description):
            return HuggingFaceTokenizer(tokenizers.Tokenizer.from_str(content))
    except Exception as error:  # the Rust library raises nothing more specific
        raise CompressiveError(f"{file} is not a tokenizer.json: {_first_line(error)}") from error
    if description != BYTES_FILE:
        raise CompressiveError(f"{file} is of a kind or version that this release does not know: update it")
    return ByteTokenizer()


class _ByteDecoder(Decoder):
    """For tokens that are bytes: holds back an incomplete character, nothing else."""

    def __init__(self, pieces: Mapping[int, bytes], vocab_size: int) -> None:
        self._pieces, self._vocab_size = pieces, vocab_size
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, id: int) -> str:
        if not 0 <= id < self._vocab_size:
            raise _no_such_id(id, self._vocab_size)
        return self._utf8.decode(self._pieces.get(id, b""))

    def flush(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class _WindowDecoder(Decoder):
    """For all other tokens: decodes the last ids again with each new one and gives what was added.

    The ids before the new ones stay in the window because many decoders treat the first token specially.
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


def _no_such_id(id: int, vocab_size: int) -> CompressiveError:
    return CompressiveError(f"token id {id} does not exist: ids are 0 to {vocab_size - 1}")


def _to_utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CompressiveError(
            f"character {error.start} (U+{ord(text[error.start]):04X}) is a lone surrogate, which no"
            " UTF-8 text can hold: remove or replace it"
        ) from error


def _unknown_id(model: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> int | None:
    """The id that a tokenizer gives for what it does not know, if it has one."""
    if model.get("unk_id") is not None:  # Unigram
        return int(model["unk_id"])
    token = model.get("unk_token")
    return tokenizer.token_to_id(token) if token is not None else None


# GPT-2's alphabet: printable bytes are themselves, the others are the characters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


def _piece(token: str) -> bytes:
    """The bytes that a byte-level token stands for; added tokens are not written in the alphabet."""
    in_alphabet = all(character in _BYTES for character in token)
    return bytes(_BYTES[character] for character in token) if in_alphabet else token.encode("utf-8")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
