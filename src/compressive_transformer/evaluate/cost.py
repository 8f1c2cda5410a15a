"""Cost and temporal range of a config, layer by layer, before anything is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from ..config import ModelConfig
from ..config.toml import to_dict
from ..errors import CompressiveError
from ..model import CompressiveTransformer


@dataclass(frozen=True)
class Cost:
    """The cost and the reach of a part of a model; multiply-adds are those of matrix products, per token."""

    attention_width: float = 0
    """States that the last token of a segment attends to; for a whole model, the mean over layers."""
    temporal_range: int = 0
    """Tokens that can reach a prediction through memory."""
    parameters: int = 0
    """Parameters of the network, without compression functions."""
    compression_parameters: int = 0
    """Parameters of the compression function and, when trained by auto-encoding, of its decoder."""
    memory_bytes: int = 0
    """Bytes of the memory of a lane in fp32, when its segment is full; slots for waiting states included."""
    multiply_adds: float = 0.0
    """Forward pass of reading, without the projections of positions."""
    position_multiply_adds: float = 0.0
    """Projections of positions for a single lane; lanes of one age share them."""
    loss_multiply_adds: float = 0.0
    """Forward pass of the compression loss, which training needs in addition."""


@dataclass(frozen=True)
class Description:
    """The costs of a config: of each layer, outside of the layers, and in total. `print` shows a table."""

    config: ModelConfig
    """The config."""
    layers: tuple[Cost, ...]
    """Cost of each layer."""
    outside: Cost
    """Cost of embedding, final norm and logits."""

    @property
    def total(self) -> Cost:
        """Sums over all parts; the mean over layers of the attention width."""
        parts = (*self.layers, self.outside)
        sums = {field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Cost)}
        return Cost(**{**sums, "attention_width": self.config.attention_width})

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        layers = [{**self.config.of_layer(layer)._asdict(), **asdict(cost)} for layer, cost in enumerate(self.layers)]
        parts = {"outside": asdict(self.outside), "total": asdict(self.total)}
        return {"model": to_dict(self.config), "layers": layers, **parts}

    def __str__(self) -> str:
        rows: list[list[str]] = []
        for layer, cost in enumerate(self.layers):
            numbers = [*map(str, self.config.of_layer(layer)), *_numbers(cost)]
            if rows and rows[-1][1:] == numbers:
                rows[-1][0] = f"{rows[-1][0].partition('-')[0]}-{layer}"
            else:
                rows.append([str(layer), *numbers])
        rows.append(["outside", "", "", "", "", "", *_numbers(self.outside)[2:]])
        rows.append(["total", "", "", "", *_numbers(self.total)])
        widths = [max(map(len, column)) for column in zip(*HEADINGS, *rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in (*HEADINGS, *rows)]
        config = self.config
        return (
            f"{config.n_layers} layers, d_model {config.d_model}, segments of {config.segment_length} tokens, "
            f"{config.vocab_size:,} token ids\n\n" + "\n".join(lines) + f"\n\n{LEGEND}"
        )


HEADINGS = (
    ["", "recent", "compressed", "", "", "", "network", "f_c", "memory", "reading", "positions", "loss"],
    ["layer", *["slots"] * 2, "rate", "width", "range", *["parameters"] * 2, "bytes", *["mult-adds"] * 3],
)
LEGEND = """\
width: states that a token attends to at most (total: mean over layers); range: tokens that can reach a prediction
through memory; bytes: memory of one lane in fp32; mult-adds: of matrix products in the forward pass, per token: to read
it with full memory, to project positions (shared by lanes of one age), for the compression loss (training only)."""


def describe(config: ModelConfig) -> Description:
    """Return the costs of a config, counted on models on PyTorch's meta device.

    A lane with full memory reads one segment of n = `segment_length` tokens in one call. Multiply-adds are those of
    all matrix products that this implementation computes for it, masked slots included, divided by n. With n_m, n_cm,
    c and d as in the paper and S = n_cm + n_m + r + n slots, r of them for waiting states, a segment takes in a layer

    - queries d² · n; keys and values 2 · d² · S, since memory holds states and projects them at each call; output
      d² · n;
    - scores by content d · n · S, the mixing of values the same, scores by position d · n · (rows of distances);
    - the feed-forward network 2 · d · d_ff · n;
    - the compression function for the groups of a commit: c · d² per group for a convolution;

    and outside of the layers d · vocab_size · n for logits. There are n_m + r + n + 1 rows of distances. If slots are
    compressed, there are n / c + n_cm - 1 more under "span" (n rounded up to a multiple of c, here and for the queries
    above) or n + n_cm - 1 under "unit". The projections of positions take d² per row, for c times as many rows of
    compressed slots under "span".

    Logits of an adaptive vocabulary take less; the projections of its rows depend on the text and are left out.
    Reading token by token takes more, since each call projects all slots.

    Args:
        config: The config.

    Returns:
        The costs of each layer, outside of the layers, and in total.

    Raises:
        CompressiveError: The compression function is not registered, or does not run on the meta device.
    """
    layers = [replace(config, n_layers=1, **config.of_layer(layer)._asdict()) for layer in range(config.n_layers)]
    costs = {alone: _costs(alone) for alone in set(layers)}  # equal layers cost the same
    outside = costs[layers[0]][1]
    return Description(config, tuple(costs[alone][0] for alone in layers), outside)


def _costs(config: ModelConfig) -> tuple[Cost, Cost]:
    """Return the costs of the layer and of everything outside of it, for a model of one layer."""
    with torch.device("meta"):
        model = CompressiveTransformer(config).float()
    # Which rows an adaptive embedding projects depends on the text, and there is none.
    model.embedding.forward = lambda ids: torch.zeros(*ids.shape, config.d_model, device="meta")  # type: ignore[method-assign]
    tokens, block = config.segment_length, model.blocks[0]
    first, outside = _multiply_adds(model, batch_size=1)
    second = _multiply_adds(model, batch_size=2)[0] - first  # a second lane of the same age
    in_training = _multiply_adds(model, batch_size=1, training=True)[0]
    compression = sum(p.numel() for name, p in block.named_parameters() if name.startswith("compression"))
    parameters = sum(p.numel() for p in block.parameters())
    memory = sum(states.nbytes for name, states in model.empty_memory(1).state_dict().items() if name != "seen")
    layer = Cost(
        attention_width=config.attention_width,
        temporal_range=config.temporal_range,
        parameters=parameters - compression,
        compression_parameters=compression,
        memory_bytes=memory + tokens * config.d_model * torch.float32.itemsize,
        multiply_adds=second / tokens,
        position_multiply_adds=(first - second) / tokens,
        loss_multiply_adds=(in_training - first) / tokens,
    )
    rest = sum(p.numel() for p in model.parameters()) - parameters
    return layer, Cost(parameters=rest, multiply_adds=outside / tokens)


def _multiply_adds(model: CompressiveTransformer, *, batch_size: int, training: bool = False) -> tuple[int, int]:
    """Count multiply-adds of the only layer and outside of it, as lanes of one age read a segment with full memory."""
    from torch.utils.flop_counter import FlopCounterMode  # nothing else of PyTorch has imported it

    config = model.config
    segments = -(-config.temporal_range // config.segment_length)
    memory = replace(model.empty_memory(batch_size), seen=torch.full((batch_size,), segments * config.segment_length))
    tokens = torch.zeros(batch_size, config.segment_length, dtype=torch.int64, device="meta")
    try:
        with torch.set_grad_enabled(training), FlopCounterMode(display=False) as counter:
            model(tokens, memory)
    except (NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CompressiveError(
            f"compression = {config.compression!r} does not run on PyTorch's meta device, so its cost cannot be "
            f"counted: {reason}"
        ) from None
    counts = {name: sum(flops.values()) // 2 for name, flops in counter.get_flop_counts().items()}
    layer = counts["CompressiveTransformer.blocks.0"]
    return layer, counts["Global"] - layer


def _numbers(cost: Cost) -> list[str]:
    width = f"{cost.attention_width:,.1f}".removesuffix(".0")
    return [width, *(f"{getattr(cost, field.name):,.0f}" for field in fields(Cost)[1:])]
