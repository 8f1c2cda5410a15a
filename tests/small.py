"""Small models in float64, random streams and ways to read them: what the tests of the core share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from compressive_transformer.config import LayerSizes, ModelConfig
from compressive_transformer.memory import Memory, SlotLayout
from compressive_transformer.model import CompressiveTransformer

# Each form of attention with each numbering of compressed slots.
POSITIONS = [
    {"position": position, "compressed_position": numbering}
    for position in ("relative", "rotary")
    for numbering in ("span", "unit")
]
each_position = pytest.mark.parametrize("position", POSITIONS, ids=lambda fields: "-".join(fields.values()))
# Two of the four in the quick tests, for laws that other tests hold too: each form once and each numbering once.
each_position_in_turn = pytest.mark.parametrize(
    "position",
    [POSITIONS[0], *(pytest.param(fields, marks=pytest.mark.slow) for fields in POSITIONS[1:3]), POSITIONS[3]],
    ids=lambda fields: "-".join(fields.values()),
)

law = settings(deadline=None, derandomize=True, database=None)

# Drawn by hypothesis: rates that divide the segment or do not, segments longer than memory, lengths of zero.
lengths = {
    "segment_length": st.integers(1, 7),
    "memory_length": st.sampled_from([0, 1, 2, 3, 4, 6, 9]),
    "compressed_length": st.sampled_from([0, 1, 2, 3, 5]),
    "compression_rate": st.integers(1, 4),
}
variants = {
    "compression": st.sampled_from(["conv", "conv-overlap", "mean", "max", "dilated", "most-used", "attention"]),
    "compression_loss": st.sampled_from(["attention", "auto-encoding", "bptt"]),
    "position": st.sampled_from(["relative", "rotary"]),
    "compressed_scale": st.sampled_from(["rms", "free"]),
    "compressed_position": st.sampled_from(["span", "unit"]),
    "norm": st.sampled_from(["pre", "post"]),
    "empty_slots": st.sampled_from(["masked", "zeros"]),
}


def small_config(**fields: object) -> ModelConfig:
    sizes = {"vocab_size": 11, "d_model": 8, "n_layers": 2, "n_heads": 2, "d_ff": 8}
    memory = {"segment_length": 4, "memory_length": 5, "compressed_length": 3, "compression_rate": 3}
    memory["compression"] = "conv"
    return ModelConfig(**{**sizes, **memory, **fields})


def of_layers(n_layers: int) -> st.SearchStrategy[ModelConfig]:
    """Configs whose lengths of memory and rates are one number or one for each layer."""
    own = {name: lengths[name] | st.tuples(*[lengths[name]] * n_layers) for name in LayerSizes._fields}
    drawn = st.builds(small_config, n_layers=st.just(n_layers), **{**lengths, **own}, **variants)
    return drawn.filter(lambda config: config.compression != "conv-overlap" or all(_pairs_fit(config)))


def _pairs_fit(config: ModelConfig) -> list[bool]:
    """Of each layer, whether the state after an evicted group is in memory."""
    layers = [config.of_layer(layer) for layer in range(config.n_layers)]
    return [own.memory_length > 0 or own.compressed_length == 0 for own in layers]


configs = st.integers(1, 2).flatmap(of_layers)

# Three layers whose sizes differ; segments of 4, 6 or 7.
LAYERED: dict[str, dict[str, object]] = {
    "in the last layers only": {"n_layers": 3, "memory_length": (0, 0, 5), "compressed_length": (0, 3, 3)},
    "short and long": {"n_layers": 3, "memory_length": (2, 9, 4), "compressed_length": (5, 1, 3), "segment_length": 7},
    "different rates": {"n_layers": 3, "compression_rate": (2, 3, 4)},  # 3 divides no segment of 4
    "no rate divides": {"n_layers": 3, "compression_rate": (4, 1, 5), "segment_length": 6, "memory_length": (1, 5, 3)},
    "zero here and there": {"n_layers": 3, "memory_length": (5, 0, 0), "compressed_length": (0, 2, 0)},
}
layered = pytest.mark.parametrize("fields", LAYERED.values(), ids=LAYERED)


def small_model(config: ModelConfig | None = None, *, seed: int = 0, **fields: object) -> CompressiveTransformer:
    """A model in float64 whose parameters are far from their first values, biases included."""
    torch.manual_seed(seed)
    model = CompressiveTransformer(config or small_config(**fields)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


LEARNED = ("conv", "conv-overlap", "dilated", "attention")


def random_tokens(batch_size: int, length: int, *, seed: int = 0) -> Tensor:
    return torch.randint(0, 11, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def lanes_of(model: CompressiveTransformer, batch_size: int) -> list[reference.Lane]:
    return [reference.Lane(model.config, dict(model.named_parameters())) for _ in range(batch_size)]


def read_in_pieces(
    model: CompressiveTransformer,
    stream: Tensor,
    pieces: Sequence[Sequence[int]],
    *,
    memory: Memory | None = None,
    padding: int = 0,
) -> tuple[Tensor, Memory, Tensor]:
    """Logits, memory and summed compression loss; in call k, lane b reads its next `pieces[k][b]` tokens.

    Padding, `padding` tokens beyond the longest piece, is random.
    """
    memory = model.empty_memory(len(stream)) if memory is None else memory
    read = [0] * len(stream)
    logits = torch.full((*stream.shape, model.config.vocab_size), torch.nan, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for taken in pieces:
        chunk = torch.randint(0, 11, (len(stream), max(1, *taken) + padding))
        for lane, count in enumerate(taken):
            chunk[lane, :count] = stream[lane, read[lane] : read[lane] + count]
        equal = set(taken) == {chunk.shape[1]}
        output = model(chunk, memory, None if equal else torch.tensor(taken))
        for lane, count in enumerate(taken):
            logits[lane, read[lane] : read[lane] + count] = output.logits[lane, :count].detach()
            read[lane] += count
        memory, loss = output.memory.detach(), loss + output.compression_loss.detach()
    assert read == [stream.shape[1]] * len(stream)
    return logits, memory, loss


def ragged_pieces(rng: object, batch_size: int, length: int, longest: int) -> list[list[int]]:
    """Pieces of random length for each lane, zeros included, that together are `length` tokens a lane."""
    left, pieces = [length] * batch_size, []
    while any(left):
        pieces.append([rng.randint(0, min(longest, count)) for count in left])
        left = [count - taken for count, taken in zip(left, pieces[-1], strict=True)]
    return pieces


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def assert_same_memory(
    model: CompressiveTransformer, actual: Memory, expected: Memory, tolerance: float = 1e-10
) -> None:
    """Equal in all that a later call can see, and in unfilled slots too."""
    assert actual.seen.tolist() == expected.seen.tolist()
    width = int(SlotLayout.of(model.config, 0).pending(actual.seen).max())
    for one, other in zip(actual.layers, expected.layers, strict=True):
        assert_close(one.compressed, other.compressed, tolerance)
        assert_close(one.recent, other.recent, tolerance)
        assert_close(one.pending[:, :width], other.pending[:, :width], tolerance)
        assert (one.usage is None) == (other.usage is None)
        if one.usage is not None:
            length = one.recent.shape[1] + width
            assert_close(one.usage[:, :length], other.usage[:, :length], tolerance)
