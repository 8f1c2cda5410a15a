"""Attention over [compressed | recent | segment], in the form that the config's `position` names."""

from ..config import ModelConfig
from .base import Attention, Projected
from .cpu import CpuRelativeAttention
from .relative import RelativeAttention, masked_attention, relative_attention
from .rotary import RotaryAttention, rotated

__all__ = [
    "Attention",
    "CpuRelativeAttention",
    "Projected",
    "RelativeAttention",
    "RotaryAttention",
    "build_attention",
    "masked_attention",
    "relative_attention",
    "rotated",
]


def build_attention(config: ModelConfig, layer: int) -> Attention:
    """The attention of one layer, with the positions that `config.position` names."""
    return RotaryAttention(config) if config.position == "rotary" else RelativeAttention(config, layer)
