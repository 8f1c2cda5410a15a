"""Relative multi-head attention over [compressed | recent | segment], the exact score of Transformer-XL.

    score(i, j) = ((q_i + u) · k_j + (q_i + v) · W_r R(i - j)) / sqrt(d_head)      (Dai et al. 2019, Sec. 3.3)

One function, `relative_attention`, has two forms of the same score; `docs/attention.md` has the figures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..config import ModelConfig
from ..positions import Grid, RelativePositions
from .base import Attention, Observer, tell_weights


class RelativeAttention(Attention):
    """Multi-head attention whose scores depend on content and on distance, never on absolute place."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config)
        self.position = nn.Linear(config.d_model, config.d_model, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(self.n_heads, self.d_head))
        self.position_bias = nn.Parameter(torch.zeros(self.n_heads, self.d_head))
        # "unit" as the paper's authors have it: compressed slots get a projection and a bias of their own.
        compressed_length = config.of_layer(layer).compressed_length
        self.own_compressed_position = config.compressed_position == "unit" and compressed_length > 0
        if self.own_compressed_position:
            self.compressed_position = nn.Linear(config.d_model, config.d_model, bias=False)
            self.compressed_position_bias = nn.Parameter(torch.zeros(self.n_heads, self.d_head))

    def forward(
        self, states: Tensor, slots: Tensor, positions: RelativePositions, observe: Observer | None = None
    ) -> Tensor:
        """Attention of `states [batch, query, d_model]` over `slots [batch, slot, d_model]`: as states.

        `slots` holds [compressed | recent | segment], the segment's own states included. `observe` is told the
        weights; queries beyond those of `states` are padding.
        """
        chunk = states.shape[1]
        states = functional.pad(states, (0, 0, 0, positions.queries - chunk))
        keys, values = self.keys_values(slots)
        queries = self._heads(self.query(states))
        content = self._scaled(queries + self.content_bias, keys)
        grids = [
            self._relative(queries, grid, compressed=len(positions.grids) - at == 2)
            for at, grid in enumerate(positions.grids)
        ]
        mixed = relative_attention(content, keys, values, positions.mask.to(keys.dtype), grids, observe)
        mixed_output: Tensor = self.output(mixed[:, :chunk].flatten(2))
        return mixed_output

    def _relative(self, queries: Tensor, grid: Grid, *, compressed: bool) -> tuple[Tensor, Tensor, int]:
        """Queries `[step, batch, a, head, d_head]`, rows `[step, 1 or batch, row, head, d_head]`, slots."""
        own = compressed and self.own_compressed_position
        projection = self.compressed_position if own else self.position
        bias = self.compressed_position_bias if own else self.position_bias
        rows = self._heads(projection(grid.rows))
        if grid.lanes is not None:
            rows = rows[:, grid.lanes.to(rows.device)]
        shifted = self._scaled(queries + bias, rows)
        step = rows.shape[0]
        grouped = shifted.unflatten(1, (-1, step)).permute(2, 0, 1, 3, 4)  # i = step * a + b -> [b, batch, a, ...]
        return grouped.contiguous(), rows, grid.slots


def relative_attention(
    content: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    grids: list[tuple[Tensor, Tensor, int]],
    observe: Observer | None = None,
) -> Tensor:
    """softmax(content · keys + relative scores + mask) · values: `[batch, query, head, d_head]`.

    On a CPU a function with a backward of its own, one head at a time: the fastest there in training and with long
    memories, and about as fast elsewhere. On other devices the relative scores become the additive mask of PyTorch's
    fused attention, which is slow on a CPU because that mask needs a gradient. `observe` is told each head's weights.
    """
    if content.device.type == "cpu":
        flat = [part for queries, rows, _ in grids for part in (queries, rows)]
        slots = [count for *_, count in grids]
        mixed: Tensor = HeadwiseAttention.apply(content, keys, values, mask, slots, observe, *flat)  # type: ignore[no-untyped-call]
        return mixed
    return masked_attention(content, keys, values, mask, grids, observe)


def masked_attention(
    content: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    grids: list[tuple[Tensor, Tensor, int]],
    observe: Observer | None = None,
) -> Tensor:
    """`relative_attention` by way of `scaled_dot_product_attention`, for devices with fused kernels."""
    blocks = []
    for queries, rows, slots in grids:
        rows = rows.expand(-1, queries.shape[1], -1, -1, -1)
        scores = torch.einsum("gbahd,gbmhd->hgbam", queries, rows).contiguous()
        view = _shift(scores, slots)  # [head, step, batch, a, slot]
        blocks.append(view.permute(2, 0, 3, 1, 4).flatten(2, 3))
    bias = torch.cat(blocks, dim=-1) + mask[:, None]
    content, keys, values = (states.transpose(1, 2) for states in (content, keys, values))
    if observe is not None:
        tell_weights(observe, content, keys, bias)
    mixed = functional.scaled_dot_product_attention(content, keys, values, attn_mask=bias, scale=1.0)
    return mixed.transpose(1, 2)


