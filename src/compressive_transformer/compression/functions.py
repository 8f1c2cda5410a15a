"""Compression functions f_c (Sec. 3.2): one small class each, in the table `COMPRESSIONS`.

Add one of your own without touching the package: subclass `Compression`, register the class under a name, and
name it in the config.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import ModelConfig
from ..errors import CompressiveError


class Compression(nn.Module):
    """Base class of compression functions f_c, which replace each group of c hidden states by one.

    Subclass it, define `forward`, and register the class in `COMPRESSIONS` under the name that configs use.

    Args:
        config: Sizes of the model.
        compression_rate: States of a group (c), in the layer that the function belongs to.

    Raises:
        CompressiveError: `config.compression_heads` is not 1 and the function has no heads.
    """

    uses_usage: ClassVar[bool] = False
    """True if `forward` takes the usage of the evicted states too; it is computed only for functions that ask."""
    selects: ClassVar[bool] = False
    """True if compressed states are evicted ones, unchanged, from the places that `kept(usage)` returns; they are never
    scaled."""
    overlap: ClassVar[int] = 0
    """States after its c that a group holds too: `forward` takes c + overlap of them. Memory must be as long."""
    uses_heads: ClassVar[bool] = False
    """True if the function has `config.compression_heads` heads."""

    def __init__(self, config: ModelConfig, compression_rate: int) -> None:
        super().__init__()
        self.d_model = config.d_model
        self.compression_rate = compression_rate
        if config.compression_heads != 1 and not self.uses_heads:
            able = [name for name, kind in COMPRESSIONS.items() if kind.uses_heads]
            raise CompressiveError(
                f"compression_heads ({config.compression_heads}) must be 1 with compression = {config.compression!r}; "
                f"heads are for {', '.join(able)}"
            )

    @classmethod
    def slot_note(cls, name: str) -> str:
        """Return which other states than those of its group a compressed slot depends on; "" if there are none.

        `name` is the name of the function in `COMPRESSIONS`.
        """
        if not cls.overlap:
            return ""
        states = "state that follows" if cls.overlap == 1 else f"{cls.overlap} states that follow"
        return f"{name} also reads the {states} the group of a compressed slot"

    def forward(self, evicted: Tensor) -> Tensor:
        """Compress all groups that one commit evicts.

        Args:
            evicted: Groups, oldest first, `[batch, group, compression_rate + overlap, d_model]`. A lane that evicts
                fewer groups than others has groups of zeros before its first one; their results are discarded.
            usage: Only with `uses_usage`. Mean attention that each state received, over heads and over all tokens that
                could read it, `[batch, group, compression_rate]`; -inf in groups of zeros.

        Returns:
            One state a group, `[batch, group, d_model]`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(evicted)")


class MeanPool(Compression):
    """The mean of each group (Sec. 3.2, mean pooling)."""

    def forward(self, evicted: Tensor) -> Tensor:
        """Compress `[batch, group, compression_rate, d_model]` to `[batch, group, d_model]`."""
        return evicted.mean(dim=2)


class MaxPool(Compression):
    """The largest value of each group, number by number (Sec. 3.2, max pooling)."""

    def forward(self, evicted: Tensor) -> Tensor:
        """Compress `[batch, group, compression_rate, d_model]` to `[batch, group, d_model]`."""
        return evicted.amax(dim=2)


class Convolution(Compression):
    """A 1D convolution with kernel and stride c, no bias, no activation (Sec. 3.2); the paper's best.

    It starts as mean pooling (identity / c), a useful memory from the first step on; from random weights it
    learns slowly. Kernel and stride are equal, so it is one linear map of the joined states of a group.
    """

    def __init__(self, config: ModelConfig, compression_rate: int) -> None:
        super().__init__(config, compression_rate)
        count = compression_rate + self.overlap
        mean = torch.eye(self.d_model).repeat(1, count) / count
        self.weight = nn.Parameter(mean)  # [d_model, (compression_rate + overlap) * d_model]

    def forward(self, evicted: Tensor) -> Tensor:
        """Compress `[batch, group, compression_rate + overlap, d_model]` to `[batch, group, d_model]`."""
        return functional.linear(evicted.flatten(2), self.weight)


