"""Text to a corpus: encode document by document, count, and write all or nothing."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ..errors import CompressiveError
from .choosing import choose_tokenizer, make_tokenizer
from .corpus import FORMAT, SPLITS, VERSION, Corpus, open_corpus
from .encoding import dtype_of
from .pool import default_processes, encode_all
from .sources import open_source
from .sources.hf_datasets import Records
from .sources.source import WHOLE, Source
from .staging import Unfinished, unfinished_folder
from .tokenizers import Tokenizer, load_tokenizer
from .watching import Progress, Watch
from .writer import CorpusFiles

SECONDS_BETWEEN_SAVES = 30.0


def prepare(
    source: str | Path | Records | Mapping[str, Records],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 32_000,
    holdout: int = 10,
    field: str = "text",
    processes: int | None = None,
    progress: Progress | bool = False,
) -> Corpus:
    """The corpus of a source, written to the folder `out`: completely, or on any error not at all.

    `source` is one of
    - a folder of `*.txt` files in UTF-8, one document each (titles are taken from a `metadata.csv` beside them), of
      `*.jsonl` or `*.parquet` files with the text in `field`, or of sub-folders train, validation and test with such;
    - one such file, or a folder with train.jsonl (or train.parquet), and maybe validation and test;
    - `hf:NAME` or `hf:NAME:CONFIG`, a dataset for the library `datasets`, or the path of a saved one; or such a dataset
      itself, streaming or not; or records (dicts) in a list, or a mapping of splits to lists;
    - `enwik8:FILE`, raw bytes; `wikitext:FOLDER`, words; `audio:FOLDER`, `*.wav` files as 8-bit µ-law;
    - `recall:LEAST-GREATEST`, made-up documents with keys that occur again after so many tokens;
    - `passkey:SOURCE:LEAST-GREATEST`, the text of another source with such keys hidden in it.
    CRLF is read as LF. Files of text and of JSON lines may be compressed: `.gz` or `.zst` after the name.

    `tokenizer` is "bytes" (the same as None), "bpe" (a byte-level BPE of `vocab_size` ids, learnt here from the
    training documents) or the path of a Hugging Face tokenizer or of a `.model` of SentencePiece. Sources of the last
    three lines have a tokenizer of their own: None, or the path of one made for such a source. Where the source has no
    splits, of every `holdout` documents in order one goes to validation and one to test; with 0 all are for training.
    `progress` is told how far it is, line by line; True shows it on stderr, with a bar on a terminal.

    `processes` encode, None one for each core where it is worth it; they change nothing but the time. Work that was
    interrupted is kept in `out`.unfinished once it was half a minute long: the same call goes on from there. Raises
    CompressiveError, with the file named, for text that it cannot use.
    """
    out = Path(out).absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CompressiveError(f"{out} exists and is not an empty folder: remove it or choose another")
    if processes is not None and processes < 1:
        raise CompressiveError(f"processes ({processes}) must be 1 or more")
    opened = open_source(source, holdout=holdout, field=field)
    kind, given = choose_tokenizer(tokenizer, opened)
    made_by = _digest(given.to_json()) if given else f"{kind} {vocab_size}"
    begun_with = {"source": _listing(opened), "tokenizer": made_by, "holdout": holdout, "field": field}
    with Watch(progress, size=opened.size) as watch, unfinished_folder(out, begun_with, watch.say) as work:
        if opened.tokenizer:  # a source with rules of its own
            watch.say(f"{opened.name}: {opened.reading}; splits: {opened.rule}")
        if work.state is None:
            (given or make_tokenizer(kind, opened, vocab_size, watch.say)).save(work.folder / "tokenizer.json")
        _write(work, opened, kind, processes, watch)
    return open_corpus(out)


def _write(work: Unfinished, source: Source, kind: str, processes: int | None, watch: Watch) -> None:
    """The tokens and the index, with the tokenizer that is in the folder already."""
    tokenizer = load_tokenizer(work.folder / "tokenizer.json")
    splits, lossless = _write_tokens(work, source, tokenizer, processes, watch)
    assert lossless or kind in ("huggingface", "sentencepiece", "words"), f"the tokenizer {kind} must be lossless"
    numbers = {"vocab_size": tokenizer.vocab_size, "lossless": lossless, "dtype": dtype_of(tokenizer)}
    index = {"format": FORMAT, "version": VERSION, **_made_of(source, kind), **numbers, "splits": splits}
    content = json.dumps(index, ensure_ascii=False, indent=1) + "\n"
    (work.folder / "documents.json").write_text(content, encoding="utf-8", newline="\n")


def _made_of(source: Source, tokenizer: str) -> dict[str, Any]:
    """What the index says of the source; `targets` only where it has some."""
    made_of = {"source": source.name, "benchmark": source.benchmark, "split_rule": source.rule}
    made_of.update(reading=source.reading, tokenizer=tokenizer)
    return {**made_of, "targets": list(source.targets)} if source.targets else made_of


def _listing(source: Source) -> str:
    """What changes when the files of a source do."""
    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in source.files]
    return _digest(repr((source.name, source.cut, files)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write_tokens(
    work: Unfinished, source: Source, tokenizer: Tokenizer, processes: int | None, watch: Watch
) -> tuple[dict[str, Any], bool]:
    """The index entry of each split, and whether all documents come back as they were."""
    count = processes or default_processes(tokenizer, source.size)
    next_save = time.monotonic() + SECONDS_BETWEEN_SAVES
    with CorpusFiles(work.folder, work.state) as files:
        watch.begin(files)
        texts = files.rest_of(source)
        with closing(encode_all(texts, tokenizer, work.folder / "tokenizer.json", processes=count)) as documents:
            for encoded in documents:
                files.add(encoded)
                watch.move(encoded.split, files)
                if time.monotonic() >= next_save:
                    work.save(files.state())
                    next_save = time.monotonic() + SECONDS_BETWEEN_SAVES
        _check_splits(source, files)
        watch.end(files)
        return files.finish(), files.lossless


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