class HeadwiseAttention(torch.autograd.Function):
    """`relative_attention` one head at a time: one head's scores stay in the cache, the shift copies nothing.

    Probabilities are kept for the backward pass; computing them again would save memory and cost about a
    tenth of the speed of training.
    """

    @staticmethod
    def forward(
        ctx: Any,
        content: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        slots: list[int],
        observe: Observer | None,
        *grids: Tensor,
    ) -> Tensor:
        """See `relative_attention`; `grids` are queries and rows of one grid after another."""
        mixed = torch.empty_like(content)
        kept = []
        for head in range(content.shape[2]):
            scores = torch.baddbmm(mask, content[:, :, head], keys[:, :, head].transpose(1, 2))
            for block, queries, rows, count in _regions(scores, slots, grids):
                relative = _row_scores(queries[:, :, :, head], rows[:, :, :, head])
                block += _shift(relative, count)
            weights = torch.softmax(scores, dim=-1)
            mixed[:, :, head] = torch.bmm(weights, values[:, :, head])
            if observe is not None:
                observe(weights)
            if any(ctx.needs_input_grad):
                kept.append(weights)
        ctx.slots = slots
        ctx.save_for_backward(content, keys, values, *grids, *kept)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the same tensors."""
        n_heads = gradient.shape[2]
        content, keys, values, *rest = ctx.saved_tensors
        grids, kept = rest[:-n_heads], rest[-n_heads:]
        d_content, d_keys, d_values = (torch.empty_like(states) for states in (content, keys, values))
        d_grids = [torch.empty_like(part) for part in grids]
        # What lies outside of the shifted view stays zero from head to head.
        buffers = [q.new_zeros(*q.shape[:3], rows.shape[2]) for q, rows in zip(grids[::2], grids[1::2], strict=True)]
        for head in range(n_heads):
            weights, d_mixed = kept[head], gradient[:, :, head]
            d_values[:, :, head] = torch.bmm(weights.transpose(1, 2), d_mixed)
            d_weights = torch.bmm(d_mixed, values[:, :, head].transpose(1, 2))
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            d_content[:, :, head] = torch.bmm(d_scores, keys[:, :, head])
            d_keys[:, :, head] = torch.bmm(d_scores.transpose(1, 2), content[:, :, head])
            for at, (block, queries, rows, count) in enumerate(_regions(d_scores, ctx.slots, grids)):
                _shift(buffers[at], count).copy_(block)
                d_queries, d_rows = _row_gradients(buffers[at], queries[:, :, :, head], rows[:, :, :, head])
                d_grids[2 * at][:, :, :, head] = d_queries
                d_grids[2 * at + 1][:, :, :, head] = d_rows
        return d_content, d_keys, d_values, None, None, None, *d_grids


def _regions(
    scores: Tensor, slots: list[int], grids: tuple[Tensor, ...] | list[Tensor]
) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """For each grid: its `scores [batch, query, slot]`, viewed `[step, batch, a, slot]`, and its tensors."""
    blocks = scores.split(slots, dim=-1)
    pairs = zip(blocks, grids[::2], grids[1::2], slots, strict=True)
    return [
        (block.unflatten(1, (-1, queries.shape[0])).permute(2, 0, 1, 3), queries, rows, count)
        for block, queries, rows, count in pairs
    ]


def _row_scores(queries: Tensor, rows: Tensor) -> Tensor:
    """`[step, batch, a, d_head]` times `[step, 1 or batch, row, d_head]` -> `[step, batch, a, row]`."""
    if rows.shape[1] > 1:
        return torch.matmul(queries, rows.transpose(2, 3))
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


def _shift(scores: Tensor, slots: int) -> Tensor:
    """The relative shift without a copy: entry (a, s) of the view is (a, queries - 1 - a + s) of `scores`.

    `scores [..., a, row]` is contiguous. Rows of the view are one entry less than a row of `scores` apart;
    they never overlap, since there are more rows of distances than slots or only one query.
    """
    *outer, queries, width = scores.shape
    strides = (*scores.stride()[:-2], width - 1, 1)
    return scores.as_strided((*outer, queries, slots), strides, scores.storage_offset() + queries - 1)
