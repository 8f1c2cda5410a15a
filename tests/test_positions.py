"""Which slots a query may read and at which distance, against counting tokens one by one."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reference
from compressive_transformer.attention.positions import relative_positions, rotary_positions
from compressive_transformer.memory import SlotLayout
from small import LAYERED, assert_close, configs, law, small_config


def positions_of(config, seen, lengths, chunk, layer=0, form=relative_positions):
    """Positions for lanes that have seen `seen` tokens and read `lengths` of a chunk."""
    return form(
        config,
        SlotLayout.of(config, layer),
        seen=torch.tensor(seen),
        lengths=torch.tensor(lengths),
        chunk=chunk,
        like=torch.empty(0, dtype=torch.float64),
    )


def rows_seen(positions, lane, query):
    """The sinusoids of all slots as a query of a lane sees them: row (queries - 1 - a) + s of rows[b]."""
    parts = []
    for grid in positions.grids:
        step, _, _, width = grid.rows.shape
        place, offset = divmod(query, step)
        table = grid.rows[offset, 0 if grid.lanes is None else int(grid.lanes[lane])]
        first = positions.queries // step - 1 - place
        # Beyond the table the view shows other numbers, which are always masked.
        table = torch.cat([table, torch.full((grid.slots, width), torch.nan)])
        parts.append(table[first : first + grid.slots])
    return torch.cat(parts)


def counted(config, layout, seen, query, width):
    """For each slot: may the query read it, and its distance (None where no token stands there)."""
    compressed, recent = layout.slot_spans(seen)
    pending, zeros = seen % config.segment_length, config.empty_slots == "zeros"
    now, committed = seen + query, seen - pending
    for slot, span in enumerate(compressed):
        age = layout.compressed_length - slot
        mean = now - sum(span) / len(span) if span else None
        yield bool(span) or zeros, mean if config.compressed_position == "span" else pending + query + age
    for slot, span in enumerate(recent):
        within = slot >= layout.waiting_length - int(layout.waiting(torch.tensor(seen)))
        yield bool(span) or (zeros and within), now - span.start if span else None
    for token in range(committed, committed + width):
        yield token <= now, now - token


def check_positions(config, layer, seen, lengths, chunk):
    positions, layout = positions_of(config, seen, lengths, chunk, layer), SlotLayout.of(config, layer)
    width = positions.grids[-1].slots - layout.recent_length
    assert width == max(1, *(s % config.segment_length + n for s, n in zip(seen, lengths, strict=True)))
    for lane, (before, length) in enumerate(zip(seen, lengths, strict=True)):
        mask = positions.mask.expand(len(seen), -1, -1)[lane]
        for query in range(length):
            rows = rows_seen(positions, lane, query)
            for slot, (readable, distance) in enumerate(counted(config, layout, before, query, width)):
                assert mask[query, slot] == (0.0 if readable else -torch.inf), slot
                if readable and distance is not None:
                    assert_close(rows[slot], reference.sinusoid(distance, config.d_model))


@settings(law, max_examples=50)
@given(
    config=configs,
    seen=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    padding=st.sampled_from([0, 0, 3, 30]),
)
@example(config=small_config(segment_length=7, memory_length=2), seen=[21, 24, 0], seed=0, padding=0)
@example(config=small_config(**LAYERED["different rates"]), seen=[21, 24, 0], seed=0, padding=0)
@example(config=small_config(**LAYERED["no rate divides"]), seen=[31, 12], seed=0, padding=1)
def test_each_query_sees_exactly_the_slots_before_it_at_their_distance(config, seen, seed, padding):
    rng = random.Random(seed)
    lengths = [rng.randint(0, config.segment_length - count % config.segment_length) for count in seen]
    for layer in range(config.n_layers):
        check_positions(config, layer, seen, lengths, max(1, *lengths, 1) + padding)


def places_counted(config, layout, seen, width):
    """The place of each slot from the segment's first token on, None where no token stands there."""
    compressed, recent = layout.slot_spans(seen)
    committed = seen - seen % config.segment_length
    if config.compressed_position == "span":
        places = [sum(span) / len(span) - committed if span else None for span in compressed + recent]
    else:
        # One sequence: what is filled, counted back from the segment.
        filled = sum(map(bool, compressed + recent))
        numbers = iter(range(-filled, 0))
        places = [next(numbers) if span else None for span in compressed + recent]
    return [*places, *range(width)]


