"""Configs of models and training runs: frozen dataclasses, validated on construction."""

from .checks import check_range, check_types, shortened
from .model import LayerSizes, ModelConfig, PerLayer
from .train import TrainConfig

__all__ = ["LayerSizes", "ModelConfig", "PerLayer", "TrainConfig", "check_range", "check_types", "shortened"]
