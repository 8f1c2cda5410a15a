"""Tokenizers: bytes, byte-level BPE, any Hugging Face tokenizer, SentencePiece, words, sound.

Each has one id beside its tokens, `start`, the first input of a document. No text encodes to it and it is never a
target.
"""

from .base import TextDecoder, Tokenizer
from .bytes import ByteTokenizer
from .hugging_face import HuggingFaceTokenizer, train_bpe
from .load import load_tokenizer
from .mu_law import MuLawTokenizer, mu_law_decode, mu_law_encode
from .sentencepiece import SentencePieceTokenizer
from .words import WordTokenizer, train_words

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "MuLawTokenizer",
    "SentencePieceTokenizer",
    "TextDecoder",
    "Tokenizer",
    "WordTokenizer",
    "load_tokenizer",
    "mu_law_decode",
    "mu_law_encode",
    "train_bpe",
    "train_words",
]
