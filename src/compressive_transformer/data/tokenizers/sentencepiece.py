"""Models of SentencePiece."""

from __future__ import annotations

import base64
import json

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError, optional
from .base import TextDecoder, Tokenizer
from .bytes import to_utf8
from .hugging_face import WindowDecoder

SENTENCE_PIECE_FILE = {"compressive_transformer": "sentencepiece", "version": 1}


class SentencePieceTokenizer(Tokenizer):
    """A trained SentencePiece model, encoded and decoded by its library, so ids are the same as elsewhere.

    The normalization of the model decides if text is decoded unchanged; U+2581, which stands for a space in pieces,
    never is.
    """

    def __init__(self, model: bytes) -> None:
        """Load the content of a `.model` file. Raises CompressiveError for anything else."""
        library = optional("sentencepiece", extra="data", purpose="a SentencePiece tokenizer")
        self._processor = library.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise CompressiveError("this is not a SentencePiece model") from error
        self._model = model
        self.vocab_size = self._processor.GetPieceSize() + 1

    def _encode(self, text: str) -> NDArray[np.int64]:
        to_utf8(text)
        ids = np.array(self._processor.EncodeAsIds(text), dtype=np.int64)
        places = np.flatnonzero(ids == self._processor.unk_id())[:5]
        if places.size:
            pieces = self._processor.EncodeAsPieces(text)
            named = ", ".join(repr(pieces[place]) for place in places)
            raise CompressiveError(f"the tokenizer has no token for {named}: use one that has, such as bytes or bpe")
        return ids

    def _decode(self, ids: NDArray[np.int64]) -> str:
        return str(self._processor.DecodeIds(ids.tolist()))

    def decoder(self) -> TextDecoder:
        """Return a decoder whose joined output is `decode` of all ids that a text encodes to."""
        return WindowDecoder(self)

    def to_json(self) -> str:
        """Return the model in base64: it is a binary file."""
        return json.dumps({**SENTENCE_PIECE_FILE, "model": base64.b64encode(self._model).decode("ascii")}) + "\n"
