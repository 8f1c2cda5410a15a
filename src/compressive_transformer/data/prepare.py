"""From a source to a corpus folder: choose the tokenizer, encode the documents, write all or nothing."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ..errors import CompressiveError
from ..progress import Progress, Report
from .corpus import FORMAT, SPLITS, VERSION, Corpus, open_corpus
from .pool import default_processes, encode_all
from .sources import open_source
from .sources.hf_datasets import Records
from .sources.source import WHOLE, Source
from .staging import Staging, staging_folder
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
from .writer import CorpusFiles, dtype_of

SECONDS_BETWEEN_SAVES = 30.0
KINDS: dict[type[Tokenizer], str] = {
    ByteTokenizer: "bytes",
    HuggingFaceTokenizer: "huggingface",
    SentencePieceTokenizer: "sentencepiece",
    WordTokenizer: "words",
    MuLawTokenizer: "mu-law",
}


def prepare(
    source: str | Path | Records | Mapping[str, Records],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 32_000,
    holdout: int = 10,
    field: str = "text",
    processes: int | None = None,
    progress: Report | bool = False,
) -> Corpus:
    """Encode a source of documents into a corpus folder, written completely or, on an error, not at all.

    Args:
        source: A folder of files, one file, records in memory, a `datasets` dataset, or a name with a prefix such as
            "hf:NAME": `data.sources` lists them.
        out: The folder to create. Interrupted work of more than half a minute stays in `out`.unfinished; the same call
            resumes it.
        tokenizer: "bytes" (the default), "bpe" (byte-level, trained here on the training documents), or the path of a
            Hugging Face tokenizer or of a SentencePiece `.model`. Sources with a fixed tokenizer take None or one made
            for such a source.
        vocab_size: Largest number of token ids of "bpe".
        holdout: For a source without splits: of every `holdout` documents in order one goes to validation and one to
            test; 0 uses all for training.
        field: Field of the text in records.
        processes: Number of encoder processes, by default one per core for large sources and slow tokenizers. It does
            not change the result.
        progress: True for stderr (a bar on a terminal), or a function that receives each line.

    Returns:
        The corpus, opened.

    Raises:
        CompressiveError: for options, files or text that cannot be used, with the file named.
    """
    out = Path(out).absolute()
    _check(out, processes)
    opened = open_source(source, holdout=holdout, field=field)
    kind, loaded = _choose_tokenizer(tokenizer, opened)
    made_by = _digest(loaded.to_json()) if loaded else f"{kind} {vocab_size}"
    begun_with = {"source": _listing(opened), "tokenizer": made_by, "holdout": holdout, "field": field}
    display = Progress(opened.size or None, unit="bytes" if opened.size else "documents", report=progress)
    with display, staging_folder(out, begun_with, display.print) as work:
        if work.state is None:
            made = loaded or _make_tokenizer(kind, opened, vocab_size, display.print)
            made.save(work.folder / "tokenizer.json")
        _write(work, opened, kind, processes, display)
    return open_corpus(out)


def _check(out: Path, processes: int | None) -> None:
    """Raise CompressiveError for a folder with content and for an invalid number of processes."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CompressiveError(f"{out} exists and is not an empty folder: remove it or choose another")
    if processes is not None and processes < 1:
        raise CompressiveError(f"processes ({processes}) must be 1 or more")


def _write(work: Staging, source: Source, kind: str, processes: int | None, display: Progress) -> None:
    """Write the tokens and the index, with the tokenizer that is in the folder."""
    tokenizer = load_tokenizer(work.folder / "tokenizer.json")
    splits, lossless = _write_tokens(work, source, tokenizer, processes, display)
    assert lossless or kind in ("huggingface", "sentencepiece", "words"), f"the tokenizer {kind} must be lossless"
    numbers = {"vocab_size": tokenizer.vocab_size, "lossless": lossless, "dtype": dtype_of(tokenizer)}
    index = {"format": FORMAT, "version": VERSION, **_made_of(source, kind), **numbers, "splits": splits}
    content = json.dumps(index, ensure_ascii=False, indent=1) + "\n"
    (work.folder / "documents.json").write_text(content, encoding="utf-8", newline="\n")


