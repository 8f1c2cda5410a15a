"""The core of relative attention for CPUs: one head and one block of queries at a time, with a backward of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .base import WeightsCallback

BLOCK = 128
"""Queries of a block, at most. Smaller blocks skip more of the future, but take more calls."""


class CpuRelativeAttention(torch.autograd.Function):
    """`relative_attention` one head and one block of queries at a time.

    The scores of a block stay in the cache, slots in the future of all its queries are left out, and the shift
    copies nothing. Probabilities are kept for the backward pass; computing them again would save memory and cost
    about a tenth of the speed of training.
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
        """See `relative_attention`; `grids` are queries and rows of one grid after another."""
        blocks = _blocks(mask, slots, grids)
        mixed = torch.empty_like(content)
        kept = []
        for head, own in enumerate(_heads(content, keys, values, *grids)):
            weights = [_weights(block, own, mask) for block in blocks]
            for block, part in zip(blocks, weights, strict=True):
                mixed[:, block.queries, head] = torch.bmm(part, own[2][:, : block.end])
            if on_weights is not None:
                on_weights(torch.cat([functional.pad(w, (0, keys.shape[1] - w.shape[2])) for w in weights], 1))
            if any(ctx.needs_input_grad):
                kept += weights
        ctx.blocks, ctx.inputs = blocks, 3 + len(grids)
        ctx.save_for_backward(content, keys, values, *grids, *kept)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the same tensors."""
        saved = ctx.saved_tensors  # once: each reading would unpack, and recompute what is checkpointed
        inputs, kept = saved[: ctx.inputs], iter(saved[ctx.inputs :])
        # Heads first, so that the products of one head add to what lies together.
        found = [torch.zeros_like(x.movedim(-2, 0), memory_format=torch.contiguous_format) for x in inputs]
        # What lies outside of the shifted view stays zero from head to head.
        buffers = [[part.buffer(q) for part, q in zip(b.parts, inputs[3::2], strict=True)] for b in ctx.blocks]
        for d_mixed, own, d_own in zip(gradient.unbind(2), _heads(*inputs), zip(*found, strict=True), strict=True):
            for block, shifts in zip(ctx.blocks, buffers, strict=True):
                _add_gradients(block, next(kept), d_mixed[:, block.queries], own, d_own, shifts)
        d_content, d_keys, d_values, *d_grids = (x.movedim(0, -2) for x in found)
        return d_content, d_keys, d_values, None, None, None, *d_grids


class _Part(NamedTuple):
    """What the queries of a block meet of one grid."""

    step: int
    places: slice
    """The block's among the grid's queries."""
    rows: slice
    """Distances that occur in the block, and a few more."""
    slots: slice
    """Of the block's scores, those of this grid."""

    @property
    def width(self) -> int:
        """Slots of this grid that the block meets."""
        width: int = self.slots.stop - self.slots.start
        return width

    def of(self, scores: Tensor) -> Tensor:
        """This grid's `scores [batch, query, slot]`, viewed `[step, batch, a, slot]`."""
        grouped: Tensor = scores[:, :, self.slots].unflatten(1, (-1, self.step))
        return grouped.permute(2, 0, 1, 3)

    def buffer(self, queries: Tensor) -> Tensor:
        """Zeros `[step, batch, a, row]`."""
        sizes = (self.places.stop - self.places.start, self.rows.stop - self.rows.start)
        return queries.new_zeros(*queries.shape[:2], *sizes)


class _Block(NamedTuple):
    """Neighbouring queries, and the slots that any of them may read."""

    queries: slice
    masked: int
    """The first slot that some query may not read."""
    end: int
    """The last slot that some query may read, and one."""
    parts: list[_Part]


