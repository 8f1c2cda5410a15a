"""The files of a corpus that is being made: documents are appended, and can be taken up again where they were."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from ..errors import CompressiveError
from .corpus import SPLITS, Document
from .encoding import Encoded, digest_of
from .sources.source import Source, Text

LIST = "documents.jsonl"


class _Appended:
    """A file that grows, and the sha256 of what is in it."""

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
        """What `is_as` needs, all of it on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._file.tell(), "sha256": self.sha256}

    def is_as(self, before: Mapping[str, Any]) -> bool:
        """Whether the file is what it was at a state, but for what was appended later, which is taken away."""
        left = before["bytes"]
        while left and (content := self._file.read(min(left, 2**20))):
            self._sha256.update(content)
            left -= len(content)
        if left or self.sha256 != before["sha256"]:
            return False
        self._file.seek(before["bytes"])
        self._file.truncate()
        return True


class SplitFile:
    """The tokens of one split, and its documents."""

    def __init__(self, file: _Appended) -> None:
        self.file = file
        self.documents: list[Document] = []
        self.tokens = 0

    def add(self, encoded: Encoded) -> Document:
        """Append a document; it is given as the index has it."""
        self.file.append(encoded.content)
        document = Document(encoded.title, self.tokens, encoded.tokens, encoded.words, encoded.size)
        self.count(document)
        return document

    def count(self, document: Document) -> None:
        """Take in a document whose tokens are in the file."""
        self.documents.append(document)
        self.tokens += document.tokens

    def counts(self) -> str:
        """Return what a line of progress says."""
        return f"{len(self.documents):,} documents, {self.tokens:,} tokens"

    def entry(self) -> dict[str, Any]:
        """What the index says of the split."""
        return {"sha256": self.file.sha256, "documents": [asdict(document) for document in self.documents]}


class CorpusFiles:
    """The files of all splits, and a list of the documents, in a folder."""

    def __init__(self, folder: Path, state: Mapping[str, Any] | None) -> None:
        """Go on at what `state` gave, or begin. Raises CompressiveError where the files are not what they were."""
        self.splits: dict[str, SplitFile] = {}
        self.lossless = True
        self.documents = 0
        """In all splits."""
        self.read = 0
        """Bytes on disk that were read for them, where they are counted."""
        self._folder = folder
        self._digest = b""
        with contextlib.ExitStack() as stack:
            self._open = stack
            if state is None:
                self._list = self._open_file(LIST)
            else:
                self._take_up(state)
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
        """What is needed to go on from here, all that it speaks of on disk."""
        return {
            "list": self._list.state(),
            "splits": {name: split.file.state() for name, split in self.splits.items()},
            "lossless": self.lossless,
            "documents": self.documents,
            "read": self.read,
            "digest": self._digest.hex(),
        }

    def rest_of(self, source: Source) -> Iterator[tuple[str, Text]]:
        """The documents of a source that are not here yet.

        Raises CompressiveError where those that are here are no longer the first of the source.
        """
        texts = source.read()
        digest = b""
        for split, text in islice(texts, self.documents):
            digest = hashlib.sha256(digest + digest_of(split, text)).digest()
        if digest != self._digest:
            raise CompressiveError(
                f"{source.name} is not what it was when {self._folder} was begun: remove that folder to begin anew"
            )
        yield from texts

    def finish(self) -> dict[str, Any]:
        """What the index says of the splits; the list of documents is removed, the index takes its place."""
        self._open.close()
        (self._folder / LIST).unlink()
        return {name: self.splits[name].entry() for name in SPLITS if name in self.splits}

    def _open_file(self, name: str, mode: str = "wb") -> _Appended:
        return _Appended(self._open.enter_context(cast(BinaryIO, (self._folder / name).open(mode))))

    def _take_up(self, state: Any) -> None:
        try:
            self._check_and_read(state)
        except (KeyError, TypeError, ValueError, AttributeError, FileNotFoundError) as error:
            raise CompressiveError(f"{self._folder} is damaged: remove it to begin anew") from error

    def _check_and_read(self, state: Any) -> None:
        """Raises ValueError, or what else comes of a state that is none."""
        if not set(state["splits"]) <= set(SPLITS):  # names of files
            raise ValueError("unknown splits")
        self._list = self._open_file(LIST, "r+b")
        self.splits = {name: SplitFile(self._open_file(f"{name}.bin", "r+b")) for name in state["splits"]}
        before = [(self._list, state["list"])]
        before += [(split.file, state["splits"][name]) for name, split in self.splits.items()]
        if not all(file.is_as(then) for file, then in before):
            raise ValueError("other files")
        for line in (self._folder / LIST).read_bytes().splitlines():
            name, document = json.loads(line)
            self.splits[name].count(Document(**document))
            self.documents += 1
        self.lossless, self.read = state["lossless"], state["read"]
        if type(self.lossless) is not bool or type(self.read) is not int or self.documents != state["documents"]:
            raise ValueError("other counts")
        self._digest = bytes.fromhex(state["digest"])
