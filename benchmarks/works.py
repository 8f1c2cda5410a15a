"""Works of the benchmark: sizes, text, and counted products and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from compressive_transformer import CompressiveTransformer, ModelConfig, next_token_loss
from compressive_transformer.attention.positions import PositionCache
from compressive_transformer.memory import Memory, SlotLayout

IDS = 257
"""Bytes, and the id that stands before documents."""


@dataclass(frozen=True)
class Work:
    """Sizes common to all contenders; memories are full."""

    batch: int
    n_layers: int
    d_model: int
    n_heads: int
    segment_length: int
    memory_length: int
    compressed_length: int
    compression_rate: int = 4

    @property
    def slots(self) -> int:
        """Memory states that a token attends to."""
        return self.memory_length + self.compressed_length

    @property
    def tokens(self) -> int:
        """Tokens of one segment of all lanes."""
        return self.batch * self.segment_length

    @property
    def config(self) -> ModelConfig:
        """Our model of this work, with the compression function of the paper and of the peers."""
        sizes = {name: value for name, value in asdict(self).items() if name != "batch"}
        return ModelConfig(vocab_size=IDS, compression="conv", **sizes)

    @property
    def without_compression(self) -> ModelConfig:
        """Same model as a Transformer-XL of equal attention width."""
        return replace(self.config, memory_length=self.slots, compressed_length=0)

    def __str__(self) -> str:
        c = self.config
        return (
            f"depth {c.n_layers}, d_model {c.d_model}, {c.n_heads} heads, d_ff {c.d_ff}, n_s = {c.segment_length}, "
            f"n_m = {c.memory_length}, n_cm = {c.compressed_length}, c = {c.compression_rate}, bytes, "
            f"batch {self.batch}"
        )


WORKS = {
    "S": Work(4, n_layers=6, d_model=256, n_heads=8, segment_length=256, memory_length=256, compressed_length=128),
    "L": Work(2, n_layers=8, d_model=512, n_heads=8, segment_length=512, memory_length=512, compressed_length=512),
}


def segments(batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and targets `[batch, length]` of the sample books, repeated, each lane from another position."""
    folder = files("compressive_transformer.apps.demo") / "sample" / "train"
    books = sorted((book for book in folder.iterdir() if book.name.endswith(".txt")), key=lambda book: book.name)
    text = torch.frombuffer(bytearray(b"".join(book.read_bytes() for book in books)), dtype=torch.uint8).long()
    lanes = text[: len(text) // batch * batch].view(batch, -1)
    while True:
        for first in range(0, lanes.shape[1] - length, length):
            yield lanes[:, first : first + length], lanes[:, first + 1 : first + 1 + length]


def full_memory(model: CompressiveTransformer, batch: int) -> Memory:
    """Return a full memory of our model with random states, at the start of a segment."""
    config, empty = model.config, model.empty_memory(batch)
    seen = torch.full((batch,), -(-config.temporal_range // config.segment_length) * config.segment_length)
    filled = [[int(count[0]) for count in SlotLayout.of(config, n).filled(seen)] for n in range(config.n_layers)]
    assert filled == [
        [sizes.compressed_length, sizes.memory_length] for sizes in map(config.of_layer, range(len(filled)))
    ]
    return Memory(seen, tuple(layer.map(torch.randn_like) for layer in empty.layers))


def multiply_adds(config: ModelConfig, batch: int, *, training: bool) -> float:
    """Return multiply-adds of all matrix products per token, for reading or for a training step.

    Counted as by `describe`, on the meta device, masked slots included, lanes of one age. Reading caches projected
    distances, training projects them.
    """
    with torch.device("meta"):
        model = CompressiveTransformer(config)
        tokens = torch.zeros(batch, config.segment_length, dtype=torch.int64)
    memory, cache = full_memory(model, batch), None if training else PositionCache()
    with torch.set_grad_enabled(training):
        if cache is not None:
            model(tokens, memory, position_cache=cache)
        with FlopCounterMode(display=False) as counter:
            output = model(tokens, memory, position_cache=cache)
            if training:
                (next_token_loss(output.logits, tokens) + output.compression_loss).backward()
    return counter.get_total_flops() / 2 / tokens.numel()


def decoding_bytes(config: ModelConfig, batch: int, *, weight: int, state: int) -> float:
    """Return the bytes that decoding a token per lane must read: weights, and keys and values of all slots.

    `weight` and `state` are bytes per number. f_c, which only commits read, is not counted; the segment is half
    full.
    """
    with torch.device("meta"):
        model = CompressiveTransformer(config)
    weights = sum(p.numel() for name, p in model.named_parameters() if ".compression" not in name)
    slots = config.attention_width - (config.segment_length - 1) / 2
    return weight * weights + state * 2 * batch * slots * config.d_model * config.n_layers


def table(work: Work) -> dict[str, Any]:
    """Return a work for JSON."""
    return {**asdict(work), "text": str(work)}
