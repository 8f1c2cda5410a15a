"""Writer of the files of a corpus: documents are encoded and appended, and writing can resume after an interruption."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, cast

from ..errors import CompressiveError
from .corpus import DTYPES, SPLITS, Document
from .sources.source import RawDocument, Source
from .tokenizers import Tokenizer

LIST = "documents.jsonl"


class Encoded(NamedTuple):
    """An encoded document of a split."""

    split: str
    title: str
    content: bytes
    """Its tokens in the format of the disk."""
    tokens: int
    words: int
    size: int
    """Bytes of the text."""
    lossless: bool
    """True if its tokens decode to the same text."""
    read: int
    """Bytes read from disk for it, where they are counted."""
    digest: bytes
    """`digest_of` the document."""


def dtype_of(tokenizer: Tokenizer) -> str:
    """Return the name of the type of tokens on disk."""
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def encode(tokenizer: Tokenizer, split: str, document: RawDocument) -> Encoded:
    """Return the tokens and counts of a document. Raises CompressiveError, with its place, where it has none."""
    try:
        ids = tokenizer.encode(document.content)
    except CompressiveError as error:
        raise CompressiveError(f"{document.place}: {error}") from error
    if not ids.size:
        raise CompressiveError(f"{document.place} has no tokens with this tokenizer: take it out")
    words, size = document.measure()
    return Encoded(
        split,
        document.title,
        content=ids.astype(DTYPES[dtype_of(tokenizer)]).tobytes(),
        tokens=len(ids),
        words=words,
        size=size,
        lossless=isinstance(document.content, bytes) or tokenizer.decode(ids) == document.content,
        read=document.read,
        digest=digest_of(split, document),
    )


def digest_of(split: str, document: RawDocument) -> bytes:
    """Return a SHA-256 of everything that the corpus takes from a document."""
    content = document.content
    content = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return hashlib.sha256(repr((split, document.title, document.words, len(content))).encode() + content).digest()


class _AppendedFile:
    """A file that grows, and the SHA-256 of its content."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def append(self, content: bytes) -> None:
        self._file.write(content)
        self._sha256.update(content)

    def state(self) -> dict[str, Any]:
        """Flush the file to disk and return the state that `restore` takes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._file.tell(), "sha256": self.sha256}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Remove what was appended after a state. Return False where the file before that was changed."""
        left = state["bytes"]
        while left and (content := self._file.read(min(left, 2**20))):
            self._sha256.update(content)
            left -= len(content)
        if left or self.sha256 != state["sha256"]:
            return False
        self._file.seek(state["bytes"])
        self._file.truncate()
        return True


class SplitFile:
    """The tokens of one split, and its documents."""

    def __init__(self, file: _AppendedFile) -> None:
        self.file = file
        self.documents: list[Document] = []
        self.tokens = 0

    def add(self, encoded: Encoded) -> Document:
        """Append a document and return its entry in the index."""
        self.file.append(encoded.content)
        document = Document(encoded.title, self.tokens, encoded.tokens, encoded.words, encoded.size)
        self.count(document)
        return document

    def count(self, document: Document) -> None:
        """Count a document whose tokens are in the file."""
        self.documents.append(document)
        self.tokens += document.tokens

    def summary(self) -> str:
        """Return its counts for a line of progress."""
        return f"{len(self.documents):,} documents, {self.tokens:,} tokens"

    def entry(self) -> dict[str, Any]:
        """Return the entry of the split in the index."""
        return {"sha256": self.file.sha256, "documents": [asdict(document) for document in self.documents]}


class CorpusFiles:
    """The files of all splits, and a list of the documents, in a folder."""

    def __init__(self, folder: Path, state: Mapping[str, Any] | None) -> None:
        """Resume from a `state`, or start. Raises CompressiveError where the files were changed since."""
        self.splits: dict[str, SplitFile] = {}
        self.lossless = True
        self.documents = 0
        """Documents in all splits."""
        self.read = 0
        """Bytes read from disk for them, where they are counted."""
        self._folder = folder
        self._digest = b""
        with contextlib.ExitStack() as stack:
            self._open = stack
            if state is None:
                self._list = self._open_file(LIST)
            else:
                self._resume(state)
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, encoded: Encoded) -> None:
        """Append a document."""
        if encoded.split not in self.splits:
            self.splits[encoded.split] = SplitFile(self._open_file(f"{encoded.split}.bin"))
        document = self.splits[encoded.split].add(encoded)
        self._list.append(json.dumps([encoded.split, asdict(document)]).encode() + b"\n")
        self.lossless &= encoded.lossless
        self.documents += 1
        self.read += encoded.read
        self._digest = hashlib.sha256(self._digest + encoded.digest).digest()

    def state(self) -> dict[str, Any]:
        """Flush all files to disk and return the state to resume from."""
        return {
            "list": self._list.state(),
            "splits": {name: split.file.state() for name, split in self.splits.items()},
            "lossless": self.lossless,
            "documents": self.documents,
            "read": self.read,
            "digest": self._digest.hex(),
        }

    def rest_of(self, source: Source) -> Iterator[tuple[str, RawDocument]]:
        """Yield the documents of a source that were not added yet.

        Raises CompressiveError where those that were added are not the first of the source.
        """
        documents = source.read()
        digest = b""
        for split, document in islice(documents, self.documents):
            digest = hashlib.sha256(digest + digest_of(split, document)).digest()
        if digest != self._digest:
            raise CompressiveError(
                f"{source.name} changed since {self._folder} was started: remove that folder to start over"
            )
        yield from documents

    def finish(self) -> dict[str, Any]:
        """Close the files and return the splits of the index, which replaces the list of documents."""
        self._open.close()
        (self._folder / LIST).unlink()
        return {name: self.splits[name].entry() for name in SPLITS if name in self.splits}

    def _open_file(self, name: str, mode: str = "wb") -> _AppendedFile:
        return _AppendedFile(self._open.enter_context(cast(BinaryIO, (self._folder / name).open(mode))))

    def _resume(self, state: Any) -> None:
        try:
            self._restore(state)
        except (KeyError, TypeError, ValueError, AttributeError, FileNotFoundError) as error:
            raise CompressiveError(f"{self._folder} is damaged: remove it to start over") from error

    def _restore(self, state: Any) -> None:
        """Raise ValueError, or other errors that follow from an invalid state."""
        if not set(state["splits"]) <= set(SPLITS):  # names of files
            raise ValueError("unknown splits")
        self._list = self._open_file(LIST, "r+b")
        self.splits = {name: SplitFile(self._open_file(f"{name}.bin", "r+b")) for name in state["splits"]}
        states = [(self._list, state["list"])]
        states += [(split.file, state["splits"][name]) for name, split in self.splits.items()]
        if not all(file.restore(before) for file, before in states):
            raise ValueError("changed files")
        for line in (self._folder / LIST).read_bytes().splitlines():
            name, document = json.loads(line)
            self.splits[name].count(Document(**document))
            self.documents += 1
        self.lossless, self.read = state["lossless"], state["read"]
        if type(self.lossless) is not bool or type(self.read) is not int or self.documents != state["documents"]:
            raise ValueError("wrong counts")
        self._digest = bytes.fromhex(state["digest"])
