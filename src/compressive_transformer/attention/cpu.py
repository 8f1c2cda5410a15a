"""The core of relative attention for CPUs, with a backward pass of its own.

You may skip this file: it gives the numbers of `relative.masked_attention`, 1.3 to 2.0 times as fast in training on a
CPU (docs/attention.md has the figures). It takes one head and one block of queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .base import WeightsCallback

BLOCK = 128
"""Queries of a block, at most. Smaller blocks skip more of the future, but take more calls."""


class CpuRelativeAttention(torch.autograd.Function):
    """`relative_attention`, one head and one block of queries at a time.

    The scores of a block stay in the processor's cache, slots in the future of all its queries are left out, and the
    shift copies nothing. Weights are kept for the backward pass; computing them again would save memory and cost about
    a tenth of the speed of training.
    """

    @staticmethod
    def forward(
        ctx: Any,
        content: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        slots: list[int],
        on_weights: WeightsCallback | None,
        *grids: Tensor,
    ) -> Tensor:
        """See `relative_attention`; `grids` are queries and rows of one grid after another, `slots` their slots."""
        blocks = _blocks(mask, slots, [_Grid(*pair) for pair in zip(grids[::2], grids[1::2], strict=True)])
        mixed = torch.empty_like(content)
        saved = []
        for number, head in enumerate(_heads([content, keys, values, *grids], dim=-2)):
            weights = [_weights(block, head, mask) for block in blocks]
            for block, block_weights in zip(blocks, weights, strict=True):
                mixed[:, block.queries, number] = torch.bmm(block_weights, head.values[:, : block.end])
            if on_weights is not None:
                on_weights(torch.cat([functional.pad(w, (0, keys.shape[1] - w.shape[2])) for w in weights], 1))
            if any(ctx.needs_input_grad):
                saved += weights
        ctx.blocks, ctx.inputs = blocks, 3 + len(grids)
        ctx.save_for_backward(content, keys, values, *grids, *saved)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of content, keys, values and grids."""
        saved = ctx.saved_tensors  # once: each access would unpack, and recompute what is checkpointed
        inputs, weights = saved[: ctx.inputs], iter(saved[ctx.inputs :])
        # Heads first, so that the products of one head add to memory that lies together.
        gradients = [torch.zeros_like(x.movedim(-2, 0), memory_format=torch.contiguous_format) for x in inputs]
        # Outside of the shifted view these stay zero from head to head.
        buffers = [[slice_.buffer(q) for slice_, q in zip(b.slices, inputs[3::2], strict=True)] for b in ctx.blocks]
        heads = zip(gradient.unbind(2), _heads(inputs, dim=-2), _heads(gradients, dim=0), strict=True)
        for d_mixed, head, d_head in heads:
            for block, shifts in zip(ctx.blocks, buffers, strict=True):
                _add_gradients(block, next(weights), d_mixed[:, block.queries], head, d_head, shifts)
        d_content, d_keys, d_values, *d_grids = (x.movedim(0, -2) for x in gradients)
        return d_content, d_keys, d_values, None, None, None, *d_grids


class _Grid(NamedTuple):
    """Queries and projected distances of one region of slots."""

    queries: Tensor
    """`[step, batch, a, d_head]`, scaled, with the position bias."""
    rows: Tensor
    """`[step, 1 or batch, row, d_head]`."""


class _Head(NamedTuple):
    """Tensors of one head, or their gradients."""

    content: Tensor
    """`[batch, query, d_head]`."""
    keys: Tensor
    """`[batch, slot, d_head]`."""
    values: Tensor
    """`[batch, slot, d_head]`."""
    grids: tuple[_Grid, ...]


class _GridSlice(NamedTuple):
    """The part of one grid that the queries of a block meet."""

    step: int
    places: slice
    """The block's queries among the grid's."""
    rows: slice
    """Distances that occur in the block, and a few more."""
    slots: slice
    """Columns of the block's scores that belong to this grid."""

    @property
    def width(self) -> int:
        """Slots of this grid that the block meets."""
        width: int = self.slots.stop - self.slots.start
        return width

    def view(self, scores: Tensor) -> Tensor:
        """Return this grid's part of `scores [batch, query, slot]`, as a view `[step, batch, a, slot]`."""
        grouped: Tensor = scores[:, :, self.slots].unflatten(1, (-1, self.step))
        return grouped.permute(2, 0, 1, 3)

    def buffer(self, queries: Tensor) -> Tensor:
        """Return zeros `[step, batch, a, row]`."""
        sizes = (self.places.stop - self.places.start, self.rows.stop - self.rows.start)
        return queries.new_zeros(*queries.shape[:2], *sizes)


class _QueryBlock(NamedTuple):
    """Neighboring queries, and the slots that any of them may read."""

    queries: slice
    masked: int
    """First slot that some query may not read."""
    end: int
    """Number of slots up to the last one that some query may read."""
    slices: list[_GridSlice]


