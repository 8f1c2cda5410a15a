"""The command `prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from ..data import prepare as prepare_corpus


def prepare(
    source: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")],
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
        source: A folder of .txt files, one document each, with or without sub-folders train/, validation/ and test/;
            a .jsonl or .parquet file, or a folder of them; text and JSON lines may be compressed (.gz, or .zst with
            the extra `data`); hf:NAME or hf:NAME:CONFIG, a Hugging Face dataset (extra `data`); enwik8:FILE, the file
            or its .zip; wikitext:FOLDER with wiki.train.tokens and so on; audio:FOLDER of .wav files;
            recall:MIN-MAX, synthetic documents with keys that repeat after MIN to MAX tokens; or
            passkey:SOURCE:MIN-MAX, another source with such keys hidden in its text.
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
