"""The command `prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from ..data import prepare as prepare_corpus
from ..data.sources import SOURCES


def prepare(
    source: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE", help=f"{SOURCES}.")],
    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")],
    /,
    tokenizer: str | None = None,
    vocab_size: int = 32_000,
    holdout: int = 10,
    field: str = "text",
    processes: int | None = None,
) -> None:
    """Encode text into a corpus: tokens on disk, with the borders, words and bytes of each document.

    Text must be UTF-8; CRLF is read as LF. After an interruption, run the same command again to resume.

    Args:
        source: One of `data.sources.SOURCES`, which is the help text.
        out: Folder of the corpus, which must not exist.
        tokenizer: "bytes", the default for text; "bpe", byte-level BPE trained on the training documents; or the path
            of a Hugging Face tokenizer (tokenizer.json or its folder) or of a SentencePiece .model (extra `data`).
            Some sources have a fixed one: enwik8:, recall: and passkey: bytes, wikitext: words, audio: samples.
        vocab_size: Largest number of token ids of "bpe".
        holdout: If the source has no splits: one document in N goes to validation and one to test; 0 uses all for
            training.
        field: Name of the text field in JSON lines, Parquet files and datasets.
        processes: Number of encoder processes; by default one per core for large sources and slow tokenizers. It does
            not change the result.
    """
    corpus = prepare_corpus(
        source,
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        holdout=holdout,
        field=field,
        processes=processes,
        progress=True,
    )
    for name, split in corpus.splits.items():
        documents = split.documents
        print(
            f"{name:<10}  {len(documents):>7,} documents  {sum(d.tokens for d in documents):>13,} tokens  "
            f"{sum(d.words for d in documents):>12,} words  {sum(d.bytes for d in documents):>13,} bytes"
            + (f"  ({split.official}, official)" if split.official else "")
        )
