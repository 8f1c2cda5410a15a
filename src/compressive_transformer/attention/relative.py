"""Relative multi-head attention over [compressed | recent | segment], the exact score of Transformer-XL.

    score(i, j) = ((q_i + u) · k_j + (q_i + v) · W_r R(i - j)) / sqrt(d_head)      (Dai et al. 2019, Sec. 3.3)

One function, `relative_attention`, has two forms of the same score; `docs/attention.md` has the figures.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import ModelConfig
from .base import Attention, Projected, WeightsCallback, report_weights
from .cpu import CpuRelativeAttention
from .positions import Grid, RelativePositions


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
        self, projected: Projected, positions: RelativePositions, on_weights: WeightsCallback | None = None
    ) -> Tensor:
        """Attention `[batch, query, d_model]` of projected queries over slots.

        Slots are [compressed | recent | segment], the segment's own states included. `observe` is told the
        weights; queries beyond those that are given are padding.
        """
        chunk = projected.queries.shape[1]
        keys, values = self._split(projected.keys_values)
        queries = self._heads(functional.pad(projected.queries, (0, 0, 0, positions.queries - chunk)))
        content = self._scaled(queries + self.content_bias, keys)
        grids = [
            self._relative(queries, grid, positions, compressed=len(positions.grids) - at == 2)
            for at, grid in enumerate(positions.grids)
        ]
        mixed = relative_attention(content, keys, values, positions.mask.to(keys.dtype), grids, on_weights)
        mixed_output: Tensor = self.output(mixed[:, :chunk].flatten(2))
        return mixed_output

    def _relative(
        self, queries: Tensor, grid: Grid, positions: RelativePositions, *, compressed: bool
    ) -> tuple[Tensor, Tensor, int]:
        """Queries `[step, batch, a, head, d_head]`, rows `[step, 1 or batch, row, head, d_head]`, slots."""
        own = compressed and self.own_compressed_position
        projection = self.compressed_position if own else self.position
        bias = self.compressed_position_bias if own else self.position_bias
        rows = self._heads(positions.projected(projection, grid))
        if grid.lanes is not None:
            rows = rows[:, grid.lanes.to(rows.device)]
        biased = self._scaled(queries + bias, rows)
        step = rows.shape[0]
        grouped = biased.unflatten(1, (-1, step)).permute(2, 0, 1, 3, 4)  # i = step * a + b -> [b, batch, a, ...]
        return grouped.contiguous(), rows, grid.slots


def relative_attention(
    content: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    grids: list[tuple[Tensor, Tensor, int]],
    on_weights: WeightsCallback | None = None,
) -> Tensor:
    """softmax(content · keys + relative scores + mask) · values: `[batch, query, head, d_head]`.

    On a CPU a function with a backward of its own, which takes one head and one block of queries at a time: the
    fastest there in training and with long memories. On other devices the relative scores become the additive mask
    of PyTorch's fused attention, which is slow on a CPU because that mask needs a gradient. `observe` is told each
    head's weights.
    """
    if content.device.type == "cpu":
        flat = [part for queries, rows, _ in grids for part in (queries, rows)]
        slots = [count for *_, count in grids]
        mixed: Tensor = CpuRelativeAttention.apply(content, keys, values, mask, slots, on_weights, *flat)  # type: ignore[no-untyped-call]
        return mixed
    return masked_attention(content, keys, values, mask, grids, on_weights)


def masked_attention(
    content: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    grids: list[tuple[Tensor, Tensor, int]],
    on_weights: WeightsCallback | None = None,
) -> Tensor:
    """`relative_attention` by way of `scaled_dot_product_attention`, for devices with fused kernels."""
    blocks = []
    for queries, rows, slots in grids:
        rows = rows.expand(-1, queries.shape[1], -1, -1, -1)
        scores = torch.einsum("gbahd,gbmhd->hgbam", queries, rows).contiguous()
        view = _shifted(scores, slots)  # [head, step, batch, a, slot]
        blocks.append(view.permute(2, 0, 3, 1, 4).flatten(2, 3))
    bias = torch.cat(blocks, dim=-1) + mask[:, None]
    content, keys, values = (states.transpose(1, 2) for states in (content, keys, values))
    if on_weights is not None:
        report_weights(on_weights, content, keys, bias)
    mixed = functional.scaled_dot_product_attention(content, keys, values, attn_mask=bias, scale=1.0)
    return mixed.transpose(1, 2)


def _shifted(scores: Tensor, slots: int) -> Tensor:
    """What `headwise.shifted` gives, by slices and reshapes alone, which torch.compile can follow."""
    queries, width = scores.shape[-2:]
    if queries == 1:  # then there may be no more rows than slots
        return scores[..., :slots]
    begin = queries - 1
    rows = scores.flatten(-2)[..., begin : begin + queries * (width - 1)]
    view: Tensor = rows.unflatten(-1, (queries, width - 1))[..., :slots]
    return view
