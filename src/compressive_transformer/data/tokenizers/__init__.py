"""Documents to token ids and back: bytes, byte-level BPE, any Hugging Face tokenizer, SentencePiece, words, sound.

Beside its tokens a tokenizer has one more id, `start`, that stands before a document as its first input.
No text encodes to it and it is never a target.
"""

from .base import Decoder, Tokenizer
from .bytes import ByteTokenizer
from .hugging_face import HuggingFaceTokenizer, train_bpe
from .load import load_tokenizer
from .mu_law import MuLawTokenizer, mu_law_decode, mu_law_encode
from .sentencepiece import SentencePieceTokenizer
from .words import WordTokenizer, train_words

__all__ = [
    "ByteTokenizer",
    "Decoder",
    "HuggingFaceTokenizer",
    "MuLawTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "WordTokenizer",
    "load_tokenizer",
    "mu_law_decode",
    "mu_law_encode",
    "train_bpe",
    "train_words",
]
