"""Products of a few rows with a packed weight, on which decoding spends most of its time."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import CompressiveError

Precision = Literal["full", "bf16", "int8"]
"""Weights of the decoder: those of the model, rounded to bfloat16, or to 8-bit integers with a scale a row."""
PRECISIONS: tuple[Precision, ...] = ("full", "bf16", "int8")


class FullProduct:
    """Product `states @ weight.T` in the weight's dtype."""

    def __init__(self, weight: Tensor) -> None:
        outputs, inputs = weight.shape
        self.dtype = weight.dtype
        # One row times a wide weight reads a transposed copy about twice as fast on a CPU; a tall one it reads slower.
        self.weight = weight.t().contiguous() if outputs >= inputs else weight.clone().t()

    def __call__(self, states: Tensor, added: Tensor | None = None) -> Tensor:
        """Multiply `[rows, inputs]` to `[rows, outputs]`, plus `added [rows, outputs]` or `[outputs]`."""
        return torch.mm(states, self.weight) if added is None else torch.addmm(added, states, self.weight)


class Bf16Product:
    """Product `states @ weight.T` of operands rounded to bfloat16."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.to(torch.bfloat16, copy=True)

    def __call__(self, states: Tensor, added: Tensor | None = None) -> Tensor:
        """Multiply `[rows, inputs]` to `[rows, outputs]` in bfloat16, plus `added`, whose dtype the sum has."""
        made = functional.linear(states.to(torch.bfloat16), self.weight)
        return made if added is None else added + made


class Int8Product:
    """Product `states @ weight.T` of states in bfloat16 and weights in 8 bits, the largest of each row at ±127."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor) -> None:
        # Scales are rounded first, so that what the numbers are divided by is what they are multiplied with.
        scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny).to(torch.bfloat16)
        numbers = (weight / scales[:, None].to(weight.dtype)).round().clamp(-127, 127).to(torch.int8)
        self.padding = -weight.shape[1] % 16  # the kernel reads 16 numbers at a time, beyond the end if need be
        self.weight = functional.pad(numbers, (0, self.padding))
        self.scales = scales

    def __call__(self, states: Tensor, added: Tensor | None = None) -> Tensor:
        """Multiply `[rows, inputs]` to `[rows, outputs]` in bfloat16, plus `added`, whose dtype the sum has."""
        states = states.to(torch.bfloat16)
        if self.padding:
            states = functional.pad(states, (0, self.padding))
        made: Tensor = torch._weight_int8pack_mm(states, self.weight, self.scales)
        return made if added is None else added + made


Product = FullProduct | Bf16Product | Int8Product


def pack(weight: Tensor, precision: Precision) -> Product:
    """Return the product with `weight [outputs, inputs]`, of which it keeps a copy."""
    kinds: dict[Precision, type[Product]] = {"full": FullProduct, "bf16": Bf16Product, "int8": Int8Product}
    return kinds[precision](weight.detach())


def check_precision(precision: str, device: torch.device) -> None:
    """Raise CompressiveError if the precision is unknown, or not available on this device."""
    if precision not in PRECISIONS:
        raise CompressiveError(f"precision ({precision!r}) must be {' or '.join(map(repr, PRECISIONS))}")
    if precision == "int8" and device.type != "cpu":
        raise CompressiveError(
            f"precision 'int8' needs a model on the CPU, this one is on {device}; use 'bf16' there, or model.cpu()"
        )