def _made_of(source: Source, tokenizer: str) -> dict[str, Any]:
    """Return the description of the source in the index; `targets` only where it has some."""
    made_of = {"source": source.name, "benchmark": source.benchmark, "split_rule": source.rule}
    made_of.update(reading=source.reading, tokenizer=tokenizer)
    return {**made_of, "targets": list(source.targets)} if source.targets else made_of


def _listing(source: Source) -> str:
    """Return a digest that changes when the files of a source do."""
    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in source.files]
    return _digest(repr((source.name, source.split_rule, files)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write_tokens(
    work: Staging, source: Source, tokenizer: Tokenizer, processes: int | None, display: Progress
) -> tuple[dict[str, Any], bool]:
    """Write all documents. Return the splits of the index, and True if all documents decode to the same text."""
    count = processes or default_processes(tokenizer, source.size)
    next_save = time.monotonic() + SECONDS_BETWEEN_SAVES
    with CorpusFiles(work.folder, work.state) as files:
        if source.tokenizer:  # it has rules that text does not have
            display.print(f"{source.name}: {source.reading}; splits: {source.rule}")
        if files.documents:
            display.print(f"resuming after {files.documents:,} documents")
        display.restart(_done(files, source))
        rest = files.rest_of(source)
        with closing(encode_all(rest, tokenizer, work.folder / "tokenizer.json", processes=count)) as documents:
            for encoded in documents:
                files.add(encoded)
                display.update(_done(files, source), f"{encoded.split}: {files.splits[encoded.split].summary()}")
                if time.monotonic() >= next_save:
                    work.save(files.state())
                    next_save = time.monotonic() + SECONDS_BETWEEN_SAVES
        _check_splits(source, files)
        for name, split in files.splits.items():
            words = sum(document.words for document in split.documents)
            display.print(f"{name}: {split.summary()}, {words:,} words")
        return files.finish(), files.lossless


def _done(files: CorpusFiles, source: Source) -> int:
    """Return the progress: bytes for a source of known size, else documents."""
    return files.read if source.size else files.documents


def _check_splits(source: Source, files: CorpusFiles) -> None:
    expected = (SPLITS if source.holdout else ["train"]) if WHOLE in source.parts else list(source.parts)
    missing = [split for split in expected if split not in files.splits]
    if not missing:
        return
    if WHOLE in source.parts and files.documents:
        raise CompressiveError(
            f"{source.name} has {files.documents} document(s), too few for validation and test to get one each: give at"
            " least 3, put them into folders train, validation and test, or set holdout to 0 to train on all"
        )
    raise CompressiveError(f"{source.name} has no documents for {', '.join(missing)}: add some or remove it")


def _choose_tokenizer(tokenizer: str | Path | None, source: Source) -> tuple[str, Tokenizer | None]:
    """Return the name of the kind of tokenizer in the index, and the tokenizer where it exists already.

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
            f"{source.name} has {source.rate} samples per second, {kind} is for {loaded.rate}: resample the sound"
        )
    return name, loaded


def _make_tokenizer(kind: str, source: Source, vocab_size: int, report: Callable[[str], None]) -> Tokenizer:
    """Return a tokenizer of a kind, trained on the source where it has to be."""
    match kind:
        case "bpe":
            report(f"training a byte-level BPE of {vocab_size:,} ids on the training documents")
            return train_bpe(_training_texts(source), vocab_size)
        case "words":
            report("collecting the words of the training split")
            return train_words(_training_texts(source))
        case "mu-law":
            return MuLawTokenizer(source.rate)
        case _:
            return ByteTokenizer()


def _training_texts(source: Source) -> Iterator[str]:
    return (
        document.content for split, document in source.read() if split == "train" and isinstance(document.content, str)
    )
