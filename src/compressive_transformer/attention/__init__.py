"""Attention over [compressed | recent | segment], in the form that the config's `position` names."""

from ..config import ModelConfig
from ..errors import CompressiveError
from .base import Attention, Projected
from .cpu import CpuRelativeAttention
from .relative import Kernel, RelativeAttention, masked_attention, relative_attention
from .rotary import RotaryAttention, rotated

__all__ = [
    "Attention",
    "CpuRelativeAttention",
    "Kernel",
    "Projected",
    "RelativeAttention",
    "RotaryAttention",
    "build_attention",
    "masked_attention",
    "relative_attention",
    "rotated",
]


def build_attention(config: ModelConfig, layer: int, kernel: Kernel | None = None) -> Attention:
    """Return the attention of one layer, with the positions that `config.position` names.

    Raises:
        CompressiveError: There is a `kernel`, and positions are rotary.
    """
    if config.position == "relative":
        return RelativeAttention(config, layer, kernel)
    if kernel is not None:
        raise CompressiveError("an attention kernel needs position = 'relative'; rotary attention is always fused")
    return RotaryAttention(config)
