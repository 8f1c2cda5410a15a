"""Compression functions f_c (Sec. 3.2) and the losses that train them.

A compression function is a small class in the table `COMPRESSIONS`. Add one of your own without touching the
package: subclass `Compression`, register the class under a name, and name it in the config.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import CompressiveError


class Compression(nn.Module):
    """Base class of f_c: replaces each group of `compression_rate` hidden states by one."""

    def __init__(self, d_model: int, compression_rate: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.compression_rate = compression_rate

    def forward(self, evicted: Tensor) -> Tensor:
        """`[batch, group, compression_rate, d_model]` -> `[batch, group, d_model]`."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(evicted)")


class MeanPool(Compression):
    """The mean of each group (Sec. 3.2, mean pooling)."""

    def forward(self, evicted: Tensor) -> Tensor:
        """`[batch, group, compression_rate, d_model]` -> `[batch, group, d_model]`."""
        return evicted.mean(dim=2)


class MaxPool(Compression):
    """The largest value of each group, number by number (Sec. 3.2, max pooling)."""

    def forward(self, evicted: Tensor) -> Tensor:
        """`[batch, group, compression_rate, d_model]` -> `[batch, group, d_model]`."""
        return evicted.amax(dim=2)


class Convolution(Compression):
    """A 1D convolution with kernel and stride c, no bias, no activation (Sec. 3.2); the paper's best.

    It starts as mean pooling (identity / c), a useful memory from the first step on; from random weights it
    learns slowly. Kernel and stride are equal, so it is one linear map of the joined states of a group.
    """

    def __init__(self, d_model: int, compression_rate: int) -> None:
        super().__init__(d_model, compression_rate)
        mean = torch.eye(d_model).repeat(1, compression_rate) / compression_rate
        self.weight = nn.Parameter(mean)  # [d_model, compression_rate * d_model]

    def forward(self, evicted: Tensor) -> Tensor:
        """`[batch, group, compression_rate, d_model]` -> `[batch, group, d_model]`."""
        return functional.linear(evicted.flatten(2), self.weight)


COMPRESSIONS: dict[str, type[Compression]] = {"mean": MeanPool, "max": MaxPool, "conv": Convolution}


def build_compression(name: str, d_model: int, compression_rate: int) -> Compression:
    """The compression function registered as `name`. Raises CompressiveError where there is none."""
    if name not in COMPRESSIONS:
        raise CompressiveError(
            f"compression ({name!r}) is not a registered compression function; "
            f"known: {', '.join(COMPRESSIONS)}. "
            f'Register your own with COMPRESSIONS["{name}"] = YourClass before the model is built'
        )
    return COMPRESSIONS[name](d_model, compression_rate)


def attention_reconstruction(
    queries: Tensor,
    evicted: Tensor,
    compressed: Tensor,
    *,
    counts: Tensor,
    project: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """The attention-reconstruction loss of one layer (Algorithm 2), and its relative error.

    Content-based attention of the segment over what was evicted is compared with attention over what
    replaces it, a head at a time before the output projection: mean of squares over a lane, mean over the
    lanes. A lane that evicted nothing counts as zero, so that the mean is the same however lanes are split.

    `queries [batch, head, segment, d_head]` (scaled), `evicted [batch, group, compression_rate, d_model]` and
    what `project` does with states (keys and values `[batch, head, state, d_head]`) must be free of gradient
    but for `compressed [batch, group, d_model]`. Of a lane, the newest `counts [batch]` groups are real.

    Gives the loss and, detached, squared error / squared target over all lanes (0 where nothing was evicted).
    """
    batch, groups, rate, _ = evicted.shape
    real = torch.arange(groups) >= groups - counts[:, None]  # [batch, group]
    # Attention needs at least one state: a lane without any looks at its padding, and is weighted with zero.
    readable = real | (counts == 0)[:, None]
    with torch.no_grad():
        target = _content_attention(queries, project(evicted.flatten(1, 2)), readable.repeat_interleave(rate, 1))
    reconstruction = _content_attention(queries, project(compressed), readable)
    # Half precision would cancel in the difference once f_c is good.
    precise = torch.promote_types(target.dtype, torch.float32)
    target, reconstruction = target.to(precise), reconstruction.to(precise)
    weight = (counts > 0).to(evicted.device, precise)
    squares = weight * (reconstruction - target).square().flatten(1).mean(1)  # [batch]
    size = (weight * target.square().flatten(1).mean(1)).sum()
    relative = squares.detach().sum() / size.clamp(min=torch.finfo(size.dtype).tiny)
    return squares.sum() / batch, relative


def _content_attention(queries: Tensor, slots: tuple[Tensor, Tensor], readable: Tensor) -> Tensor:
    keys, values = slots
    mask = None if bool(readable.all()) else readable[:, None, None, :].to(queries.device)
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=1.0)
