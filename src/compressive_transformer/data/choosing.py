"""Which tokenizer a source is read with: the one asked for, or the source's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import CompressiveError
from .sources.source import Source
from .tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    MuLawTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    train_bpe,
    train_words,
)

KINDS: dict[type[Tokenizer], str] = {
    ByteTokenizer: "bytes",
    HuggingFaceTokenizer: "huggingface",
    SentencePieceTokenizer: "sentencepiece",
    WordTokenizer: "words",
    MuLawTokenizer: "mu-law",
}


def choose_tokenizer(tokenizer: str | Path | None, source: Source) -> tuple[str, Tokenizer | None]:
    """What the index calls the kind of the tokenizer that `prepare` was asked for, and the tokenizer if it is given.

    Raises CompressiveError where the source cannot be read with it.
    """
    kind = str(tokenizer or source.tokenizer or "bytes")
    loaded = None if kind in ("bytes", "bpe", "words", "mu-law") else load_tokenizer(kind)
    name = KINDS[type(loaded)] if loaded else kind
    if source.tokenizer not in ("", name):
        raise CompressiveError(f"{source.name} is read as {source.tokenizer}, not as {name}: give no tokenizer")
    if not source.tokenizer and name in ("words", "mu-law"):
        raise CompressiveError(f"{source.name} is text: the tokenizer {name} is for wikitext: or audio: sources only")
    if isinstance(loaded, MuLawTokenizer) and loaded.rate != source.rate:
        raise CompressiveError(
            f"{source.name} has {source.rate} samples a second, {kind} is for {loaded.rate}: bring both to one rate"
        )
    return name, loaded


def make_tokenizer(kind: str, source: Source, vocab_size: int, report: Callable[[str], None]) -> Tokenizer:
    """A tokenizer of a kind that is made for the source."""
    match kind:
        case "bpe":
            report(f"learning a byte-level BPE of {vocab_size:,} ids from the training documents")
            return train_bpe(_training_texts(source), vocab_size)
        case "words":
            report("collecting the words of the training part")
            return train_words(_training_texts(source))
        case "mu-law":
            return MuLawTokenizer(source.rate)
        case _:
            return ByteTokenizer()


def _training_texts(source: Source) -> Iterator[str]:
    return (text.text for split, text in source.read() if split == "train" and isinstance(text.text, str))
