"""Rotary multi-head attention over [compressed | recent | segment] (RoFormer, Su et al. 2021).

    score(i, j) = (R(i) q_i) · (R(j) k_j) / sqrt(d_head) = q_i · R(j - i) k_j / sqrt(d_head)

R(p) turns each pair of numbers of a head by the angle p · w, one frequency w a pair, so that a score depends on
content and distance. It has no parameters. Values are not rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .base import Attention, Projected, WeightsCallback, report_weights
from .positions import RotaryPositions


class RotaryAttention(Attention):
    """Multi-head attention whose queries and keys are rotated by the angles of their places."""

    def forward(
        self, projected: Projected, positions: RotaryPositions, on_weights: WeightsCallback | None = None
    ) -> Tensor:
        """Return the attention `[batch, query, d_model]` of projected queries over [compressed | recent | segment].

        `on_weights` is called with each head's weights.
        """
        keys, values = self._split(projected.keys_values)
        keys = rotated(keys, positions.slots)
        queries = self._scaled(rotated(self._heads(projected.queries), positions.queries), keys)
        queries, keys, values = (heads.transpose(1, 2) for heads in (queries, keys, values))
        mask = positions.mask[:, None].to(values.dtype)
        if on_weights is not None:
            report_weights(on_weights, queries, keys, mask)
        # Nothing in the mask wants a gradient, so PyTorch's fast kernels take it, on a CPU too.
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=1.0)
        mixed_output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return mixed_output


def rotated(states: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of numbers of `states [batch, place, head, d_head]` by its angle; the dtype stays.

    `angles [1 or batch, place, d_head]` holds all sines, then all cosines. Number k of a head and number
    k + d_head / 2 are a pair; RoFormer pairs neighbours, which names the rows of the projections otherwise.
    """
    # Rounded angles would move a state: in single precision at least.
    first, second = states.to(torch.promote_types(states.dtype, angles.dtype)).chunk(2, dim=-1)
    sines, cosines = angles.unsqueeze(2).chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)
    return turned.to(states.dtype)