class OverlappingConvolution(Convolution):
    """A convolution with kernel c + 1 and stride c: each group with the state that follows it. Not the paper's: ours.

    What stands in two states, a name and what is said of it, can fall into two groups and cannot be found together
    again. Here any two neighbours are in one group. The state that follows is in recent memory or in the next group,
    which holds it too. It starts as the mean of its c + 1 states.
    """

    overlap = 1


class DilatedConvolutions(Compression):
    """Three convolutions of kernel 2, dilated by 1, 2 and 4, a ReLU after each, then the strided one (Sec. 3.2).

    Two things are ours. The paper's convolutions are valid and make 7 states fewer of those that a commit
    evicts; here 7 states of zeros go before them, so that every state is in a group: the first groups of a
    commit look back on less. And the layers between are 2 · d_model wide, so that this function too can start
    as mean pooling, exactly: the halves hold relu(x) and relu(−x), whose difference is x. With d_model numbers
    a ReLU would lose every negative one.
    """

    dilations = (1, 2, 4)

    @classmethod
    def slot_note(cls, name: str) -> str:
        """See `Compression`."""
        return f"{name} also reads up to {sum(cls.dilations)} states before a group, those of the same commit"

    def __init__(self, config: ModelConfig, compression_rate: int) -> None:
        super().__init__(config, compression_rate)
        d_model = self.d_model
        halves = torch.cat([torch.eye(d_model), -torch.eye(d_model)])
        taps = [halves, torch.eye(2 * d_model), torch.eye(2 * d_model)]
        # [2 * d_model, earlier and own state]: each begins by passing the own state on.
        self.dilated = nn.ParameterList(torch.cat([torch.zeros_like(own), own], dim=1) for own in taps)
        self.weight = nn.Parameter(halves.T.repeat(1, compression_rate) / compression_rate)

    def forward(self, evicted: Tensor) -> Tensor:
        """Compress `[batch, group, compression_rate, d_model]` to `[batch, group, d_model]`."""
        states = functional.pad(evicted.flatten(1, 2), (0, 0, sum(self.dilations), 0))
        for dilation, weight in zip(self.dilations, self.dilated, strict=True):
            pairs = torch.cat([states[:, :-dilation], states[:, dilation:]], dim=-1)
            states = functional.linear(pairs, weight).relu()
        groups = states.unflatten(1, (-1, self.compression_rate)).flatten(2)
        return functional.linear(groups, self.weight)


class MostUsed(Compression):
    """The most used states of a commit, unchanged and in order of time (Sec. 3.2, most-used).

    Of all n evicted states it keeps the n / c that received the most attention on average. So a kept state may
    stand in a slot whose group it was not in; its position is that of the slot, as with every function.
    """

    uses_usage = True
    selects = True

    @classmethod
    def slot_note(cls, name: str) -> str:
        """See `Compression`."""
        return f"{name} keeps states unchanged: a compressed slot stands for one token, any of its commit"

    def forward(self, evicted: Tensor, usage: Tensor) -> Tensor:  # type: ignore[override]
        """Compress as others do, given the usage `[batch, group, compression_rate]` too."""
        return evicted.flatten(1, 2).gather(1, self.kept(usage)[:, :, None].expand(-1, -1, self.d_model))

    def kept(self, usage: Tensor) -> Tensor:
        """Return the places `[batch, group]` of the kept states among all evicted ones, given the usage of `forward`.

        Where a lane has groups of padding, as many places at the old end mean nothing.
        """
        groups, usage = usage.shape[1], usage.flatten(1)
        kept = usage.isfinite().sum(1, keepdim=True) // self.compression_rate
        # Of equally used states the earlier one is kept, on every device.
        ranked = usage.sort(dim=1, descending=True, stable=True).indices[:, :groups]
        beyond = torch.arange(groups, device=kept.device) >= kept
        return ranked.masked_fill(beyond, -1).sort(dim=1).values.clamp(min=0)


