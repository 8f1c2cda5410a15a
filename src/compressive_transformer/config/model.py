"""What a model is made of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Literal, NamedTuple

from ..errors import CompressiveError
from .checks import check_range, check_types, shortened

PerLayer = int | tuple[int, ...]
"""One number for all layers, or one for each, the first layer's first."""


class LayerMemory(NamedTuple):
    """The fields of `ModelConfig` that may differ from layer to layer, as one layer has them."""

    memory_length: int
    compressed_length: int
    compression_rate: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape and memory of a Compressive Transformer (Rae et al. 2019, Sec. 3).

    Lengths of memory and the rate are one number, or a list with one for each layer, since not every layer needs a
    long memory ("Do Transformers Need Deep Long-Range Memory?", Rae and Razavi 2020); `of_layer` gives a layer's own.

    Raises CompressiveError that names the field, its value and the valid range.
    """

    vocab_size: int
    """Number of token ids, the start id of documents included."""
    d_model: int = 512
    """Width of a hidden state, in numbers."""
    n_layers: int = 8
    """Number of blocks; each has a memory and a compression function of its own."""
    n_heads: int = 8
    """Attention heads of a block; must divide d_model."""
    d_ff: int = 0
    """Width inside the feed-forward network, in numbers; 0 stands for four times d_model."""
    segment_length: int = 512
    """Tokens between two commits (the paper's n_s)."""
    memory_length: PerLayer = 512
    """Slots of recent memory in a layer, one hidden state each (n_m)."""
    compressed_length: PerLayer = 512
    """Slots of compressed memory in a layer (n_cm); 0 makes a Transformer-XL."""
    compression_rate: PerLayer = 4
    """Hidden states that one compressed slot replaces (c)."""
    compression: str = "conv-overlap"
    """Name of the compression function f_c in `COMPRESSIONS`: conv (the best of the paper), conv-overlap, mean, max,
    dilated, most-used, attention or one of your own."""
    compression_heads: int = 1
    """Learned queries of a compression function that has them (attention); must divide d_model."""
    compression_loss: Literal["attention", "auto-encoding", "bptt", "none"] = "attention"
    """What trains f_c: attention reconstruction (Algorithm 2), auto-encoding, the task loss through compressed
    memory (bptt), or nothing."""
    position: Literal["relative", "rotary"] = "relative"
    """How attention knows places: sinusoids of distances (Transformer-XL) or rotated queries and keys (RoFormer)."""
    compressed_scale: Literal["rms", "free"] = "rms"
    """Size of compressed states: the root mean square of what they replace, or what f_c makes it, as in the paper."""
    compressed_position: Literal["span", "unit"] = "span"
    """Where a compressed slot stands: at the mean of the tokens that it replaces, or one step a slot."""
    norm: Literal["pre", "post"] = "pre"
    """Layer norm before each sub-layer, or after it as in the paper's Algorithm 1."""
    empty_slots: Literal["masked", "zeros"] = "masked"
    """Slots that nothing has filled yet: not attended, or attended as zero states as the paper does."""
    dropout: float = 0.0
    """Share of numbers dropped from embeddings and from what each sub-layer adds, in [0, 1)."""
    adaptive_cutoffs: tuple[int, ...] = ()
    """Ids at which the clusters of adaptive input and softmax begin, the first excepted; none: a plain embedding."""
    adaptive_factor: int = 4
    """How many times narrower the rows of each further cluster are."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.d_ff == 0:
            object.__setattr__(self, "d_ff", 4 * self.d_model)
        one_or_more = ("vocab_size", "d_model", "n_layers", "n_heads", "d_ff", "segment_length")
        check_range(self, (*one_or_more, "compression_heads"), low=1)
        # Beyond any machine; so that a file that says more is refused before anything is made.
        check_range(self, ("vocab_size", "segment_length"), low=1, high=2**31)
        check_range(self, ("d_model", "n_heads", "d_ff"), low=1, high=2**22)
        check_range(self, ("n_layers",), low=1, high=10_000)
        check_range(self, ("dropout",), low=0)
        for name in LayerMemory._fields:
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

    def of_layer(self, layer: int) -> LayerMemory:
        """The lengths of memory and the rate of one layer, counted from 0."""
        if not 0 <= layer < self.n_layers:
            raise CompressiveError(f"layer ({layer}) must lie in 0 .. {self.n_layers - 1}")
        given = (self.memory_length, self.compressed_length, self.compression_rate)
        return LayerMemory(*(value if isinstance(value, int) else value[layer] for value in given))

    @property
    def temporal_range(self) -> int:
        """Tokens that can reach a prediction through memory: n_m + c · n_cm, summed over layers (Sec. 3.3)."""
        layers = map(self.of_layer, range(self.n_layers))
        return sum(own.memory_length + own.compression_rate * own.compressed_length for own in layers)

    @property
    def attention_width(self) -> float:
        """States that a token at the end of a segment attends to: n_cm + n_m + n_s; what attention costs.

        Where layers differ the mean over layers, so that equal widths still cost the same.
        """
        layers = map(self.of_layer, range(self.n_layers))
        return self.segment_length + mean(own.compressed_length + own.memory_length for own in layers)


def _check_per_layer(config: ModelConfig, name: str, *, low: int, high: int) -> None:
    """Raise CompressiveError where a field is neither one int nor one for each layer; a list becomes a tuple."""
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
