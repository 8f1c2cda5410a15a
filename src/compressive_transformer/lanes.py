"""Tokens on disk to batches: each lane reads whole documents, segment by segment.

A document begins at a segment border and its last segment is padded, so memory is reset a whole lane at a
time and never crosses the start of a document. Which lane reads which document follows from the lengths of
the documents alone: every process works it out for all lanes and reads tokens only for its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .corpus import Split
from .errors import CompressiveError

IGNORE = -100
"""The target at a place that has none; PyTorch's losses skip it."""


class Segment(NamedTuple):
    """What each lane reads next. Tensors are on the CPU, int64 where nothing else is said."""

    tokens: Tensor
    """Inputs `[lane, segment]`: the start id, then all tokens of the document but its last; padding is 0."""
    targets: Tensor
    """The document's tokens `[lane, segment]`, each once; padding is `IGNORE`."""
    starts: Tensor
    """Whether the lane begins a document `[lane]`, bool: what `memory.reset` takes."""
    lengths: Tensor
    """Real tokens `[lane]`; 0 for a lane that has no document left."""
    documents: Tensor
    """Number of the document in the split `[lane]`; -1 for a lane that has no document left."""
    total_targets: int
    """Real targets over all lanes of all processes: what to divide the sum of all losses by, so that the mean
    does not depend on the number of processes."""


class Lanes(Iterator[Segment]):
    """An iterator of segments that can say exactly where it is and go on from there.

    All lanes share one queue of documents; a lane that has finished one takes the next, the lower lane first.
    One pass reads every document once; lanes for which none is left idle until the last one is done. With
    `endless` the queue goes on with the next epoch. `seed` shuffles the documents of each epoch, None keeps
    them in order. Of `world` processes, the one of rank r gets lanes r·batch/world to (r+1)·batch/world.
    """

    def __init__(
        self,
        split: Split,
        *,
        batch: int,
        length: int,
        seed: int | None = None,
        endless: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """`batch` counts lanes over all processes, `length` the tokens of a segment.

        Raises CompressiveError for numbers that cannot be, and for a split without documents.
        """
        if batch < 1 or length < 1:
            raise CompressiveError(f"batch ({batch}) and length ({length}) must be at least 1")
        if not 0 <= rank < world:
            raise CompressiveError(f"rank ({rank}) must be in 0 .. world - 1, world is {world}")
        if batch % world:
            raise CompressiveError(f"batch ({batch}) must be a multiple of the number of processes ({world})")
        if seed is not None and seed < 0:
            raise CompressiveError(f"seed ({seed}) must be 0 or more, or None for documents in order")
        if not split.documents:
            raise CompressiveError(f"split {split.name} has no documents: prepare the corpus with some")
        self._split, self._length, self._seed, self._endless = split, length, seed, endless
        self._own = slice(rank * batch // world, (rank + 1) * batch // world)
        self._tokens = np.array([document.tokens for document in split.documents], dtype=np.int64)
        self._documents = np.full(batch, -1, dtype=np.int64)
        self._segments = np.zeros(batch, dtype=np.int64)  # of its document, the next one that a lane reads
        self._begin_epoch(0)

    @property
    def epoch(self) -> int:
        """Number of the pass over the documents, from 0, that the document taken last belongs to."""
        return self._epoch

    def __next__(self) -> Segment:
        for lane in np.flatnonzero(self._remaining() == 0):
            self._documents[lane] = self._take_document()
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
            "documents": self._documents.tolist(),
            "segments": self._segments.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, on any number of processes.

        Raises CompressiveError where the state is of other data or other settings, or cannot be.
        """
        for name, value in self._identity().items():
            if name not in state or state[name] != value:
                raise CompressiveError(
                    f"the position is of other lanes: {name} is {state.get(name)!r} there and {value!r} here;"
                    " go on with the same data and settings, or begin anew"
                )
        epoch, taken = _integers([state.get("epoch"), state.get("taken")], count=2)
        documents, segments = (_integers(state.get(name), count=self._batch) for name in ("documents", "segments"))
        if not (
            epoch >= 0
            and 0 <= taken <= len(self._tokens)
            and ((documents >= -1) & (documents < len(self._tokens))).all()
            and ((segments >= 0) & (segments <= self._segments_of(documents))).all()
        ):
            raise CompressiveError("the position of the lanes is damaged, it does not fit the documents: begin anew")
        self._begin_epoch(int(epoch))
        self._taken = int(taken)
        self._documents, self._segments = documents, segments

    @property
    def _batch(self) -> int:
        return len(self._documents)

    def _identity(self) -> dict[str, Any]:
        """What a position depends on: it means nothing for other lanes."""
        return {
            "split": self._split.name,
            "corpus": self._split.fingerprint,
            "batch": self._batch,
            "length": self._length,
            "seed": self._seed,
            "endless": self._endless,
        }

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._taken = epoch, 0
        self._order = np.arange(len(self._tokens))
        if self._seed is not None:
            np.random.default_rng([self._seed, epoch]).shuffle(self._order)

    def _take_document(self) -> int:
        """The next document of the queue, -1 where it is at its end."""
        if self._taken == len(self._order):
            if not self._endless:
                return -1
            self._begin_epoch(self._epoch + 1)
        self._taken += 1
        return int(self._order[self._taken - 1])

    def _segments_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Segments that each of `documents` has, 0 for -1."""
        return np.where(documents < 0, 0, -(-self._tokens[documents] // self._length))

    def _remaining(self) -> NDArray[np.int64]:
        """Tokens of its document that each lane still has to read."""
        read = self._segments * self._length
        return np.where(self._documents < 0, 0, np.maximum(self._tokens[self._documents] - read, 0))

    def _read(self, lengths: NDArray[np.int64]) -> Segment:
        """The next segment of this process's lanes, of which each has `lengths [lane]` tokens."""
        documents, segments = self._documents[self._own], self._segments[self._own]
        tokens = np.zeros((len(documents), self._length), dtype=np.int64)
        targets = np.full_like(tokens, IGNORE)
        for lane, length in enumerate(lengths[self._own]):
            if length:
                first = int(segments[lane]) * self._length
                # A target is the input of the next place, so inputs begin one token earlier.
                ids = self._split.read(int(documents[lane]), max(first - 1, 0), first + int(length))
                if not first:
                    ids = np.insert(ids, 0, self._split.start_id)
                tokens[lane, :length], targets[lane, :length] = ids[:-1], ids[1:]
        return Segment(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            starts=torch.from_numpy((segments == 0) & (documents >= 0)),
            lengths=torch.from_numpy(lengths[self._own].copy()),
            documents=torch.from_numpy(documents.copy()),
            total_targets=int(lengths.sum()),
        )


def lanes(split: Split, *, batch: int, length: int, seed: int | None = None, endless: bool = False) -> Lanes:
    """The segments of `length` tokens of a split, in `batch` lanes: one pass over the documents, in order.

    `seed` shuffles the documents; `endless` begins again after the last one. The class `Lanes` says more, and
    divides the lanes over processes.
    """
    return Lanes(split, batch=batch, length=length, seed=seed, endless=endless)


def _integers(values: object, *, count: int) -> NDArray[np.int64]:
    """`count` integers that came from a file."""
    if not isinstance(values, list) or len(values) != count or not all(type(value) is int for value in values):
        raise CompressiveError(f"the position of the lanes is damaged: {count} integer(s) are expected; begin anew")
    # Numbers that int64 cannot hold are as wrong as the largest that it can.
    return np.array([max(min(value, 2**63 - 1), -(2**63)) for value in values], dtype=np.int64)
