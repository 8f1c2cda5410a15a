"""Losses that train compression functions, besides the task loss itself (Sec. 3.2 and Algorithm 2).

Each compares, in every lane, what was evicted with what replaces it: squared errors beside squared targets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Decoder(nn.Module):
    """The transposed convolution with kernel and stride c, no bias: c states of each compressed one.

    It starts by repeating the compressed state, the inverse of mean pooling that loses least.
    """

    def __init__(self, d_model: int, compression_rate: int) -> None:
        super().__init__()
        self.compression_rate = compression_rate
        self.weight = nn.Parameter(torch.eye(d_model).repeat(compression_rate, 1))  # [rate * d_model, d_model]

    def forward(self, compressed: Tensor) -> Tensor:
        """Decode `[batch, group, d_model]` into `[batch, group, compression_rate, d_model]`."""
        states: Tensor = functional.linear(compressed, self.weight).unflatten(-1, (self.compression_rate, -1))
        return states


def attention_reconstruction(
    queries: Tensor, evicted: tuple[Tensor, Tensor], compressed: tuple[Tensor, Tensor], *, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return squared error and squared target of attention reconstruction (Algorithm 2), `[batch]` each.

    Content-based attention of the segment over what was evicted is compared with attention over what
    replaces it, a head at a time before the output projection: means over all numbers of a lane.

    `queries [batch, head, segment, d_head]` are scaled. Of what was `evicted` and of what is `compressed` come keys
    and values `[batch, head, state, d_head]`, compression_rate times as many of the former; only the latter may
    carry gradient. Of a lane, the newest `counts [batch]` groups are real; a lane without any has 0 and 0.
    """
    groups = compressed[0].shape[2]
    rate, real = evicted[0].shape[2] // groups, _real(counts, groups)
    # Attention needs at least one state: a lane without any looks at its padding, and is weighted with zero.
    readable = real | (counts == 0)[:, None]
    with torch.no_grad():
        target = _content_attention(queries, evicted, readable.repeat_interleave(rate, 1))
    reconstruction = _content_attention(queries, compressed, readable)
    return _weighted_squares(reconstruction, target, (counts > 0).float())


def auto_encoding(
    evicted: Tensor, compressed: Tensor, *, counts: Tensor, decode: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return squared error and squared target of auto-encoding, ‖old − g(f_c(old))‖² (Sec. 3.2), `[batch]` each.

    `evicted [batch, group, compression_rate, d_model]` is free of gradient and compared with what `decode` makes
    of `compressed [batch, group, d_model]`: means over all numbers of a lane's newest `counts [batch]` groups;
    0 and 0 where there are none.
    """
    share = _real(counts, evicted.shape[1]) / counts.clamp(min=1)[:, None]
    error, size = _weighted_squares(decode(compressed), evicted, share)
    return error.sum(1), size.sum(1)


def mean_and_relative(squares: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss to train on and the relative error to report, from squared errors and targets `[batch]`.

    The loss is the mean over lanes; a lane that evicted nothing counts as 0, so that the mean is the same however
    lanes are split. The error, without gradient, is squared error / squared target over all lanes, 0 where nothing
    was evicted.
    """
    relative = squares.detach().sum() / sizes.sum().clamp(min=torch.finfo(sizes.dtype).tiny)
    return squares.mean(), relative


def _real(counts: Tensor, groups: int) -> Tensor:
    """Return True for groups that are not padding `[batch, group]`, on the CPU as `counts` is."""
    return torch.arange(groups) >= groups - counts[:, None]


def _weighted_squares(reconstruction: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight [batch, ...]` times the mean squares of error and target over all other axes."""
    # Half precision would cancel in the difference once f_c is good.
    precise = torch.promote_types(target.dtype, torch.float32)
    target, reconstruction = target.to(precise), reconstruction.to(precise)
    weight = weight.to(target.device, precise)
    pair = (reconstruction - target, target)
    error, size = (weight * values.square().flatten(weight.ndim).mean(-1) for values in pair)
    return error, size


def _content_attention(queries: Tensor, slots: tuple[Tensor, Tensor], readable: Tensor) -> Tensor:
    keys, values = slots
    mask = None if bool(readable.all()) else readable[:, None, None, :].to(queries.device)
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=1.0)