class AttentionPool(Compression):
    """Attention over each group by learned queries. Not in the paper: ours.

    Each of `heads` queries weighs the c states of a group by softmax(query · state / sqrt(d_model)) and pools
    its own slice of d_model numbers with these weights. The states are keys as they are: with one fixed query a
    head, a projection W of the keys adds nothing, since q · (W x) = (Wᵀ q) · x. The queries start at zero, which
    is mean pooling.
    """

    uses_heads = True

    def __init__(self, config: ModelConfig, compression_rate: int) -> None:
        super().__init__(config, compression_rate)
        heads = config.compression_heads
        if self.d_model % heads:
            raise CompressiveError(f"compression_heads ({heads}) must divide d_model ({self.d_model})")
        self.queries = nn.Parameter(torch.zeros(heads, self.d_model))

    def forward(self, evicted: Tensor) -> Tensor:
        """Compress `[batch, group, compression_rate, d_model]` to `[batch, group, d_model]`."""
        scores = functional.linear(evicted, self.queries) * self.d_model**-0.5
        weights = scores.softmax(dim=2).unsqueeze(-1)  # [batch, group, compression_rate, head, 1]
        slices = evicted.unflatten(-1, (len(self.queries), -1))
        pooled: Tensor = (weights * slices).sum(2).flatten(2)
        return pooled


def match_rms(compressed: Tensor, evicted: Tensor) -> Tensor:
    """Scale `compressed [batch, group, d_model]` to the size of the states that it replaces. Ours, not the paper's.

    Size is the root mean square over `evicted [batch, group, compression_rate, d_model]`. The mean of c unlike
    states is sqrt(c) times smaller than they are, so attention, which reads both with the same keys and values,
    would hardly find it; and a loss that shrinks a state would hide it. Groups of zeros stay zero.
    """
    # Squares leave the range of half precision.
    precise = torch.promote_types(compressed.dtype, torch.float32)
    target = evicted.to(precise).square().mean((2, 3)).sqrt()
    inverse = compressed.to(precise).square().mean(2).add(1e-12).rsqrt()
    return compressed * (target * inverse)[..., None].to(compressed.dtype)


COMPRESSIONS: dict[str, type[Compression]] = {
    "mean": MeanPool,
    "max": MaxPool,
    "conv": Convolution,
    "conv-overlap": OverlappingConvolution,
    "dilated": DilatedConvolutions,
    "most-used": MostUsed,
    "attention": AttentionPool,
}


def build_compression(config: ModelConfig, layer: int) -> Compression | None:
    """Return the compression function of one layer, None where it has no compressed memory.

    Raises:
        CompressiveError: The name is not registered, or the function does not fit the config.
    """
    if config.compression not in COMPRESSIONS:
        raise CompressiveError(
            f"compression ({config.compression!r}) is not a registered compression function; "
            f"known: {', '.join(COMPRESSIONS)}. "
            f'Register your own with COMPRESSIONS["{config.compression}"] = YourClass before the model is built or '
            "loaded; commands take the file that does so: compressive --plugin FILE.py COMMAND"
        )
    sizes = config.of_layer(layer)
    if not sizes.compressed_length:
        return None
    compression = COMPRESSIONS[config.compression](config, sizes.compression_rate)
    if sizes.memory_length < compression.overlap:
        raise CompressiveError(
            f"memory_length ({sizes.memory_length}) must be at least {compression.overlap} with compression = "
            f"{config.compression!r}, whose groups hold states that are still in recent memory"
        )
    return compression
