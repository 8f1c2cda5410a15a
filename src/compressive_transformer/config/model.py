"""Config of a model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Literal, NamedTuple

from ..errors import CompressiveError
from .checks import check_range, check_types, shortened

PerLayer = int | tuple[int, ...]
"""One number for all layers, or one per layer, from the first to the last."""


class LayerSizes(NamedTuple):
    """Fields of `ModelConfig` that may differ from layer to layer, for one layer."""

    memory_length: int
    compressed_length: int
    compression_rate: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes, memory and variants of a Compressive Transformer (Rae et al. 2019, Sec. 3).

    The main fields are `d_model`, `n_layers` and `n_heads` of the network; `segment_length`, `memory_length` and
    `compressed_length` of its memory; `compression_rate`, and `compression`, the compression function f_c. Memory
    lengths and rates are one number, or a list with one per layer, since not every layer needs a long memory ("Do
    Transformers Need Deep Long-Range Memory?", Rae and Razavi 2020).

    Raises CompressiveError, with the field, its value and the valid range, if a value is invalid.
    """

    vocab_size: int
    """Number of token ids, including the start id of documents."""
    d_model: int = 512
    """Width of hidden states."""
    n_layers: int = 8
    """Number of layers; each has its memory and its compression function."""
    n_heads: int = 8
    """Number of attention heads; must divide `d_model`."""
    d_ff: int = 0
    """Width of the hidden layer of feed-forward networks; 0 for 4 · `d_model`."""
    segment_length: int = 512
    """Tokens between two commits to memory (n_s in the paper)."""
    memory_length: PerLayer = 512
    """Slots of recent memory per layer, one hidden state each (n_m)."""
    compressed_length: PerLayer = 512
    """Slots of compressed memory per layer (n_cm); 0 for a Transformer-XL."""
    compression_rate: PerLayer = 4
    """Hidden states per compressed slot (c)."""
    compression: str = "conv-overlap"
    """Name of the compression function f_c in `COMPRESSIONS`: conv (the best of the paper), conv-overlap, mean, max,
    dilated, most-used, attention, or a registered one."""
    compression_heads: int = 1
    """Number of learned queries of the compression function "attention"; must divide `d_model`."""
    compression_loss: Literal["attention", "auto-encoding", "bptt", "none"] = "attention"
    """Loss that trains f_c: attention reconstruction (Algorithm 2), auto-encoding, the task loss backpropagated through
    compressed memory (bptt), or none."""
    position: Literal["relative", "rotary"] = "relative"
    """Position encoding: sinusoids of relative distances (Transformer-XL) or rotary (RoFormer)."""
    compressed_scale: Literal["rms", "free"] = "rms"
    """Scale of compressed states: the root mean square of the states they replace, or free, as in the paper."""
    compressed_position: Literal["span", "unit"] = "span"
    """Position of a compressed slot: the mean of the tokens it replaces, or one step per slot."""
    norm: Literal["pre", "post"] = "pre"
    """Layer norm before each sub-layer, or after it as in the paper's Algorithm 1."""
    empty_slots: Literal["masked", "zeros"] = "masked"
    """Slots not filled yet: masked in attention, or attended as zero states (the paper)."""
    dropout: float = 0.0
    """Dropout probability of embeddings and sub-layer outputs, in [0, 1)."""
    adaptive_cutoffs: tuple[int, ...] = ()
    """Ids at which the clusters of adaptive input and softmax begin, except the first; empty for a plain embedding."""
    adaptive_factor: int = 4
    """Factor by which the embedding width shrinks from cluster to cluster."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.d_ff == 0:
            object.__setattr__(self, "d_ff", 4 * self.d_model)
        one_or_more = ("vocab_size", "d_model", "n_layers", "n_heads", "d_ff", "segment_length")
        check_range(self, (*one_or_more, "compression_heads"), low=1)
        # Beyond any machine: a file with larger sizes is rejected before anything is allocated.
        check_range(self, ("vocab_size", "segment_length"), low=1, high=2**31)
        check_range(self, ("d_model", "n_heads", "d_ff"), low=1, high=2**22)
        check_range(self, ("n_layers",), low=1, high=10_000)
        check_range(self, ("dropout",), low=0)
        for name in LayerSizes._fields:
            rate = name == "compression_rate"
            _check_per_layer(self, name, low=int(rate), high=2**16 if rate else 2**31)
        if self.d_model % self.n_heads:
            raise CompressiveError(
                f"n_heads ({self.n_heads}) must divide d_model ({self.d_model}); "
                f"the nearest that does is {_nearest_divisor(self.d_model, self.n_heads)}"
            )
        if self.d_model % 2:
            raise CompressiveError(
                f"d_model ({self.d_model}) must be even, since positions are pairs of a sine and a cosine"
            )
        if self.position == "rotary" and self.d_model // self.n_heads % 2:
            nearest = _nearest_divisor(self.d_model // 2, self.n_heads)
            raise CompressiveError(
                f"d_model / n_heads ({self.d_model // self.n_heads}) must be even, since position = 'rotary' turns "
                f"pairs of numbers of a head; the nearest n_heads that makes it so is {nearest}"
            )
        if self.dropout >= 1:
            raise CompressiveError(f"dropout ({self.dropout}) must be in [0, 1)")
        self._check_adaptive()

    def _check_adaptive(self) -> None:
        check_range(self, ("adaptive_factor",), low=1)
        borders = (0, *self.adaptive_cutoffs, self.vocab_size)
        if any(low >= high for low, high in pairwise(borders)):
            raise CompressiveError(
                f"adaptive_cutoffs ({list(self.adaptive_cutoffs)}) must rise from 1 on and end below vocab_size"
                f" ({self.vocab_size})"
            )
        if self.d_model < self.adaptive_factor ** len(self.adaptive_cutoffs):
            raise CompressiveError(
                f"d_model ({self.d_model}) leaves no width for the last of {len(self.adaptive_cutoffs) + 1} clusters,"
                f" each {self.adaptive_factor} times narrower: use fewer adaptive_cutoffs or a smaller adaptive_factor"
            )

    def of_layer(self, layer: int) -> LayerSizes:
        """Return the memory lengths and the compression rate of a layer, counted from 0."""
        if not 0 <= layer < self.n_layers:
            raise CompressiveError(f"layer ({layer}) must lie in 0 .. {self.n_layers - 1}")
        given = (self.memory_length, self.compressed_length, self.compression_rate)
        return LayerSizes(*(value if isinstance(value, int) else value[layer] for value in given))

    @property
    def temporal_range(self) -> int:
        """Tokens that can reach a prediction through memory: n_m + c · n_cm summed over layers (Sec. 3.3)."""
        layers = map(self.of_layer, range(self.n_layers))
        return sum(sizes.memory_length + sizes.compression_rate * sizes.compressed_length for sizes in layers)

    @property
    def attention_width(self) -> float:
        """States that the last token of a segment attends to, n_cm + n_m + n_s: the cost of attention.

        The mean over layers, so that configs of equal width cost the same.
        """
        layers = map(self.of_layer, range(self.n_layers))
        return self.segment_length + mean(sizes.compressed_length + sizes.memory_length for sizes in layers)


def _check_per_layer(config: ModelConfig, name: str, *, low: int, high: int) -> None:
    """Raise CompressiveError if a field is neither an int nor one int per layer; convert a list to a tuple."""
    given = getattr(config, name)
    numbers = tuple(given) if isinstance(given, list | tuple) else (given,)
    wanted = f"one for each of the n_layers ({config.n_layers}) layers"
    if any(type(number) is not int for number in numbers):
        raise CompressiveError(f"{name} ({shortened(given)}) must be of type int, or a list with {wanted}")
    if numbers != (given,) and len(numbers) != config.n_layers:
        raise CompressiveError(
            f"{name} ({shortened(given)}) must be one number, or a list with {wanted}, not {len(numbers)}"
        )
    if min(numbers) < low:
        raise CompressiveError(
            f"{name} ({shortened(given)}) must be {low} or more{'' if numbers == (given,) else ' in each layer'}"
        )
    if max(numbers) > high:
        raise CompressiveError(f"{name} ({shortened(given)}) must be at most {high}")
    if isinstance(given, list):
        object.__setattr__(config, name, numbers)


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    return min(divisors, key=lambda candidate: abs(candidate - wanted))
