"""Contenders: models that read segments with memory, and this package's model as one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressive_transformer import CompressiveTransformer
from compressive_transformer.attention.positions import PositionCache
from compressive_transformer.generate import CachedDecoder, Precision
from compressive_transformer.memory import Memory
from machine import DEVICE
from timing import Step
from works import Work, full_memory, segments

ROUNDED: tuple[Precision, ...] = ("bf16", "int8") if DEVICE.type == "cpu" else ("bf16",)
"""Precisions of our decoder in which the weights are rounded."""


class Contender(ABC):
    """Model with full memory, and one step of each measure.

    All use the same optimizer and read the same text, each from where its last step ended.
    """

    name: ClassVar[str]
    precision: ClassVar[str] = "fp32"
    compression: ClassVar[str] = ""
    """What the names of f_c's parameters contain; empty for a model that does not compress."""

    def __init__(self, work: Work) -> None:
        torch.manual_seed(0)
        self.work = work
        self.model = self.build().to(DEVICE)
        self.memory = self.full_memory(work.batch)
        self.text = segments(work.batch, work.segment_length)
        # What costs all models the same should cost little.
        self.adam = torch.optim.Adam(self.model.parameters(), lr=1e-5, fused=True)

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model of `self.work`."""

    @abstractmethod
    def full_memory(self, batch: int) -> Any:
        """Return a memory of `batch` lanes with all slots filled."""

    @abstractmethod
    def slots(self, memory: Any) -> set[int]:
        """Return the number of slots of each layer."""

    @abstractmethod
    def read(self, tokens: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        """Return logits of `tokens [batch, segment]`, the memory after them, and the compression loss if training."""

    @abstractmethod
    def decoder(self, batch: int, at: int) -> Step:
        """Return a decoder with full memory and `at` tokens of the segment already read."""

    def decoders(self) -> dict[str, Callable[[int, int], Step]]:
        """Return the forms of decoding by their names in the results."""
        return {self.name: self.decoder}

    def loss(self) -> Tensor:
        """Return the training loss of the next segment."""
        tokens, targets = (part.to(DEVICE) for part in next(self.text))
        logits, self.memory, compression_loss = self.read(tokens, self.memory)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + compression_loss

    def train(self) -> None:
        """Take one training step: forward, compression loss, backward, Adam."""
        self.model.train()
        self.loss().backward()
        self.adam.step()
        self.adam.zero_grad()

    @torch.no_grad()
    def score(self) -> None:
        """Return the mean nats of the next segment."""
        self.model.eval()
        self.loss()

    def check(self) -> None:
        """Raise RuntimeError if a training step would skip work, or if memory is not full."""
        self.model.train()
        for _ in range(2):  # twice: one peer stops training its projections after the first step
            self._check_memory()
            self.adam.zero_grad()
            self.loss().backward()
            grads = {name: parameter.grad for name, parameter in self.model.named_parameters()}
            if idle := [name for name, grad in grads.items() if grad is None or not grad.any()]:
                raise RuntimeError(f"{self.name}: no gradient reaches {', '.join(idle)}")
            # Memory is detached, so gradient of f_c can come from the compression loss only.
            if self.compression and not any(self.compression in name for name in grads):
                raise RuntimeError(f"{self.name}: there is nothing that compresses")
        self._check_memory()
        self.adam.zero_grad()

    def _check_memory(self) -> None:
        if (slots := self.slots(self.memory)) != {self.work.slots}:
            raise RuntimeError(f"{self.name}: layers must have {self.work.slots} filled slots, not {slots}")

    def prefix(self, batch: int, at: int) -> Tensor:
        """Return the tokens `[batch, at]` of the segment that a decoder has read."""
        return next(segments(batch, self.work.segment_length))[0][:, :at].to(DEVICE)


class Ours(Contender):
    """The model of this package."""

    name = "ours"
    compression = ".compression."
    model: CompressiveTransformer

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.cache = PositionCache()

    def build(self) -> nn.Module:
        return CompressiveTransformer(self.work.config)

    def train(self) -> None:
        super().train()
        self.cache = PositionCache()  # weights have changed

    def full_memory(self, batch: int) -> Memory:
        return full_memory(self.model, batch)

    def slots(self, memory: Memory) -> set[int]:
        filled = [layout.filled(memory.seen) for layout in self.model.layouts]
        return {int(count) for compressed, recent in filled for count in compressed + recent}

    def read(self, tokens: Tensor, memory: Memory) -> tuple[Tensor, Memory, Tensor]:
        # Kept while weights stay, as `evaluate` does.
        output = self.model(tokens, memory, position_cache=None if torch.is_grad_enabled() else self.cache)
        return output.logits, output.memory, output.compression_loss

    def decoder(self, batch: int, at: int) -> Step:
        return self._cached(batch, at, "full")

    def decoders(self) -> dict[str, Callable[[int, int], Step]]:
        rounded = {f"{self.name}, {precision}": partial(self._cached, precision=precision) for precision in ROUNDED}
        return {self.name: self.decoder, **rounded}

    @torch.no_grad()
    def _cached(self, batch: int, at: int, precision: Precision) -> Step:
        """Return the decoder of this package, as `Stream` uses it."""
        self.model.eval()
        memory = self.full_memory(batch)
        if at:
            memory = self.model(self.prefix(batch, at), memory).memory
        return CachedDecoder(self.model, memory, precision).step


class OursBf16(Ours):
    """The same in automatic mixed precision."""

    name, precision = "ours, bf16", "bf16"

    def loss(self) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return super().loss()


class WithoutCompression(Ours):
    """This package as a Transformer-XL: the same network with recent memory only, of equal attention width."""

    name, compression = "ours without compression", ""

    def build(self) -> nn.Module:
        return CompressiveTransformer(self.work.without_compression)


def reading_one_by_one(contender: Contender, batch: int, at: int) -> Step:
    """Return a decoder that calls its model with single tokens."""
    contender.model.eval()
    memory = contender.full_memory(batch)
    if at:
        _, memory, _ = contender.read(contender.prefix(batch, at), memory)

    @torch.no_grad()
    def step(tokens: Tensor) -> Tensor:
        nonlocal memory
        logits, memory, _ = contender.read(tokens[:, None], memory)
        return logits[:, -1]

    return step
