"""Configs of models and training runs: frozen dataclasses, validated on construction."""

from .checks import check_range, check_types, shortened
from .model import LayerMemory, ModelConfig, PerLayer
from .train import TrainConfig

__all__ = ["LayerMemory", "ModelConfig", "PerLayer", "TrainConfig", "check_range", "check_types", "shortened"]