def check_angles(config, layer, seen, lengths, chunk):
    forms, layout = (rotary_positions, relative_positions), SlotLayout.of(config, layer)
    positions, relative = (positions_of(config, seen, lengths, chunk, layer, form) for form in forms)
    assert torch.equal(positions.mask, relative.mask[:, :chunk])
    width = config.d_model // config.n_heads
    queries, slots = (angles.expand(len(seen), -1, -1) for angles in (positions.queries, positions.slots))
    segment = slots.shape[1] - layout.compressed_length - layout.recent_length
    for lane, (before, length) in enumerate(zip(seen, lengths, strict=True)):
        for query in range(length):
            expected = reference.sinusoid(before % config.segment_length + query, width)
            assert_close(queries[lane, query], expected, 1e-12)
        for slot, place in enumerate(places_counted(config, layout, before, segment)):
            if place is not None:
                assert_close(slots[lane, slot], reference.sinusoid(place, width), 1e-12)


@settings(law, max_examples=50)
@given(
    config=configs,
    seen=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    padding=st.sampled_from([0, 0, 3, 30]),
)
@example(config=small_config(compressed_position="unit"), seen=[20, 24, 28], seed=0, padding=0)
def test_rotary_angles_are_those_of_the_places_of_queries_and_slots(config, seen, seed, padding):
    rng = random.Random(seed)
    lengths = [rng.randint(0, config.segment_length - count % config.segment_length) for count in seen]
    for layer in range(config.n_layers):
        check_angles(config, layer, seen, lengths, max(1, *lengths, 1) + padding)


@pytest.mark.parametrize("numbering", ["span", "unit"])
def test_angles_stay_exact_and_small_however_long_the_stream_is(numbering):
    config = small_config(segment_length=4, compression_rate=3, compressed_position=numbering)
    near, far = (positions_of(config, [seen], [4], 4, form=rotary_positions) for seen in (36, 36 + 12 * 10**12))
    assert torch.equal(near.queries, far.queries)
    assert torch.equal(near.slots, far.slots)
    assert torch.equal(near.mask, far.mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_exact_in_single_precision_at_least(dtype):
    like, seen, lengths = torch.empty(0, dtype=dtype), torch.tensor([9000]), torch.tensor([1])
    config = small_config(memory_length=3000, compressed_length=3000, compression_rate=2)
    positions = rotary_positions(config, SlotLayout.of(config, 0), seen=seen, lengths=lengths, chunk=1, like=like)
    exact = rotary_positions(config, SlotLayout.of(config, 0), seen=seen, lengths=lengths, chunk=1, like=like.double())
    assert positions.slots.dtype == torch.float32
    assert torch.equal(positions.slots, exact.slots.float())


def test_rotary_lanes_of_one_phase_share_their_angles():
    config = small_config()
    positions = positions_of(config, [14, 14, 18], [2, 2, 2], 2, form=rotary_positions)
    assert positions.queries.shape[0] == 1
    assert positions.slots.shape[0] == 3  # other numbers of states wait
    assert positions_of(config, [38, 50], [2, 2], 2, form=rotary_positions).slots.shape[0] == 1


def test_distances_stay_exact_and_small_however_long_the_stream_is():
    config = small_config(segment_length=4, compression_rate=3)
    near, far = (positions_of(config, [seen], [4], 4) for seen in (36, 36 + 12 * 10**12))
    for one, other in zip(near.grids, far.grids, strict=True):
        assert torch.equal(one.rows, other.rows)
    assert torch.equal(near.mask, far.mask)


def test_waiting_states_move_compressed_slots_further_back_lane_by_lane():
    config = small_config(segment_length=4, memory_length=5, compression_rate=3)
    waiting = SlotLayout.of(config, 0).waiting(torch.tensor([8, 12, 16]))
    assert waiting.tolist() == [0, 1, 2]
    positions = positions_of(config, [8, 12, 16], [1, 1, 1], 1)
    for lane, wait in enumerate(waiting.tolist()):
        newest = rows_seen(positions, lane, 0)[config.compressed_length - 1]
        assert_close(newest, reference.sinusoid(5 + 2 + wait, config.d_model))


def test_lanes_of_one_age_share_one_table_and_one_mask():
    config = small_config()
    positions = positions_of(config, [14, 14, 14], [2, 2, 2], 2)
    assert [grid.lanes for grid in positions.grids] == [None, None]
    assert all(grid.rows.shape[1] == 1 for grid in positions.grids)
    assert positions.mask.shape[0] == 1
    # Ages that fill all slots and share their phase share tables too.
    assert positions_of(config, [38, 50], [2, 2], 2).mask.shape[0] == 1
