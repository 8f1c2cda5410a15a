"""Each token of each document is read once, by one lane, on any number of processes, across restarts."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressive_transformer.corpus import Document, Split, prepare
from compressive_transformer.errors import CompressiveError
from compressive_transformer.lanes import IGNORE, Lanes, Segment, lanes


def numbered_split(lengths: list[int]) -> Split:
    """Documents of these lengths in which every token is another number, so that none can be mistaken."""
    offsets = np.cumsum([0, *lengths]).tolist()
    documents = tuple(
        Document(f"document {number}", offsets[number], length, words=1, bytes=1)
        for number, length in enumerate(lengths)
    )
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    return Split("train", documents, tokens, vocab_size=offsets[-1] + 1, lossless=True, fingerprint="f")


def read_document(split: Split, number: int) -> list[int]:
    return split.read(number).tolist()  # type: ignore[no-any-return]


def equal(one: Segment, other: Segment) -> bool:
    return one.total_targets == other.total_targets and all(map(torch.equal, one[:-1], other[:-1]))


def begun_documents(segments: list[Segment]) -> list[int]:
    """Documents in the order in which they were taken: by step, then by lane."""
    return [number for segment in segments for number in segment.documents[segment.starts].tolist()]


document_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)
segment_length = st.integers(1, 12)


@given(
    lengths=document_lengths,
    batch=st.integers(1, 6),
    length=segment_length,
    seed=st.none() | st.integers(0, 9),
)
def test_one_pass_reads_each_token_of_each_document_once(
    lengths: list[int], batch: int, length: int, seed: int | None
) -> None:
    split = numbered_split(lengths)
    targets = torch.cat([segment.targets.flatten() for segment in lanes(split, batch=batch, length=length, seed=seed)])
    assert sorted(targets[targets != IGNORE].tolist()) == list(range(sum(lengths)))


@given(lengths=document_lengths, batch=st.integers(1, 6), length=segment_length, seed=st.integers(0, 9))
def test_each_lane_reads_whole_documents_from_their_start(
    lengths: list[int], batch: int, length: int, seed: int
) -> None:
    split = numbered_split(lengths)
    open_documents: dict[int, list[int]] = {}
    finished = []
    for segment in lanes(split, batch=batch, length=length, seed=seed):
        for lane in range(batch):
            count, number = int(segment.lengths[lane]), int(segment.documents[lane])
            inputs, targets = segment.tokens[lane, :count].tolist(), segment.targets[lane, :count].tolist()
            if segment.starts[lane]:
                assert lane not in open_documents
                open_documents[lane] = [split.start_id]
            if not count:
                continue
            # What is read is what was to be predicted one place before.
            assert inputs == [open_documents[lane][-1], *targets[:-1]]
            open_documents[lane] += targets
            if open_documents[lane][1:] == read_document(split, number):
                finished.append(number)
                del open_documents[lane]
    assert not open_documents
    assert sorted(finished) == list(range(len(lengths)))


@given(lengths=document_lengths, batch=st.integers(1, 6), length=segment_length)
def test_a_segment_is_padded_at_the_end_of_its_document_and_nowhere_else(
    lengths: list[int], batch: int, length: int
) -> None:
    split = numbered_split(lengths)
    steps = 0
    for segment in lanes(split, batch=batch, length=length):
        assert segment.tokens.shape == segment.targets.shape == (batch, length)
        assert {field.dtype for field in (segment.tokens, segment.targets, segment.lengths)} == {torch.int64}
        assert (segment.starts.dtype, segment.documents.dtype) == (torch.bool, torch.int64)
        padding = torch.arange(length) >= segment.lengths[:, None]
        assert torch.equal(segment.targets == IGNORE, padding)
        assert not segment.tokens[padding].any()
        for lane in torch.where(segment.lengths % length != 0)[0]:
            document = split.documents[int(segment.documents[lane])]
            assert segment.targets[lane, segment.lengths[lane] - 1] == document.offset + document.tokens - 1
        steps += int((segment.lengths > 0).sum())
    assert steps == sum(-(-tokens // length) for tokens in lengths)


@given(lengths=document_lengths, batch=st.integers(1, 6), length=segment_length)
def test_documents_are_taken_in_order_by_the_lowest_free_lane_and_none_waits(
    lengths: list[int], batch: int, length: int
) -> None:
    segments = list(lanes(numbered_split(lengths), batch=batch, length=length))
    assert begun_documents(segments) == list(range(len(lengths)))
    begun = 0
    for segment in segments:
        begun += int(segment.starts.sum())
        idle = segment.documents == -1
        assert torch.equal(idle, segment.lengths == 0)
        assert not segment.starts[idle].any()
        assert begun == len(lengths) or not idle.any()


@given(
    lengths=document_lengths,
    length=segment_length,
    world=st.integers(1, 4),
    share=st.integers(1, 3),
    endless=st.booleans(),
)
def test_the_lanes_of_all_processes_together_are_those_of_one(
    lengths: list[int], length: int, world: int, share: int, endless: bool
) -> None:
    split = numbered_split(lengths)
    settings: dict[str, Any] = {"batch": share * world, "length": length, "seed": 1, "endless": endless}
    alone = list(islice(Lanes(split, **settings), 40))
    parts = [list(islice(Lanes(split, **settings, rank=rank, world=world), 40)) for rank in range(world)]
    assert all(len(part) == len(alone) for part in parts)
    for whole, *shares in zip(alone, *parts, strict=True):
        assert all(len(part.tokens) == share for part in shares)
        assert all(part.total_targets == whole.total_targets for part in shares)
        for expected, *fields in zip(whole[:-1], *(part[:-1] for part in shares), strict=True):
            assert torch.equal(torch.cat(fields), expected)
        assert whole.total_targets == int((whole.targets != IGNORE).sum()) == int(whole.lengths.sum())


@given(
    lengths=document_lengths,
    length=segment_length,
    batch=st.sampled_from([2, 4]),
    steps=st.integers(0, 30),
    seed=st.none() | st.integers(0, 9),
    endless=st.booleans(),
)
def test_a_restored_position_goes_on_as_if_nothing_had_happened(
    lengths: list[int], length: int, batch: int, steps: int, seed: int | None, endless: bool
) -> None:
    split = numbered_split(lengths)
    settings: dict[str, Any] = {"batch": batch, "length": length, "seed": seed, "endless": endless}
    uninterrupted = Lanes(split, **settings)
    for _ in islice(uninterrupted, steps):
        pass
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    rest = list(islice(uninterrupted, 30))

    restored = Lanes(split, **settings)
    for _ in islice(restored, 3):
        pass
    restored.load_state_dict(state)
    assert restored.state_dict() == state
    again = list(islice(restored, 30))
    assert len(again) == len(rest)
    assert all(map(equal, again, rest))
    assert restored.epoch == uninterrupted.epoch

    # On another number of processes.
    for rank in range(2):
        half = Lanes(split, **settings, rank=rank, world=2)
        half.load_state_dict(state)
        own = slice(rank * batch // 2, (rank + 1) * batch // 2)
        for part, whole in zip(islice(half, 30), rest, strict=True):
            assert torch.equal(part.targets, whole.targets[own])
        assert half.state_dict() == restored.state_dict()


@given(lengths=document_lengths, batch=st.integers(1, 6), length=segment_length, seed=st.integers(0, 9))
def test_endless_lanes_read_every_document_once_in_each_epoch(
    lengths: list[int], batch: int, length: int, seed: int
) -> None:
    stream = Lanes(numbered_split(lengths), batch=batch, length=length, seed=seed, endless=True)
    segments = []
    while stream.epoch < 3:
        segments.append(next(stream))
        assert (segments[-1].lengths > 0).all()
    begun = begun_documents(segments)
    for epoch in range(3):
        taken = begun[epoch * len(lengths) : (epoch + 1) * len(lengths)]
        assert sorted(taken) == list(range(len(lengths)))


def order_of_epochs(seed: int | None, epochs: int) -> list[list[int]]:
    stream = Lanes(numbered_split([3] * 20), batch=1, length=3, seed=seed, endless=True)
    return [begun_documents(list(islice(stream, 20))) for _ in range(epochs)]


def test_a_seed_gives_each_epoch_an_order_of_its_own_and_the_same_each_time() -> None:
    orders = order_of_epochs(seed=0, epochs=4) + order_of_epochs(seed=1, epochs=4)
    assert len(set(map(tuple, orders))) == 8
    assert order_of_epochs(seed=0, epochs=4) == orders[:4]
    assert order_of_epochs(seed=None, epochs=2) == [list(range(20))] * 2


def test_the_epoch_is_that_of_the_document_taken_last() -> None:
    stream = Lanes(numbered_split([4, 4]), batch=1, length=2, endless=True)
    assert [(next(stream), stream.epoch)[1] for _ in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_reading_ends_for_good() -> None:
    stream = lanes(numbered_split([5]), batch=2, length=3)
    assert len(list(stream)) == 2
    assert list(stream) == []


def test_lanes_of_real_books_decode_to_these_books(tmp_path: Path) -> None:
    source = files("compressive_transformer") / "sample"
    corpus = prepare(str(source), tmp_path / "data")
    texts = [bytearray() for _ in corpus.test.documents]
    for segment in lanes(corpus.test, batch=2, length=4096):
        for number, targets in zip(segment.documents.tolist(), segment.targets, strict=True):
            texts[number] += bytes(targets[targets != IGNORE].tolist())
    for text, document in zip(texts, sorted((source / "test").iterdir(), key=str), strict=True):
        assert text.decode("utf-8") == document.read_text(encoding="utf-8")


# --- mistakes ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, r"batch \(0\) and length \(4\) must be at least 1"),
        ({"length": 0}, r"batch \(4\) and length \(0\) must be at least 1"),
        ({"length": -3}, r"length \(-3\) must be at least 1"),
        ({"world": 3}, r"batch \(4\) must be a multiple of the number of processes \(3\)"),
        ({"rank": 2, "world": 2}, r"rank \(2\) must be in 0 \.\. world - 1, world is 2"),
        ({"rank": -1}, r"rank \(-1\)"),
        ({"world": 0}, r"world is 0"),
        ({"seed": -1}, r"seed \(-1\) must be 0 or more"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(CompressiveError, match=message):
        Lanes(numbered_split([3, 5]), **({"batch": 4, "length": 4} | change))  # type: ignore[arg-type]


def test_a_split_without_documents_is_refused() -> None:
    empty = Split("test", (), np.zeros(0, dtype=np.uint16), vocab_size=257, lossless=True, fingerprint="f")
    with pytest.raises(CompressiveError, match="split test has no documents"):
        lanes(empty, batch=1, length=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 3}, "batch is 3 there and 2 here"),
        ({"length": 5}, "length is 5 there and 4 here"),
        ({"seed": None}, "seed is None there and 7 here"),
        ({"endless": False}, "endless is False there and True here"),
        ({"corpus": "other"}, "corpus is 'other' there and 'f' here"),
        ({"split": "test"}, "split is 'test' there"),
        ({"documents": [0]}, "damaged: 2 integer"),
        ({"documents": [0, 99]}, "damaged"),
        ({"documents": [0, -2]}, "damaged"),
        ({"documents": [0, 10**30]}, "damaged"),
        ({"documents": "01"}, "damaged"),
        ({"segments": [0, 4]}, "damaged"),
        ({"segments": [0, -1]}, "damaged"),
        ({"segments": [0, 10**30]}, "damaged"),
        ({"segments": [0, True]}, "damaged"),
        ({"segments": [0.0, 1.0]}, "damaged"),
        ({"segments": None}, "damaged"),
        ({"epoch": -1}, "damaged"),
        ({"epoch": "1"}, "damaged"),
        ({"taken": 4}, "damaged"),
        ({"taken": -1}, "damaged"),
    ],
    ids=str,
)
def test_a_position_that_does_not_fit_is_refused_and_changes_nothing(change: dict[str, object], message: str) -> None:
    stream = Lanes(numbered_split([3, 9, 12]), batch=2, length=4, seed=7, endless=True)
    next(stream)
    state = stream.state_dict()
    with pytest.raises(CompressiveError, match=message):
        stream.load_state_dict(state | change)
    assert stream.state_dict() == state


@pytest.mark.parametrize("name", ["batch", "epoch", "taken", "documents", "segments", "corpus"])
def test_a_position_with_a_part_missing_is_refused(name: str) -> None:
    stream = Lanes(numbered_split([3, 9, 12]), batch=2, length=4, seed=7)
    state = stream.state_dict()
    del state[name]
    with pytest.raises(CompressiveError, match="position"):
        stream.load_state_dict(state)
