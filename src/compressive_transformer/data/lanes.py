"""Batches of segments from tokens on disk: each lane reads whole documents, or long ones in pieces.

A piece is a document, or a part of one that is longer than `max_document_length`; memory is reset before each piece.
Pieces start at a segment border and their last segment is padded, so memory never crosses their start. The lengths of
the documents alone decide which lane reads which piece: each process computes this for all lanes and reads tokens for
its part.
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
    """The next segment of each lane. Tensors are on the CPU and int64 unless stated otherwise."""

    tokens: Tensor
    """Inputs `[batch, segment]`: the token before each target, the start id at the start of a document; padding is
    0."""
    targets: Tensor
    """Tokens of the document `[batch, segment]`, each once; `IGNORE_INDEX` for padding and for tokens that are not
    targets of the corpus."""
    starts: Tensor
    """True for lanes that start a document or a piece of one `[batch]`, bool: the argument of `memory.reset`."""
    lengths: Tensor
    """Tokens without padding `[batch]`; 0 for a lane without a document."""
    documents: Tensor
    """Number of the document in the split `[batch]`; -1 for a lane without a document."""
    total_targets: int
    """Targets over all lanes of all processes, the divisor of the sum of all losses: so the mean does not depend on the
    number of processes. May be 0 where the corpus has `targets`."""


class Lanes(Iterator[Segment]):
    """An iterator of segments whose exact position can be saved and restored.

    All lanes share one queue of documents; a lane that finished one takes the next, lower lanes first. One pass reads
    each document once; lanes without a document idle until the last one is done.

    With `max_document_length` a longer document enters the queue as pieces of that length (the last one may be
    shorter). A piece starts with empty memory, as a document does. Its first input is the token before it: the start id
    would mean that the document starts there.
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
        """Check the options and start at the first document.

        Args:
            split: Documents to read.
            batch_size: Lanes over all processes, a multiple of `world`.
            length: Length of a segment (tokens).
            seed: Seed of the order of the documents in each epoch; None keeps their order.
            endless: True to continue with the next epoch.
            max_document_length: Length of pieces (tokens), a multiple of `length`; 0 for whole documents.
            rank: Number of this process, which reads lanes rank·batch_size/world to (rank+1)·batch_size/world.
            world: Number of processes.

        Raises:
            CompressiveError: for numbers outside their limits, and for a split without documents.
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
        self._local_lanes = slice(rank * batch_size // world, (rank + 1) * batch_size // world)
        self._all_pieces = _pieces_of(split, max_document_length)
        self._pieces = np.full(batch_size, -1, dtype=np.int64)  # that a lane reads, -1 for none
        self._segments = np.zeros(batch_size, dtype=np.int64)  # next one of its piece
        self._begin_epoch(0)

    @property
    def epoch(self) -> int:
        """Pass over the documents, from 0, of the document or piece taken last."""
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
        """Return the position of all lanes of all processes as JSON values, equal on all processes."""
        return {
            **self._identity(),
            "epoch": self._epoch,
            "taken": self._taken,
            "pieces": self._pieces.tolist(),
            "segments": self._segments.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position of `state_dict`, on any number of processes.

        Raises CompressiveError for a state of other data or settings, or an invalid one.
        """
        if not isinstance(state, Mapping):
            raise CompressiveError(f"the position of the lanes is damaged: expected a table, got {state!r}")
        state = upgrade(state)
        for name, value in self._identity().items():
            if name not in state or state[name] != value:
                raise CompressiveError(
                    f"data-loader state does not match: {name} was {state.get(name)!r}, is now {value!r};"
                    " resume with the same data and settings, or start a new run"
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
            raise CompressiveError("data-loader state is damaged, it does not match the documents: start a new run")
        self._begin_epoch(int(epoch))
        self._taken = int(taken)
        self._pieces, self._segments = pieces, segments

    @property
    def _batch(self) -> int:
        return len(self._pieces)

    def _identity(self) -> dict[str, Any]:
        """Return the data and settings that a position is valid for."""
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
        """Take the next piece of the queue, -1 at its end."""
        if self._taken == len(self._order):
            if not self._endless:
                return -1
            self._begin_epoch(self._epoch + 1)
        self._taken += 1
        return int(self._order[self._taken - 1])

    def _segments_of(self, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of segments of each of `pieces`, 0 for -1."""
        return np.where(pieces < 0, 0, -(-self._all_pieces.tokens[pieces] // self._length))

    def _remaining(self) -> NDArray[np.int64]:
        """Return the tokens of its piece that each lane has not read."""
        read = self._segments * self._length
        return np.where(self._pieces < 0, 0, np.maximum(self._all_pieces.tokens[self._pieces] - read, 0))

    def _read(self, lengths: NDArray[np.int64]) -> Segment:
        """Return the next segment of this process, with `lengths [batch]` tokens in the lanes of all processes."""
        pieces, segments = self._pieces[self._local_lanes], self._segments[self._local_lanes]
        documents = np.where(pieces < 0, -1, self._all_pieces.documents[pieces])
        firsts = self._all_pieces.firsts[pieces] + segments * self._length
        tokens = np.zeros((len(documents), self._length), dtype=np.int64)
        targets = np.full_like(tokens, IGNORE_INDEX)
        for lane, length in enumerate(lengths[self._local_lanes]):
            if length:
                first = int(firsts[lane])
                # A target is the next input, so inputs start one token earlier.
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
            lengths=torch.from_numpy(lengths[self._local_lanes].copy()),
            documents=torch.from_numpy(documents),
            total_targets=self._count_targets(lengths),
        )

    def _count_targets(self, lengths: NDArray[np.int64]) -> int:
        """Return the targets in the next segment of all lanes, which are read only where the corpus has `targets`."""
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
    """Read a split segment by segment.

    `Lanes` in `compressive_transformer.data.lanes` also divides the lanes among processes and long documents into
    pieces.

    Args:
        split: Documents to read.
        batch_size: Number of lanes.
        length: Length of a segment (tokens).
        seed: Seed of the order of the documents in each epoch; None keeps their order.
        endless: True to continue with the next epoch after the last document.

    Returns:
        An iterator of `Segment`s; its `state_dict` is its position.

    Raises:
        CompressiveError: for numbers outside their limits, and for a split without documents.
    """
    return Lanes(split, batch_size=batch_size, length=length, seed=seed, endless=endless)


class _Pieces(NamedTuple):
    """All pieces of a split in order, arrays `[piece]`, since a large corpus has hundreds of thousands."""

    documents: NDArray[np.int64]
    """Number of the document in the split."""
    firsts: NDArray[np.int64]
    """First token of the piece in its document."""
    tokens: NDArray[np.int64]
    """Length of the piece."""


def _pieces_of(split: Split, longest: int) -> _Pieces:
    """Return the documents of a split, divided into pieces of at most `longest` tokens; 0 divides none."""
    lengths = np.array([document.tokens for document in split.documents], dtype=np.int64)
    longest = min(longest or int(lengths.max()), int(lengths.max()))
    counts = -(-lengths // longest)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    numbers = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the document
    firsts = numbers * longest
    return _Pieces(documents, firsts, np.minimum(lengths[documents] - firsts, longest))


def _integers(values: object, *, count: int) -> NDArray[np.int64]:
    """Return an array of `count` integers from a file."""
    if not isinstance(values, list) or len(values) != count or not all(type(value) is int for value in values):
        raise CompressiveError(f"data-loader state is damaged: {count} integer(s) are expected; start a new run")
    # Numbers beyond int64 are as wrong as its largest.
    return np.array([max(min(value, 2**63 - 1), -(2**63)) for value in values], dtype=np.int64)
