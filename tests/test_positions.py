"""Which slots a query may read and at which distance, against counting tokens one by one."""

from __future__ import annotations

import random

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reference
from compressive_transformer.memory import SlotLayout
from compressive_transformer.positions import relative_positions
from small import LAYERED, assert_close, configs, law, small_config


def positions_of(config, seen, lengths, chunk, layer=0):
    """Positions for lanes that have seen `seen` tokens and read `lengths` of a chunk."""
    return relative_positions(
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
