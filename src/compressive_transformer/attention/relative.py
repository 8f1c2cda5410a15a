"""Relative multi-head attention over [compressed | recent | segment], the exact score of Transformer-XL.

    score(i, j) = ((q_i + u) · k_j + (q_i + v) · W_r R(i - j)) / sqrt(d_head)      (Dai et al. 2019, Sec. 3.3)

`plain_scores` is that equation in loops. `relative_attention` computes it fast, in one of two forms that the device
decides; `docs/attention.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import ModelConfig
from ..errors import CompressiveError
from .base import Attention, Projected, WeightsCallback, report_weights
from .cpu import CpuRelativeAttention
from .positions import Grid, RelativePositions, sinusoids


class RelativeAttention(Attention):
    """Multi-head attention whose scores depend on content and on distance, never on absolute place."""

    def __init__(self, config: ModelConfig, layer: int, kernel: str = "auto") -> None:
        super().__init__(config)
        if kernel not in KERNELS:
            raise CompressiveError(f"attention ({kernel!r}) must be {' or '.join(map(repr, KERNELS))}")
        self.kernel = KERNELS[kernel]
        self.position = nn.Linear(config.d_model, config.d_model, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(self.n_heads, self.d_head))
        self.position_bias = nn.Parameter(torch.zeros(self.n_heads, self.d_head))
        # As in the authors' code for "unit": another projection and another bias for compressed slots.
        compressed_length = config.of_layer(layer).compressed_length
        self.separate_compressed_position = config.compressed_position == "unit" and compressed_length > 0
        if self.separate_compressed_position:
            self.compressed_position = nn.Linear(config.d_model, config.d_model, bias=False)
            self.compressed_position_bias = nn.Parameter(torch.zeros(self.n_heads, self.d_head))

    def forward(
        self, projected: Projected, positions: RelativePositions, on_weights: WeightsCallback | None = None
    ) -> Tensor:
        """Return the attention `[batch, query, d_model]` of projected queries over [compressed | recent | segment].

        `on_weights` is called with each head's weights, in which queries beyond those of `projected` are padding.
        """
        chunk = projected.queries.shape[1]
        keys, values = self._split(projected.keys_values)
        queries = self._heads(functional.pad(projected.queries, (0, 0, 0, positions.queries - chunk)))
        content = self._scaled(queries + self.content_bias, keys)
        grids = [
            self._relative(queries, grid, positions, compressed=len(positions.grids) - at == 2)
            for at, grid in enumerate(positions.grids)
        ]
        mixed = self.kernel(content, keys, values, positions.mask.to(keys.dtype), grids, on_weights)
        mixed_output: Tensor = self.output(mixed[:, :chunk].flatten(2))
        return mixed_output

    def position_parameters(self, *, compressed: bool) -> tuple[nn.Linear, Tensor]:
        """Return W_r and the bias v `[head, d_head]` for compressed slots, or for recent slots and the segment."""
        if compressed and self.separate_compressed_position:
            return self.compressed_position, self.compressed_position_bias
        return self.position, self.position_bias

    def _relative(
        self, queries: Tensor, grid: Grid, positions: RelativePositions, *, compressed: bool
    ) -> tuple[Tensor, Tensor, int]:
        """Return queries `[step, batch, a, head, d_head]`, rows `[step, 1 or batch, row, head, d_head]`, slots."""
        projection, bias = self.position_parameters(compressed=compressed)
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
    """Return softmax(content · keys + relative scores + mask) · values, `[batch, query, head, d_head]`.

    On a CPU it is `CpuRelativeAttention`, the fastest there in training and with long memories. On other devices it is
    `masked_attention`, which is slow on a CPU because its mask needs a gradient.

    Args:
        content: Queries with the content bias u, scaled, `[batch, query, head, d_head]`.
        keys: `[batch, slot, head, d_head]`.
        values: `[batch, slot, head, d_head]`.
        mask: 0 or -inf, `[1 or batch, query, slot]`.
        grids: For each region of slots, oldest first: queries with the position bias v, scaled, `[step, batch, a,
            head, d_head]`, projected distances `[step, 1 or batch, row, head, d_head]`, and the number of slots.
        on_weights: Called with each head's weights `[batch, query, slot]`.
    """
    kernel = cpu_attention if content.device.type == "cpu" else masked_attention
    return kernel(content, keys, values, mask, grids, on_weights)


def cpu_attention(
    content: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    grids: list[tuple[Tensor, Tensor, int]],
    on_weights: WeightsCallback | None = None,
) -> Tensor:
    """Return `relative_attention` by `CpuRelativeAttention`."""
    flat = [part for queries, rows, _ in grids for part in (queries, rows)]
    slots = [count for *_, count in grids]
    mixed: Tensor = CpuRelativeAttention.apply(content, keys, values, mask, slots, on_weights, *flat)  # type: ignore[no-untyped-call]
    return mixed


def masked_attention(
    content: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    grids: list[tuple[Tensor, Tensor, int]],
    on_weights: WeightsCallback | None = None,
) -> Tensor:
    """Return `relative_attention` by way of `scaled_dot_product_attention`, for devices with fused kernels."""
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


KERNELS: dict[str, Callable[..., Tensor]] = {
    "auto": relative_attention,
    "cpu": cpu_attention,
    "sdpa": masked_attention,
}
"""Forms of relative attention by name; all give the same numbers up to rounding."""


def plain_scores(
    queries: Tensor, keys: Tensor, distances: Tensor, content_bias: Tensor, position_bias: Tensor, projection: Tensor
) -> Tensor:
    """Return the scores `[query, slot]` of one head by the equation above, in loops, for tests to compare.

    `queries [query, d_head]` and `keys [slot, d_head]` are those of one lane, `distances [query, slot]` are in tokens,
    `projection [d_head, d_model]` holds the head's rows of W_r. Distances below 0 lie in the future: -inf.
    """
    scores = torch.full(distances.shape, float("-inf"), dtype=keys.dtype)
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            if distances[i, j] >= 0:
                distance = projection @ sinusoids(projection.shape[1], float(distances[i, j]), 1, keys.dtype)[0]
                scores[i, j] = ((query + content_bias) @ key + (query + position_bias) @ distance) / len(query) ** 0.5
    return scores


def _shifted(scores: Tensor, slots: int) -> Tensor:
    """Return what `cpu.shifted` returns, by slices and reshapes alone, which torch.compile can follow."""
    queries, width = scores.shape[-2:]
    if queries == 1:  # then there may be no more rows than slots
        return scores[..., :slots]
    begin = queries - 1
    rows = scores.flatten(-2)[..., begin : begin + queries * (width - 1)]
    view: Tensor = rows.unflatten(-1, (queries, width - 1))[..., :slots]
    return view
