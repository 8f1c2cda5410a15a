"""Tokens on disk to batches: each lane reads whole documents, or long ones in pieces, segment by segment.

A piece is what a lane reads between two resets of its memory: a document, or a part of one that is longer than
wanted. It begins at a segment border and its last segment is padded, so memory is reset a whole lane at a time
and never crosses the start of a piece. Which lane reads which piece follows from the lengths of the documents
alone: every process works it out for all lanes and reads tokens only for its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config.toml import upgrade
from ..errors import CompressiveError
from ..model import IGNORE_INDEX
from .corpus import Split


class Segment(NamedTuple):
    """What each lane reads next. Tensors are on the CPU, int64 where nothing else is said."""

    tokens: Tensor
    """Inputs `[lane, segment]`, the token before each target: the start id where there is none; padding is 0."""
    targets: Tensor
    """The document's tokens `[lane, segment]`, each once; padding is `IGNORE_INDEX`, and so is what is no target of the
    corpus, where that says which tokens are."""
    starts: Tensor
    """Whether the lane begins a document or a piece of one `[lane]`, bool: what `memory.reset` takes."""
    lengths: Tensor
    """Real tokens `[lane]`; 0 for a lane that has no document left."""
    documents: Tensor
    """Number of the document in the split `[lane]`; -1 for a lane that has no document left."""
    total_targets: int
    """Real targets over all lanes of all processes: what to divide the sum of all losses by, so that the mean
    does not depend on the number of processes. May be 0 where the corpus says which tokens are targets."""


class Lanes(Iterator[Segment]):
    """An iterator of segments that can say exactly where it is and go on from there.

    All lanes share one queue of documents; a lane that has finished one takes the next, the lower lane first.
    One pass reads every document once; lanes for which none is left idle until the last one is done. With
    `endless` the queue goes on with the next epoch. `seed` shuffles the documents of each epoch, None keeps
    them in order. Of `world` processes, the one of rank r gets lanes r·batch/world to (r+1)·batch/world.

    With `max_document_length` (tokens) a longer document stands in the queue as pieces of that length (the last
    one may be shorter), each with a place of its own. A piece begins with empty memory, as a document does. Its
    first input is the token before it, which is known: the start id would say that the document begins there.
    """

    def __init__(
        self,
        split: Split,
        *,
        batch_size: int,
        length: int,
        seed: int | None = None,
        endless: bool = False,
        max_document_length: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """`batch_size` counts lanes over all processes, `length` the tokens of a segment.

        `max_document_length` is a multiple of `length`, so that pieces add no padding; 0 keeps documents whole.

        Raises CompressiveError for numbers that cannot be, and for a split without documents.
        """
        if batch_size < 1 or length < 1:
            raise CompressiveError(f"batch_size ({batch_size}) and length ({length}) must be at least 1")
        if not 0 <= rank < world:
            raise CompressiveError(f"rank ({rank}) must be in 0 .. world - 1, world is {world}")
        if batch_size % world:
            raise CompressiveError(f"batch_size ({batch_size}) must be a multiple of the number of processes ({world})")
        if seed is not None and seed < 0:
            raise CompressiveError(f"seed ({seed}) must be 0 or more, or None for documents in order")
        if max_document_length < 0 or max_document_length % length:
            nearest = max((max_document_length + length // 2) // length, 1) * length
            raise CompressiveError(
                f"max_document_length ({max_document_length}) must be a multiple of segment_length ({length} tokens),"
                f" the nearest is {nearest}, or 0 for whole documents"
            )
        if not split.documents:
            raise CompressiveError(f"split {split.name} has no documents: prepare the corpus with some")
        self._split, self._length, self._seed, self._endless = split, length, seed, endless
        self._longest_document = max_document_length
        self._own = slice(rank * batch_size // world, (rank + 1) * batch_size // world)
        self._all_pieces = _pieces_of(split, max_document_length)
        self._pieces = np.full(batch_size, -1, dtype=np.int64)  # the one that a lane reads, -1 for none
        self._segments = np.zeros(batch_size, dtype=np.int64)  # of its piece, the next one that a lane reads
        self._begin_epoch(0)

    @property
    def epoch(self) -> int:
        """Number of the pass over the documents, from 0, that the document or piece taken last belongs to."""
        return self._epoch

    def __next__(self) -> Segment:
        for lane in np.flatnonzero(self._remaining() == 0):
            self._pieces[lane] = self._take_piece()
            self._segments[lane] = 0
        lengths = np.minimum(self._remaining(), self._length)
        if not lengths.any():
            raise StopIteration
        segment = self._read(lengths)
        self._segments += lengths > 0
        return segment

    def state_dict(self) -> dict[str, Any]:
        """Where all lanes of all processes are, as JSON can hold it; the same on each process."""
        return {
            **self._identity(),
            "epoch": self._epoch,
            "taken": self._taken,
            "pieces": self._pieces.tolist(),
            "segments": self._segments.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, on any number of processes.

        Raises CompressiveError where the state is of other data or other settings, or cannot be.
        """
        state = upgrade(state)
        for name, value in self._identity().items():
            if name not in state or state[name] != value:
                raise CompressiveError(
                    f"the position is of other lanes: {name} is {state.get(name)!r} there and {value!r} here;"
                    " go on with the same data and settings, or begin anew"
                )
        epoch, taken = _integers([state.get("epoch"), state.get("taken")], count=2)
        pieces, segments = (_integers(state.get(name), count=self._batch) for name in ("pieces", "segments"))
        count = len(self._all_pieces.tokens)
        if not (
            epoch >= 0
            and 0 <= taken <= count
            and ((pieces >= -1) & (pieces < count)).all()
            and ((segments >= 0) & (segments <= self._segments_of(pieces))).all()
        ):
            raise CompressiveError("the position of the lanes is damaged, it does not fit the documents: begin anew")
        self._begin_epoch(int(epoch))
        self._taken = int(taken)
        self._pieces, self._segments = pieces, segments

    @property
    def _batch(self) -> int:
        return len(self._pieces)

    def _identity(self) -> dict[str, Any]:
        """What a position depends on: it means nothing for other lanes."""
        return {
            "split": self._split.name,
            "corpus": self._split.fingerprint,
            "batch_size": self._batch,
            "length": self._length,
            "seed": self._seed,
            "endless": self._endless,
            "max_document_length": self._longest_document,
        }

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._taken = epoch, 0
        self._order = np.arange(len(self._all_pieces.tokens))
        if self._seed is not None:
            np.random.default_rng([self._seed, epoch]).shuffle(self._order)

    def _take_piece(self) -> int:
        """The next piece of the queue, -1 where it is at its end."""
        if self._taken == len(self._order):
            if not self._endless:
                return -1
            self._begin_epoch(self._epoch + 1)
        self._taken += 1
        return int(self._order[self._taken - 1])

    def _segments_of(self, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Segments that each of `pieces` has, 0 for -1."""
        return np.where(pieces < 0, 0, -(-self._all_pieces.tokens[pieces] // self._length))

    def _remaining(self) -> NDArray[np.int64]:
        """Tokens of its piece that each lane still has to read."""
        read = self._segments * self._length
        return np.where(self._pieces < 0, 0, np.maximum(self._all_pieces.tokens[self._pieces] - read, 0))

    def _read(self, lengths: NDArray[np.int64]) -> Segment:
        """The next segment of this process's lanes, of which each has `lengths [lane]` tokens."""
        pieces, segments = self._pieces[self._own], self._segments[self._own]
        documents = np.where(pieces < 0, -1, self._all_pieces.documents[pieces])
        firsts = self._all_pieces.firsts[pieces] + segments * self._length
        tokens = np.zeros((len(documents), self._length), dtype=np.int64)
        targets = np.full_like(tokens, IGNORE_INDEX)
        for lane, length in enumerate(lengths[self._own]):
            if length:
                first = int(firsts[lane])
                # A target is the input of the next place, so inputs begin one token earlier.
                ids = self._split.read(int(documents[lane]), max(first - 1, 0), first + int(length))
                if not first:
                    ids = np.insert(ids, 0, self._split.start_id)
                tokens[lane, :length], targets[lane, :length] = ids[:-1], ids[1:]
                if self._split.targets is not None:
                    targets[lane, :length][~self._split.is_target(ids[1:])] = IGNORE_INDEX
        return Segment(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            starts=torch.from_numpy((segments == 0) & (pieces >= 0)),
            lengths=torch.from_numpy(lengths[self._own].copy()),
            documents=torch.from_numpy(documents),
            total_targets=self._count_targets(lengths),
        )

    def _count_targets(self, lengths: NDArray[np.int64]) -> int:
        """Targets of the next segment of all lanes. Where the corpus says which they are, all lanes are read."""
        if self._split.targets is None:
            return int(lengths.sum())
        firsts = self._all_pieces.firsts[self._pieces] + self._segments * self._length
        reading = zip(self._all_pieces.documents[self._pieces], firsts, lengths, strict=True)
        return sum(
            int(self._split.is_target(self._split.read(int(document), int(first), int(first + length))).sum())
            for document, first, length in reading
            if length
        )


def lanes(split: Split, *, batch_size: int, length: int, seed: int | None = None, endless: bool = False) -> Lanes:
    """The segments of `length` tokens of a split, in `batch_size` lanes: one pass over the documents, in order.

    `seed` shuffles the documents; `endless` begins again after the last one. What is given is a `Lanes`, whose
    `state_dict` says where it is. `from compressive_transformer.lanes import Lanes` to divide the lanes over
    processes or to read long documents in pieces.
    """
    return Lanes(split, batch_size=batch_size, length=length, seed=seed, endless=endless)


class _Pieces(NamedTuple):
    """All pieces of a split in order, `[piece]` each: arrays, since a large corpus has hundreds of thousands."""

    documents: NDArray[np.int64]
    """Number of the document in the split."""
    firsts: NDArray[np.int64]
    """Place in the document of the piece's first token."""
    tokens: NDArray[np.int64]
    """Length of the piece."""


def _pieces_of(split: Split, longest: int) -> _Pieces:
    """The documents of a split, those of more than `longest` tokens in pieces; 0 cuts none."""
    lengths = np.array([document.tokens for document in split.documents], dtype=np.int64)
    longest = min(longest or int(lengths.max()), int(lengths.max()))
    counts = -(-lengths // longest)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    numbers = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the document
    firsts = numbers * longest
    return _Pieces(documents, firsts, np.minimum(lengths[documents] - firsts, longest))


def _integers(values: object, *, count: int) -> NDArray[np.int64]:
    """`count` integers that came from a file."""
    if not isinstance(values, list) or len(values) != count or not all(type(value) is int for value in values):
        raise CompressiveError(f"the position of the lanes is damaged: {count} integer(s) are expected; begin anew")
    # Numbers that int64 cannot hold are as wrong as the largest that it can.
    return np.array([max(min(value, 2**63 - 1), -(2**63)) for value in values], dtype=np.int64)
