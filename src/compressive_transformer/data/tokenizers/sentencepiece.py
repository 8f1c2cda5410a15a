"""Models of SentencePiece, as they are."""

from __future__ import annotations

import base64
import json

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError, optional
from .base import Decoder, Tokenizer
from .bytes import to_utf8
from .hugging_face import WindowDecoder

SENTENCE_PIECE_FILE = {"compressive_transformer": "sentencepiece", "version": 1}


class SentencePieceTokenizer(Tokenizer):
    """A trained model of SentencePiece, encoded and decoded by its own library: the same ids as anywhere.

    Whether a text comes back as it was depends on how the model normalises; U+2581, which stands for a space in its
    pieces, never does.
    """

    def __init__(self, model: bytes) -> None:
        """For the content of a `.model` file. Raises CompressiveError for anything else."""
        library = optional("sentencepiece", extra="data", purpose="a tokenizer of SentencePiece")
        self._processor = library.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise CompressiveError("this is not a model of SentencePiece") from error
        self._model = model
        self.vocab_size = self._processor.GetPieceSize() + 1

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids `[tokens]` of a text. Raises CompressiveError for characters that the vocabulary lacks."""
        to_utf8(text)
        ids = np.array(self._processor.EncodeAsIds(text), dtype=np.int64)
        places = np.flatnonzero(ids == self._processor.unk_id())[:5]
        if places.size:
            pieces = self._processor.EncodeAsPieces(text)
            named = ", ".join(repr(pieces[place]) for place in places)
            raise CompressiveError(f"the tokenizer has no token for {named}: use one that has, as bytes or bpe")
        return ids

    def _decode(self, ids: NDArray[np.int64]) -> str:
        return str(self._processor.DecodeIds(ids.tolist()))

    def decoder(self) -> Decoder:
        """A decoder whose output, joined, is `decode` of all ids that a text encodes to."""
        return WindowDecoder(self)

    def to_json(self) -> str:
        """The model in base64: it is a binary file."""
        return json.dumps({**SENTENCE_PIECE_FILE, "model": base64.b64encode(self._model).decode("ascii")}) + "\n"