def _blocks(mask: Tensor, slots: Sequence[int], grids: Sequence[_Grid]) -> list[_QueryBlock]:
    step, blocks = max(len(grid.queries) for grid in grids), []
    size = max(BLOCK // step, 1) * step
    for first in range(0, mask.shape[1], size):
        last = min(first + size, mask.shape[1])
        readable = mask[:, first:last]  # 0 or -inf
        end = int((readable.amax((0, 1)) == 0).nonzero()[-1]) + 1
        masked = (readable[:, :, :end].amin((0, 1)) != 0).nonzero()
        slices, start = [], 0
        for count, (queries, rows) in zip(slots, grids, strict=True):
            met, places = min(count, end - start), slice(first // len(queries), last // len(queries))
            begin = queries.shape[2] - places.stop
            # Distances below zero, where there are none left, are those of the future.
            stop = min(rows.shape[2], begin + met + places.stop - places.start - 1)
            slices.append(_GridSlice(len(queries), places, slice(begin, stop), slice(start, start + met)))
            start += count
        blocks.append(_QueryBlock(slice(first, last), int(masked[0]) if len(masked) else end, end, slices))
    return blocks


def _heads(tensors: Sequence[Tensor], dim: int) -> Iterator[_Head]:
    """Yield each head's views of content, keys, values and grids; heads are axis `dim`."""
    for content, keys, values, *flat in zip(*(tensor.unbind(dim) for tensor in tensors), strict=True):
        yield _Head(content, keys, values, tuple(map(_Grid, flat[::2], flat[1::2])))


def _weights(block: _QueryBlock, head: _Head, mask: Tensor) -> Tensor:
    """Return the attention weights `[batch, query, slot]` of one block and head."""
    scores = torch.bmm(head.content[:, block.queries], head.keys[:, : block.end].transpose(1, 2))
    for part, (queries, rows) in zip(block.slices, head.grids, strict=True):
        relative = _row_scores(queries[:, :, part.places], rows[:, :, part.rows])
        part.view(scores).add_(shifted(relative, part.width))
    if block.masked < block.end:
        scores[:, :, block.masked :] += mask[:, block.queries, block.masked : block.end]
    return torch.softmax(scores, dim=-1)


def _add_gradients(
    block: _QueryBlock, weights: Tensor, d_mixed: Tensor, head: _Head, d_head: _Head, buffers: Sequence[Tensor]
) -> None:
    """Add the gradients of one block to those of one head."""
    d_head.values[:, : block.end].baddbmm_(weights.transpose(1, 2), d_mixed)
    d_weights = torch.bmm(d_mixed, head.values[:, : block.end].transpose(1, 2))
    d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
    d_head.content[:, block.queries] = torch.bmm(d_scores, head.keys[:, : block.end])
    d_head.keys[:, : block.end].baddbmm_(d_scores.transpose(1, 2), head.content[:, block.queries])
    for part, buffer, grid, d_grid in zip(block.slices, buffers, head.grids, d_head.grids, strict=True):
        shifted(buffer, part.width).copy_(part.view(d_scores))
        queries, rows = grid.queries[:, :, part.places], grid.rows[:, :, part.rows]
        d_queries, d_rows = _row_gradients(buffer, queries, rows)
        d_grid.queries[:, :, part.places] = d_queries
        d_grid.rows[:, :, part.rows] += d_rows


def _row_scores(queries: Tensor, rows: Tensor) -> Tensor:
    """Return `[step, batch, a, d_head]` times `[step, 1 or batch, row, d_head]`, `[step, batch, a, row]`."""
    if rows.shape[1] > 1 or len(rows) == 1:
        return torch.matmul(queries, rows.transpose(2, 3))
    # `matmul` would copy the rows for each lane.
    scores = torch.bmm(queries.flatten(1, 2), rows[:, 0].transpose(1, 2))
    outer: Tensor = scores.unflatten(1, queries.shape[1:3])
    return outer


def _row_gradients(gradient: Tensor, queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `_row_scores` for its queries and its rows."""
    if rows.shape[1] > 1:
        return torch.matmul(gradient, rows), torch.matmul(gradient.transpose(2, 3), queries)
    flat = gradient.flatten(1, 2)  # [step, batch * a, row]
    d_queries = torch.bmm(flat, rows[:, 0]).unflatten(1, queries.shape[1:3])
    d_rows = torch.bmm(flat.transpose(1, 2), queries.flatten(1, 2))
    return d_queries, d_rows[:, None]


def shifted(scores: Tensor, slots: int) -> Tensor:
    """Shift rows without a copy: entry (a, s) of the view is (a, queries - 1 - a + s) of `scores`.

    `scores [..., a, row]` is contiguous. Rows of the view are one entry less than a row of `scores` apart;
    they never overlap, since there are more rows of distances than slots or only one query.
    """
    *outer, queries, width = scores.shape
    strides = (*scores.stride()[:-2], width - 1, 1)
    return scores.as_strided((*outer, queries, slots), strides, scores.storage_offset() + queries - 1)
