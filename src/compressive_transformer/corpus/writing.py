"""Text to a corpus: encode document by document, count, and write all or nothing."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import CompressiveError
from ..files import whole_folder
from ..tokenizer import ByteTokenizer, Tokenizer
from .choosing import Progress, choose_tokenizer
from .documents import WHOLE, Source, Text
from .reading import DTYPES, FORMAT, SPLITS, VERSION, Corpus, Document, open_corpus
from .sources import open_source

SECONDS_BETWEEN_REPORTS = 5.0


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 32_000,
    holdout: int = 10,
    field: str = "text",
    progress: Progress | None = None,
) -> Corpus:
    """The corpus of a source, written to the folder `out`: completely, or on any error not at all.

    `source` is one of
    - a folder of `*.txt` files in UTF-8, one document each, or of sub-folders train, validation and test with
      such files (PG-19 has them; titles are taken from a `metadata.csv` beside them);
    - a `.jsonl` file with the text in `field`, or a folder of train.jsonl, validation.jsonl and test.jsonl;
    - a `.txt` file, which is one document;
    - `hf:NAME`, a dataset for the library `datasets`, with its splits;
    - `enwik8:FILE`, raw bytes; `wikitext:FOLDER`, words; `audio:FOLDER`, `*.wav` files as 8-bit µ-law;
    - `recall:LEAST-GREATEST`, made-up documents with keys that occur again after so many tokens;
    - `passkey:SOURCE:LEAST-GREATEST`, the text of another source with such keys hidden in it.
    Text is read in universal-newline mode: CRLF becomes LF.

    `tokenizer` is "bytes" (the same as None), "bpe" (a byte-level BPE of `vocab_size` ids, learnt here from the
    training documents) or the path of a Hugging Face tokenizer. Sources of the last two lines have a
    tokenizer of their own: None, or the path of one that was made for such a source. Where the source has no splits, of
    every `holdout` documents in order one goes to validation and one to test; with 0 all are for training.
    `progress` is told how far it is.

    One document at a time is in memory. Raises CompressiveError, with the file named, for text that it cannot
    use.
    """
    out = Path(out).absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CompressiveError(f"{out} exists and is not an empty folder: remove it or choose another")
    report = progress or (lambda message: None)
    opened = open_source(source, holdout=holdout, field=field)
    if opened.tokenizer:  # a source with rules of its own
        report(f"{opened.name}: {opened.reading}; splits: {opened.rule}")
    kind, made = choose_tokenizer(tokenizer, opened, vocab_size=vocab_size, report=report)
    with whole_folder(out) as folder:
        made.save(folder / "tokenizer.json")
        dtype = "uint16" if made.vocab_size <= 2**16 else "uint32"
        splits, lossless = _write_tokens(folder, opened, made, DTYPES[dtype], report)
        assert lossless or kind in ("huggingface", "words"), f"the tokenizer {kind} must be lossless"
        numbers = {"vocab_size": made.vocab_size, "lossless": lossless, "dtype": dtype}
        index = {"format": FORMAT, "version": VERSION, **_made_of(opened, kind), **numbers, "splits": splits}
        content = json.dumps(index, ensure_ascii=False, indent=1) + "\n"
        (folder / "documents.json").write_text(content, encoding="utf-8", newline="\n")
    return open_corpus(out)


def _made_of(source: Source, tokenizer: str) -> dict[str, Any]:
    """What the index says of the source; `targets` only where it has some."""
    made_of = {"source": source.name, "benchmark": source.benchmark, "split_rule": source.rule}
    made_of.update(reading=source.reading, tokenizer=tokenizer)
    return {**made_of, "targets": list(source.targets)} if source.targets else made_of


class _SplitWriter:
    """Appends the documents of one split to its file and keeps count."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self.documents: list[Document] = []
        self.tokens = 0
        self._file, self._dtype = file, dtype
        self._sha256 = hashlib.sha256()

    def add(self, text: Text, tokenizer: Tokenizer) -> bool:
        """Whether the document comes back from its tokens as it was."""
        try:
            ids = _encode(tokenizer, text.text)
        except CompressiveError as error:
            raise CompressiveError(f"{text.place}: {error}") from error
        if not ids.size:
            raise CompressiveError(f"{text.place} gives no tokens with this tokenizer: take it out")
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._sha256.update(content)
        self.documents.append(Document(text.title, self.tokens, len(ids), *text.measure()))
        self.tokens += len(ids)
        return isinstance(text.text, bytes) or tokenizer.decode(ids) == text.text

    def entry(self) -> dict[str, Any]:
        """What the index says of the split."""
        return {
            "sha256": self._sha256.hexdigest(),
            "documents": [asdict(document) for document in self.documents],
        }


def _encode(tokenizer: Tokenizer, text: str | bytes) -> NDArray[np.int64]:
    if isinstance(text, str):
        return tokenizer.encode(text)
    assert isinstance(tokenizer, ByteTokenizer), "bytes as they are can only be tokens of one byte"
    return tokenizer.encode(text)


def _write_tokens(
    folder: Path, source: Source, tokenizer: Tokenizer, dtype: np.dtype[Any], report: Progress
) -> tuple[dict[str, Any], bool]:
    """The index entry of each split, and whether all documents come back as they were."""
    writers: dict[str, _SplitWriter] = {}
    lossless = True
    next_report = time.monotonic() + SECONDS_BETWEEN_REPORTS
    with ExitStack() as files:
        for split, text in source.read():
            if split not in writers:
                writers[split] = _SplitWriter(files.enter_context((folder / f"{split}.bin").open("wb")), dtype)
            lossless &= writers[split].add(text, tokenizer)
            if time.monotonic() >= next_report:
                report(_summary(split, writers[split]))
                next_report = time.monotonic() + SECONDS_BETWEEN_REPORTS
    _check_splits(source, writers)
    for split in writers:
        report(_summary(split, writers[split]))
    return {split: writers[split].entry() for split in SPLITS if split in writers}, lossless


def _check_splits(source: Source, writers: dict[str, _SplitWriter]) -> None:
    expected = (SPLITS if source.holdout else ["train"]) if WHOLE in source.parts else list(source.parts)
    missing = [split for split in expected if split not in writers]
    if not missing:
        return
    count = sum(len(writer.documents) for writer in writers.values())
    if WHOLE in source.parts and count:
        raise CompressiveError(
            f"{source.name} has {count} document(s), too few for validation and test to get one each: give at"
            " least 3, put them into folders train, validation and test, or set holdout to 0 to train on all"
        )
    raise CompressiveError(f"{source.name} has no documents for {', '.join(missing)}: add some or remove it")


def _summary(split: str, writer: _SplitWriter) -> str:
    words = sum(document.words for document in writer.documents)
    return f"{split}: {len(writer.documents):,} documents, {writer.tokens:,} tokens, {words:,} words"
