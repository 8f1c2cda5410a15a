"""A prepared corpus: opened, checked, its tokens memory-mapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CompressiveError
from .published import published_name
from .tokenizers import Tokenizer, load_tokenizer

FORMAT, VERSION = "compressive-transformer corpus", 1
SPLITS = ("train", "validation", "test")
# Little-endian wherever it is written or read, so that a corpus can be copied between machines.
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Document:
    """One book, file or record."""

    title: str
    """File stem, or the title in the source."""
    offset: int
    """Position of its first token in the file of the split (tokens)."""
    tokens: int
    """Length without the start id (tokens)."""
    words: int
    """Words separated by whitespace, the unit of word perplexity. In WikiText the ends of lines too; in sound none."""
    bytes: int
    """Bytes of the UTF-8 text with LF, the unit of bits per byte. In sound one per sample."""


@dataclass(frozen=True, eq=False)
class Split:
    """The documents of one split and their tokens on disk."""

    name: str
    """train, validation or test."""
    documents: tuple[Document, ...]
    """In the order of their tokens."""
    tokens: NDArray[Any]
    """Tokens of all documents, one after another `[tokens]`: uint16 or uint32, memory-mapped, read-only."""
    vocab_size: int
    """Number of ids of the tokenizer, the start id included."""
    lossless: bool
    """True if all documents of the corpus decode to the original text, which word perplexity requires."""
    fingerprint: str
    """Fingerprint of the corpus."""
    benchmark: str = ""
    """The published data set that the corpus is a part of; "" for other text."""
    targets: frozenset[int] | None = None
    """The only token ids that are trained on and scored; None for all."""

    @property
    def official(self) -> str:
        """The published data set whose split this is, recognized by its counts; "" for any other."""
        documents = self.documents
        return published_name(
            self.benchmark,
            self.name,
            documents=len(documents),
            words=sum(document.words for document in documents),
            bytes=sum(document.bytes for document in documents),
            vocab_size=self.vocab_size,
        )

    @property
    def start_id(self) -> int:
        """The first input of each document; never a target."""
        return self.vocab_size - 1

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise CompressiveError unless a model with `vocab_size` ids can read the split."""
        if self.vocab_size != vocab_size:
            raise CompressiveError(
                f"the corpus has {self.vocab_size} token ids, the model {vocab_size}; "
                "prepare the corpus with the tokenizer of the model's run"
            )

    def read(self, document: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return tokens of a document, in memory.

        Args:
            document: Number of the document in the split.
            start: First token in the document.
            stop: End of the tokens, exclusive; None for the end of the document.

        Returns:
            Token ids `[stop - start]`, int64.

        Raises:
            CompressiveError: for a document or a range that does not exist, and for invalid tokens.
        """
        if not 0 <= document < len(self.documents):
            raise CompressiveError(f"{self.name} has documents 0 to {len(self.documents) - 1}, not {document}")
        entry = self.documents[document]
        stop = entry.tokens if stop is None else stop
        if not 0 <= start <= stop <= entry.tokens:
            raise CompressiveError(f"tokens {start} to {stop} of {entry.title!r} do not exist: it has {entry.tokens}")
        tokens = self.tokens[entry.offset + start : entry.offset + stop].astype(np.int64)
        if tokens.size and int(tokens.max()) >= self.start_id:
            raise CompressiveError(
                f"the tokens of {entry.title!r} in {self.name} have id {tokens.max()}, but ids end at"
                f" {self.start_id - 1}: the corpus is damaged, prepare it again"
            )
        return tokens

    def is_target(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask `[tokens]` of `ids [tokens]`, True for those that are trained on and scored."""
        return np.ones(len(ids), dtype=bool) if self.targets is None else np.isin(ids, list(self.targets))

    def count_targets(self, document: int) -> int:
        """Return how many tokens of a document are trained on and scored; they are read where `targets` are given."""
        if self.targets is None:
            return self.documents[document].tokens
        return int(self.is_target(self.read(document)).sum())


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as tokens on disk, in up to three splits, with their tokenizer."""

    path: Path
    """Folder of the corpus."""
    tokenizer: Tokenizer
    """Tokenizer that encoded the documents."""
    lossless: bool
    """True if all documents decode to the original text, which word perplexity requires."""
    fingerprint: str
    """SHA-256 of the documents, tokens and tokenizer."""
    splits: Mapping[str, Split]
    """Splits by name: train always, validation and test where there are any."""

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer, the start id included."""
        return self.tokenizer.vocab_size

    @property
    def train(self) -> Split:
        """The training split."""
        return self.split("train")

    @property
    def validation(self) -> Split:
        """The validation split. Raises CompressiveError where the corpus has none."""
        return self.split("validation")

    @property
    def test(self) -> Split:
        """The test split. Raises CompressiveError where the corpus has none."""
        return self.split("test")

    def split(self, name: str) -> Split:
        """Return the split of a name. Raises CompressiveError where the corpus has none."""
        if name not in self.splits:
            raise CompressiveError(
                f"corpus {self.path} has no {name} split: it has {', '.join(self.splits)};"
                " prepare it from a source with such a folder, or with a holdout above 0"
            )
        return self.splits[name]


def open_corpus(path: str | Path) -> Corpus:
    """Open a corpus that `prepare` wrote.

    Args:
        path: The folder of the corpus.

    Returns:
        The corpus; tokens stay on disk.

    Raises:
        CompressiveError: where the folder or a file is missing or damaged, or the files do not match.
    """
    path = Path(path)
    if not path.is_dir():
        raise CompressiveError(f"no corpus at {path}: make one with `compressive prepare SOURCE {path}`")
    index_file = path / "documents.json"
    content = _read_bytes(index_file)
    index = _parse_index(index_file, content)
    tokenizer = load_tokenizer(path / "tokenizer.json")
    if tokenizer.vocab_size != index["vocab_size"]:
        raise CompressiveError(
            f"{index_file} is for vocab_size {index['vocab_size']}, {path / 'tokenizer.json'} has"
            f" {tokenizer.vocab_size}: the files belong to different corpora, prepare it again"
        )
    fingerprint = hashlib.sha256(content + _read_bytes(path / "tokenizer.json")).hexdigest()
    splits = {
        name: Split(
            name=name,
            documents=documents,
            tokens=_map_tokens(path / f"{name}.bin", DTYPES[index["dtype"]], documents),
            vocab_size=tokenizer.vocab_size,
            lossless=index["lossless"],
            fingerprint=fingerprint,
            benchmark=index["benchmark"],
            targets=index["targets"],
        )
        for name, documents in index["splits"].items()
    }
    return Corpus(path, tokenizer, index["lossless"], fingerprint, splits)


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CompressiveError(
            f"cannot read {file}: {error.strerror}; the corpus is incomplete, prepare it again"
        ) from error


def _parse_index(file: Path, content: bytes) -> dict[str, Any]:
    """Return the index with `Document` entries, after checking the types of all values."""
    try:
        index = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CompressiveError(f"{file} is not JSON ({error}): prepare the corpus again") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise CompressiveError(f"{file} is not the index of a corpus: prepare the corpus again")
    if index.get("version") != VERSION:
        raise CompressiveError(
            f"{file} has version {index.get('version')}, this release reads version {VERSION}: prepare the corpus again"
        )
    if index.get("dtype") not in list(DTYPES):  # a list compares unhashable values too
        raise CompressiveError(f"{file}: dtype {index.get('dtype')!r} must be {' or '.join(DTYPES)}")
    if not isinstance(index.get("lossless"), bool) or not _is_count(index.get("vocab_size")):
        raise CompressiveError(f"{file}: lossless must be true or false, vocab_size a number")
    if not isinstance(index.setdefault("benchmark", ""), str):  # corpora of the first release have none
        raise CompressiveError(f"{file}: benchmark must be the name of published data, or empty")
    index["targets"] = _parse_targets(file, index)
    splits = index.get("splits")
    if not isinstance(splits, dict) or "train" not in splits or not splits.keys() <= set(SPLITS):
        raise CompressiveError(f"{file}: splits must be train and maybe validation and test")
    index["splits"] = {name: _parse_documents(file, name, entry) for name, entry in splits.items()}
    return index


def _parse_targets(file: Path, index: Mapping[str, Any]) -> frozenset[int] | None:
    """Return the ids that are targets, None for all."""
    targets = index.get("targets")
    if targets is None:
        return None
    ids = range(index["vocab_size"] - 1)
    if not isinstance(targets, list) or not targets or not all(_is_count(id) and id in ids for id in targets):
        raise CompressiveError(f"{file}: targets must be a list of token ids below {len(ids)}, at least one")
    return frozenset(targets)


def _parse_documents(file: Path, name: str, entry: Any) -> tuple[Document, ...]:
    entries = entry.get("documents") if isinstance(entry, dict) else None
    if not isinstance(entries, list) or not entries:
        raise CompressiveError(f"{file}: split {name} must have a list of documents")
    names = {field.name for field in fields(Document)}
    documents: list[Document] = []
    offset = 0
    for number, values in enumerate(entries):
        counts = [values.get(key) for key in names - {"title"}] if isinstance(values, dict) else [None]
        if not all(map(_is_count, counts)) or values.keys() != names or not isinstance(values["title"], str):
            raise CompressiveError(f"{file}: document {number} of {name} must have {', '.join(sorted(names))}")
        document = Document(**values)
        if document.offset != offset or document.tokens < 1:
            raise CompressiveError(
                f"{file}: document {number} of {name} must begin at token {offset} and have tokens,"
                f" not {document.tokens} at {document.offset}: prepare the corpus again"
            )
        offset += document.tokens
        documents.append(document)
    return tuple(documents)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _map_tokens(file: Path, dtype: np.dtype[Any], documents: tuple[Document, ...]) -> NDArray[Any]:
    expected = sum(document.tokens for document in documents) * dtype.itemsize
    try:
        actual = file.stat().st_size
        if actual == expected:
            return np.memmap(file, dtype=dtype, mode="r")
    except OSError as error:
        raise CompressiveError(
            f"cannot read {file}: {error.strerror}; the corpus is incomplete, prepare it again"
        ) from error
    raise CompressiveError(
        f"{file} has {actual} bytes, its index says {expected}: the corpus is damaged, prepare it again"
    )
