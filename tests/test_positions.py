"""Which slots a query may read and at which distance, against counting tokens one by one."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small import assert_close, configs, law, small_config

from compressive_transformer.memory import SlotLayout
from compressive_transformer.positions import relative_positions


def shown(grid, lane, query):
    """The sinusoid of each slot of a grid as a query of a lane sees it: row (queries - 1 - a) + s of rows[b]."""
    step, _, rows, width = grid.rows.shape
    place, offset = divmod(query, step)
    table = grid.rows[offset, 0 if grid.lanes is None else int(grid.lanes[lane])]
    last = (QUERIES // step) - 1
    # The view runs on into the next row of scores where a row ends; only masked slots are seen there.
    padded = torch.cat([table, torch.full((rows, width), torch.nan)])
    return padded[last - place : last - place + grid.slots]


QUERIES = 0  # set by `positions_of`, since Grid does not know it


def positions_of(config, seen, lengths, chunk):
    global QUERIES
    like = torch.empty(0, dtype=torch.float64)
    positions = relative_positions(
        config, seen=torch.tensor(seen), lengths=torch.tensor(lengths), chunk=chunk, like=like
    )
    QUERIES = positions.queries
    return positions
