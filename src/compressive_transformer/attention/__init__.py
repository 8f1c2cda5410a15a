"""Attention over [compressed | recent | segment], in the form that the config's `position` names."""

from ..config import ModelConfig
from ..errors import CompressiveError
from .base import Attention, Projected
from .cpu import CpuRelativeAttention
from .relative import KERNELS, RelativeAttention, cpu_attention, masked_attention, relative_attention
from .rotary import RotaryAttention, rotated

__all__ = [
    "KERNELS",
    "Attention",
    "CpuRelativeAttention",
    "Projected",
    "RelativeAttention",
    "RotaryAttention",
    "build_attention",
    "cpu_attention",
    "masked_attention",
    "relative_attention",
    "rotated",
]


def build_attention(config: ModelConfig, layer: int, kernel: str = "auto") -> Attention:
    """Return the attention of one layer, with the positions that `config.position` names.

    Raises:
        CompressiveError: The kernel is unknown, or positions are rotary and there is a kernel other than "auto".
    """
    if config.position == "relative":
        return RelativeAttention(config, layer, kernel)
    if kernel != "auto":
        raise CompressiveError(f"attention ({kernel!r}) must be 'auto' with position = 'rotary', which is always fused")
    return RotaryAttention(config)