def _blocks(mask: Tensor, slots: Sequence[int], grids: Sequence[Tensor]) -> list[_Block]:
    step, blocks = max(len(queries) for queries in grids[::2]), []
    size = max(BLOCK // step, 1) * step
    for first in range(0, mask.shape[1], size):
        last = min(first + size, mask.shape[1])
        own = mask[:, first:last]  # 0 or -inf
        end = int((own.amax((0, 1)) == 0).nonzero()[-1]) + 1
        masked = (own[:, :, :end].amin((0, 1)) != 0).nonzero()
        parts, at = [], 0
        for count, queries, rows in zip(slots, grids[::2], grids[1::2], strict=True):
            met, places = min(count, end - at), slice(first // len(queries), last // len(queries))
            begin = queries.shape[2] - places.stop
            # Distances below zero, where there are none left, are those of the future.
            stop = min(rows.shape[2], begin + met + places.stop - places.start - 1)
            parts.append(_Part(len(queries), places, slice(begin, stop), slice(at, at + met)))
            at += count
        blocks.append(_Block(slice(first, last), int(masked[0]) if len(masked) else end, end, parts))
    return blocks


def _heads(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Of each head its own part of `tensors [..., head, d_head]`."""
    return zip(*(tensor.unbind(-2) for tensor in tensors), strict=True)


def _weights(block: _Block, own: Sequence[Tensor], mask: Tensor) -> Tensor:
    """The attention weights `[batch, query, slot]` of one block and head."""
    content, keys, _, *grids = own
    scores = torch.bmm(content[:, block.queries], keys[:, : block.end].transpose(1, 2))
    for part, queries, rows in zip(block.parts, grids[::2], grids[1::2], strict=True):
        relative = _row_scores(queries[:, :, part.places], rows[:, :, part.rows])
        part.of(scores).add_(shifted(relative, part.width))
    if block.masked < block.end:
        scores[:, :, block.masked :] += mask[:, block.queries, block.masked : block.end]
    return torch.softmax(scores, dim=-1)


def _add_gradients(
    block: _Block,
    weights: Tensor,
    d_mixed: Tensor,
    own: Sequence[Tensor],
    d_own: Sequence[Tensor],
    buffers: Sequence[Tensor],
) -> None:
    """Add to the gradients of one head what one block has."""
    content, keys, values, *grids = own
    d_content, d_keys, d_values, *d_grids = d_own
    d_values[:, : block.end].baddbmm_(weights.transpose(1, 2), d_mixed)
    d_weights = torch.bmm(d_mixed, values[:, : block.end].transpose(1, 2))
    d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
    d_content[:, block.queries] = torch.bmm(d_scores, keys[:, : block.end])
    d_keys[:, : block.end].baddbmm_(d_scores.transpose(1, 2), content[:, block.queries])
    for at, (part, buffer) in enumerate(zip(block.parts, buffers, strict=True)):
        shifted(buffer, part.width).copy_(part.of(d_scores))
        queries, rows = grids[2 * at][:, :, part.places], grids[2 * at + 1][:, :, part.rows]
        d_queries, d_rows = _row_gradients(buffer, queries, rows)
        d_grids[2 * at][:, :, part.places] = d_queries
        d_grids[2 * at + 1][:, :, part.rows] += d_rows


def _row_scores(queries: Tensor, rows: Tensor) -> Tensor:
    """`[step, batch, a, d_head]` times `[step, 1 or batch, row, d_head]` -> `[step, batch, a, row]`."""
    if rows.shape[1] > 1 or len(rows) == 1:
        return torch.matmul(queries, rows.transpose(2, 3))
    # `matmul` would copy the rows for each lane.
    scores = torch.bmm(queries.flatten(1, 2), rows[:, 0].transpose(1, 2))
    outer: Tensor = scores.unflatten(1, queries.shape[1:3])
    return outer


def _row_gradients(gradient: Tensor, queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `_row_scores` for its queries and its rows."""
    if rows.shape[1] > 1:
        return torch.matmul(gradient, rows), torch.matmul(gradient.transpose(2, 3), queries)
    flat = gradient.flatten(1, 2)  # [step, batch * a, row]
    d_queries = torch.bmm(flat, rows[:, 0]).unflatten(1, queries.shape[1:3])
    d_rows = torch.bmm(flat.transpose(1, 2), queries.flatten(1, 2))
    return d_queries, d_rows[:, None]


def shifted(scores: Tensor, slots: int) -> Tensor:
    """The relative shift without a copy: entry (a, s) of the view is (a, queries - 1 - a + s) of `scores`.

    `scores [..., a, row]` is contiguous. Rows of the view are one entry less than a row of `scores` apart;
    they never overlap, since there are more rows of distances than slots or only one query.
    """
    *outer, queries, width = scores.shape
    strides = (*scores.stride()[:-2], width - 1, 1)
    return scores.as_strided((*outer, queries, slots), strides, scores.storage_offset() + queries - 1)
