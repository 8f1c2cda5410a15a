"""Each token of each document is read once, by one lane, on any number of processes, across restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive_transformer.data import Document, Split, prepare
from compressive_transformer.data.lanes import Lanes, Segment, lanes
from compressive_transformer.errors import CompressiveError
from compressive_transformer.model import IGNORE_INDEX
from small import law


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


def all_pieces(lengths: list[int], longest: int) -> list[tuple[int, int, int]]:
    """Document, first token and end of each piece of at most `longest` tokens; 0 for whole documents."""
    return [
        (number, first, min(first + (longest or tokens), tokens))
        for number, tokens in enumerate(lengths)
        for first in range(0, tokens, longest or tokens)
    ]


def begun_pieces(segments: list[Segment], lengths: list[int], longest: int) -> list[tuple[int, int, int]]:
    """Pieces in the order in which they were taken, known by their first target in a numbered split."""
    offsets = np.cumsum([0, *lengths]).tolist()
    known = {offsets[piece[0]] + piece[1]: piece for piece in all_pieces(lengths, longest)}
    return [known[target] for segment in segments for target in segment.targets[segment.starts, 0].tolist()]


def read_slowly(split: Split, queue: list[tuple[int, int, int]], batch_size: int, length: int) -> Iterator[Segment]:
    """Token by token: each lane reads a piece to its end and then takes the next of the queue."""
    rest: list[list[tuple[int, int, int]]] = [[] for _ in range(batch_size)]  # input, target, document
    waiting = list(queue)
    while True:
        starts = []
        for lane in range(batch_size):
            starts.append(not rest[lane] and bool(waiting))
            if starts[lane]:
                number, first, end = waiting.pop(0)
                text = [split.start_id, *read_document(split, number)]
                rest[lane] = [(text[place], text[place + 1], number) for place in range(first, end)]
        if not any(rest):
            return
        rows = [lane[:length] for lane in rest]
        rest = [lane[length:] for lane in rest]
        padded = [row + [(0, IGNORE_INDEX, -1)] * (length - len(row)) for row in rows]
        yield Segment(
            tokens=torch.tensor([[place[0] for place in row] for row in padded]),
            targets=torch.tensor([[place[1] for place in row] for row in padded]),
            starts=torch.tensor(starts),
            lengths=torch.tensor([len(row) for row in rows]),
            documents=torch.tensor([row[0][2] for row in padded]),
            total_targets=sum(map(len, rows)),
        )


document_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)
segment_length = st.integers(1, 12)
piece_segments = st.integers(0, 4)  # longest document in segments, 0 for whole documents


@settings(law, max_examples=40)
@given(
    lengths=document_lengths,
    batch_size=st.integers(1, 6),
    length=segment_length,
    seed=st.none() | st.integers(0, 9),
    pieces=piece_segments,
)
def test_one_pass_reads_each_token_of_each_document_once(
    lengths: list[int], batch_size: int, length: int, seed: int | None, pieces: int
) -> None:
    stream = Lanes(
        numbered_split(lengths), batch_size=batch_size, length=length, seed=seed, max_document_length=pieces * length
    )
    targets = torch.cat([segment.targets.flatten() for segment in stream])
    assert sorted(targets[targets != IGNORE_INDEX].tolist()) == list(range(sum(lengths)))


@settings(law, max_examples=40)
@given(lengths=document_lengths, batch_size=st.integers(1, 6), length=segment_length, seed=st.integers(0, 9))
def test_each_lane_reads_whole_documents_from_their_start(
    lengths: list[int], batch_size: int, length: int, seed: int
) -> None:
    split = numbered_split(lengths)
    open_documents: dict[int, list[int]] = {}
    finished = []
    for segment in lanes(split, batch_size=batch_size, length=length, seed=seed):
        for lane in range(batch_size):
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


@settings(law, max_examples=40)
@given(lengths=document_lengths, batch_size=st.integers(1, 6), length=segment_length, pieces=piece_segments)
def test_a_segment_is_padded_at_the_end_of_its_document_and_nowhere_else(
    lengths: list[int], batch_size: int, length: int, pieces: int
) -> None:
    split = numbered_split(lengths)
    steps = 0
    for segment in Lanes(split, batch_size=batch_size, length=length, max_document_length=pieces * length):
        assert segment.tokens.shape == segment.targets.shape == (batch_size, length)
        assert {field.dtype for field in (segment.tokens, segment.targets, segment.lengths)} == {torch.int64}
        assert (segment.starts.dtype, segment.documents.dtype) == (torch.bool, torch.int64)
        padding = torch.arange(length) >= segment.lengths[:, None]
        assert torch.equal(segment.targets == IGNORE_INDEX, padding)
        assert not segment.tokens[padding].any()
        for lane in torch.where(segment.lengths % length != 0)[0]:
            document = split.documents[int(segment.documents[lane])]
            assert segment.targets[lane, segment.lengths[lane] - 1] == document.offset + document.tokens - 1
        steps += int((segment.lengths > 0).sum())
    assert steps == sum(-(-tokens // length) for tokens in lengths)


@settings(law, max_examples=40)
@given(lengths=document_lengths, batch_size=st.integers(1, 6), length=segment_length)
def test_documents_are_taken_in_order_by_the_lowest_free_lane_and_none_waits(
    lengths: list[int], batch_size: int, length: int
) -> None:
    segments = list(lanes(numbered_split(lengths), batch_size=batch_size, length=length))
    assert begun_documents(segments) == list(range(len(lengths)))
    begun = 0
    for segment in segments:
        begun += int(segment.starts.sum())
        idle = segment.documents == -1
        assert torch.equal(idle, segment.lengths == 0)
        assert not segment.starts[idle].any()
        assert begun == len(lengths) or not idle.any()


@settings(law, max_examples=40)
@given(
    lengths=document_lengths,
    batch_size=st.integers(1, 6),
    length=segment_length,
    seed=st.none() | st.integers(0, 9),
    pieces=piece_segments,
)
def test_lanes_read_what_a_slow_reader_of_the_same_queue_reads(
    lengths: list[int], batch_size: int, length: int, seed: int | None, pieces: int
) -> None:
    split, longest = numbered_split(lengths), pieces * length
    segments = list(Lanes(split, batch_size=batch_size, length=length, seed=seed, max_document_length=longest))
    queue = begun_pieces(segments, lengths, longest)
    assert (sorted(queue) if seed is not None else queue) == all_pieces(lengths, longest)
    expected = list(read_slowly(split, queue, batch_size, length))
    assert len(segments) == len(expected)
    assert all(map(equal, segments, expected))


@settings(law, max_examples=40)
@given(lengths=document_lengths, length=segment_length, pieces=st.integers(1, 4), seed=st.integers(0, 9))
def test_the_order_of_pieces_does_not_depend_on_the_number_of_lanes(
    lengths: list[int], length: int, pieces: int, seed: int
) -> None:
    split, longest = numbered_split(lengths), pieces * length
    orders = [
        begun_pieces(
            list(Lanes(split, batch_size=batch_size, length=length, seed=seed, max_document_length=longest)),
            lengths,
            longest,
        )
        for batch_size in (1, 2, 5)
    ]
    assert orders[0] == orders[1] == orders[2]


@settings(law, max_examples=40)
@given(
    lengths=document_lengths,
    batch_size=st.integers(1, 6),
    length=segment_length,
    seed=st.integers(0, 9),
    more=st.integers(),
)
def test_documents_that_are_short_enough_stay_whole(
    lengths: list[int], batch_size: int, length: int, seed: int, more: int
) -> None:
    split = numbered_split(lengths)
    enough = -(-max(lengths) // length) + abs(more)
    whole = list(lanes(split, batch_size=batch_size, length=length, seed=seed))
    cut = list(Lanes(split, batch_size=batch_size, length=length, seed=seed, max_document_length=enough * length))
    assert len(cut) == len(whole)
    assert all(map(equal, cut, whole))


def test_a_piece_starts_with_the_token_before_it_a_document_with_start() -> None:
    split = numbered_split([5, 9])
    segments = list(Lanes(split, batch_size=1, length=2, max_document_length=4))
    begins = [segment for segment in segments if segment.starts[0]]
    assert [segment.tokens[0, 0].item() for segment in begins] == [split.start_id, 3, split.start_id, 8, 12]
    assert [segment.targets[0, 0].item() for segment in begins] == [0, 4, 5, 9, 13]
    assert [segment.documents.item() for segment in segments] == [0, 0, 0, 1, 1, 1, 1, 1]


@settings(law, max_examples=40)
@given(
    lengths=document_lengths,
    length=segment_length,
    world=st.integers(1, 4),
    share=st.integers(1, 3),
    endless=st.booleans(),
    pieces=piece_segments,
)
def test_the_lanes_of_all_processes_together_are_those_of_one(
    lengths: list[int], length: int, world: int, share: int, endless: bool, pieces: int
) -> None:
    split = numbered_split(lengths)
    options: dict[str, Any] = {"batch_size": share * world, "length": length, "seed": 1, "endless": endless}
    options["max_document_length"] = pieces * length
    alone = list(islice(Lanes(split, **options), 40))
    parts = [list(islice(Lanes(split, **options, rank=rank, world=world), 40)) for rank in range(world)]
    assert all(len(part) == len(alone) for part in parts)
    for whole, *shares in zip(alone, *parts, strict=True):
        assert all(len(part.tokens) == share for part in shares)
        assert all(part.total_targets == whole.total_targets for part in shares)
        for expected, *fields in zip(whole[:-1], *(part[:-1] for part in shares), strict=True):
            assert torch.equal(torch.cat(fields), expected)
        assert whole.total_targets == int((whole.targets != IGNORE_INDEX).sum()) == int(whole.lengths.sum())


@settings(law, max_examples=40)
@given(
    lengths=document_lengths,
    length=segment_length,
    batch_size=st.sampled_from([2, 4]),
    steps=st.integers(0, 30),
    seed=st.none() | st.integers(0, 9),
    endless=st.booleans(),
    pieces=piece_segments,
)
def test_a_restored_position_continues_exactly(
    lengths: list[int], length: int, batch_size: int, steps: int, seed: int | None, endless: bool, pieces: int
) -> None:
    split = numbered_split(lengths)
    options: dict[str, Any] = {"batch_size": batch_size, "length": length, "seed": seed, "endless": endless}
    options["max_document_length"] = pieces * length
    uninterrupted = Lanes(split, **options)
    for _ in islice(uninterrupted, steps):
        pass
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    rest = list(islice(uninterrupted, 30))

    restored = Lanes(split, **options)
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
        half = Lanes(split, **options, rank=rank, world=2)
        half.load_state_dict(state)
        own = slice(rank * batch_size // 2, (rank + 1) * batch_size // 2)
        for part, whole in zip(islice(half, 30), rest, strict=True):
            assert torch.equal(part.targets, whole.targets[own])
        assert half.state_dict() == restored.state_dict()


@settings(law, max_examples=40)
@given(
    lengths=document_lengths,
    batch_size=st.integers(1, 6),
    length=segment_length,
    seed=st.integers(0, 9),
    pieces=piece_segments,
)
def test_endless_lanes_read_every_document_once_in_each_epoch(
    lengths: list[int], batch_size: int, length: int, seed: int, pieces: int
) -> None:
    longest = pieces * length
    options: dict[str, Any] = {"batch_size": batch_size, "length": length, "seed": seed, "max_document_length": longest}
    stream = Lanes(numbered_split(lengths), **options, endless=True)
    segments = []
    while stream.epoch < 3:
        segments.append(next(stream))
        assert (segments[-1].lengths > 0).all()
    begun, expected = begun_pieces(segments, lengths, longest), all_pieces(lengths, longest)
    for epoch in range(3):
        assert sorted(begun[epoch * len(expected) : (epoch + 1) * len(expected)]) == expected


def order_of_epochs(lengths: list[int], seed: int | None, epochs: int) -> list[list[tuple[int, int, int]]]:
    stream = Lanes(numbered_split(lengths), batch_size=1, length=3, seed=seed, endless=True, max_document_length=3)
    return [begun_pieces(list(islice(stream, 20)), lengths, longest=3) for _ in range(epochs)]


@pytest.mark.parametrize("lengths", [[3] * 20, [60], [9, 30, 3, 18]], ids=["documents", "pieces of one", "both"])
def test_a_seed_gives_each_epoch_an_order_of_its_own_and_the_same_each_time(lengths: list[int]) -> None:
    orders = order_of_epochs(lengths, seed=0, epochs=4) + order_of_epochs(lengths, seed=1, epochs=4)
    assert len(set(map(tuple, orders))) == 8
    assert order_of_epochs(lengths, seed=0, epochs=4) == orders[:4]
    assert order_of_epochs(lengths, seed=None, epochs=2) == [all_pieces(lengths, longest=3)] * 2


def test_the_epoch_is_that_of_the_document_taken_last() -> None:
    stream = Lanes(numbered_split([4, 4]), batch_size=1, length=2, endless=True)
    assert [(next(stream), stream.epoch)[1] for _ in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_reading_ends_for_good() -> None:
    stream = lanes(numbered_split([5]), batch_size=2, length=3)
    assert len(list(stream)) == 2
    assert list(stream) == []


def test_lanes_of_real_books_decode_to_these_books(tmp_path: Path) -> None:
    source = files("compressive_transformer.apps.demo") / "sample"
    corpus = prepare(str(source), tmp_path / "data")
    texts = [bytearray() for _ in corpus.test.documents]
    for segment in lanes(corpus.test, batch_size=2, length=4096):
        for number, targets in zip(segment.documents.tolist(), segment.targets, strict=True):
            texts[number] += bytes(targets[targets != IGNORE_INDEX].tolist())
    for text, document in zip(texts, sorted((source / "test").iterdir(), key=str), strict=True):
        assert text.decode("utf-8") == document.read_text(encoding="utf-8")


# --- mistakes ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, r"batch_size \(0\) and length \(4\) must be at least 1"),
        ({"length": 0}, r"batch_size \(4\) and length \(0\) must be at least 1"),
        ({"length": -3}, r"length \(-3\) must be at least 1"),
        ({"world": 3}, r"batch_size \(4\) must be a multiple of the number of processes \(3\)"),
        ({"rank": 2, "world": 2}, r"rank \(2\) must be in 0 \.\. world - 1, world is 2"),
        ({"rank": -1}, r"rank \(-1\)"),
        ({"world": 0}, r"world is 0"),
        ({"seed": -1}, r"seed \(-1\) must be 0 or more"),
        (
            {"max_document_length": 10},
            r"max_document_length \(10\) must be a multiple .* \(4 tokens\), the nearest is 12,",
        ),
        ({"max_document_length": 9}, r"max_document_length \(9\) .* the nearest is 8, or 0 for whole documents"),
        ({"max_document_length": 1}, r"max_document_length \(1\) .* the nearest is 4,"),
        ({"max_document_length": -8}, r"max_document_length \(-8\) .* the nearest is 4,"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(CompressiveError, match=message):
        Lanes(numbered_split([3, 5]), **({"batch_size": 4, "length": 4} | change))  # type: ignore[arg-type]


def test_a_split_without_documents_is_refused() -> None:
    empty = Split("test", (), np.zeros(0, dtype=np.uint16), vocab_size=257, lossless=True, fingerprint="f")
    with pytest.raises(CompressiveError, match="split test has no documents"):
        lanes(empty, batch_size=1, length=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 3}, "batch_size was 3, is now 2;"),
        ({"length": 5}, "length was 5, is now 4;"),
        ({"seed": None}, "seed was None, is now 7;"),
        ({"endless": False}, "endless was False, is now True;"),
        ({"max_document_length": 4}, "max_document_length was 4, is now 8;"),
        ({"corpus": "other"}, "corpus was 'other', is now 'f';"),
        ({"split": "test"}, "split was 'test'"),
        ({"pieces": [0]}, "damaged: 2 integer"),
        ({"pieces": [0, 99]}, "damaged"),
        ({"pieces": [0, -2]}, "damaged"),
        ({"pieces": [0, 10**30]}, "damaged"),
        ({"pieces": "01"}, "damaged"),
        ({"pieces": [0, 2], "segments": [0, 2]}, "damaged"),
        ({"segments": [0, 4]}, "damaged"),
        ({"segments": [0, -1]}, "damaged"),
        ({"segments": [0, 10**30]}, "damaged"),
        ({"segments": [0, True]}, "damaged"),
        ({"segments": [0.0, 1.0]}, "damaged"),
        ({"segments": None}, "damaged"),
        ({"epoch": -1}, "damaged"),
        ({"epoch": "1"}, "damaged"),
        ({"taken": 6}, "damaged"),
        ({"taken": -1}, "damaged"),
    ],
    ids=str,
)
def test_a_position_that_does_not_fit_is_refused_and_changes_nothing(change: dict[str, object], message: str) -> None:
    stream = Lanes(numbered_split([3, 9, 12]), batch_size=2, length=4, seed=7, endless=True, max_document_length=8)
    next(stream)
    state = stream.state_dict()
    with pytest.raises(CompressiveError, match=message):
        stream.load_state_dict(state | change)
    assert stream.state_dict() == state


@pytest.mark.parametrize("name", ["batch_size", "epoch", "taken", "pieces", "segments", "corpus"])
def test_a_position_with_a_part_missing_is_refused(name: str) -> None:
    stream = Lanes(numbered_split([3, 9, 12]), batch_size=2, length=4, seed=7)
    state = stream.state_dict()
    del state[name]
    with pytest.raises(CompressiveError, match="data-loader state"):
        stream.load_state_dict(state)


def test_a_position_that_is_no_table_is_refused(corpus):
    lanes = Lanes(corpus.train, batch_size=2, length=8)
    for wrong in (5, [], "batch", None):
        with pytest.raises(CompressiveError, match="the position of the lanes is damaged: expected a table, got"):
            lanes.load_state_dict(wrong)
