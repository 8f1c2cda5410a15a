"""Optimizer: network and compression functions in separate groups, and the paper's schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import TrainConfig
from ..model import CompressiveTransformer
from .distributed import distribute_like, full_tensor


@dataclass(frozen=True)
class Update:
    """Learning rate of the network and gradient norms, before clipping, of one update."""

    learning_rate: float
    gradient_norm: Tensor
    compression_gradient_norm: Tensor

    @property
    def finite(self) -> bool:
        """True if all gradients are finite; otherwise the update was skipped. Waits for the device."""
        return bool(torch.isfinite(self.gradient_norm + self.compression_gradient_norm))

    def to_dict(self) -> dict[str, float]:
        """Return the values as plain numbers."""
        return {name: float(value) for name, value in vars(self).items()}


class Optimizer:
    """AdamW for the network and for f_c, with separate gradient clipping, weight decay and learning rate.

    Clipping both together would let the compression loss change the network's update. With `optimizer = "muon"` the
    matrices of attention and feed-forward networks are updated by Muon, scaled to the step size of AdamW, so that
    learning rate and weight decay stay the same.
    """

    def __init__(self, model: CompressiveTransformer, config: TrainConfig) -> None:
        self.config = config
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        # f_c itself, and the decoder that auto-encoding trains beside it.
        modules = (".compression.", ".compression_decoder.")
        self.compression = [p for name, p in model.named_parameters() if any(module in name for module in modules)]
        compression = set(self.compression)
        self.network = [p for p in model.parameters() if p not in compression]
        # Matrices decay; gains, biases and the biases u and v of attention (one row a head) do not.
        decays = {p: p.ndim > 1 and not name.endswith("_bias") for name, p in model.named_parameters()}
        hidden = [p for p in self.network if config.optimizer == "muon" and decays[p] and is_hidden(self.names[p])]
        others = [p for p in self.network if p not in set(hidden)]
        groups = [
            {"params": [p for p in others if decays[p]], "weight_decay": config.weight_decay},
            {"params": [p for p in others if not decays[p]], "weight_decay": 0.0},
            {"params": self.compression, "weight_decay": config.compression_weight_decay},
        ]
        groups = [group for group in groups if group["params"]]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)
        self.optimizers: dict[str, torch.optim.Optimizer] = {"adam": self.adam}
        if hidden:
            self.optimizers["muon"] = torch.optim.Muon(
                hidden, lr=0.0, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )

    def step(self, step: int) -> Update:
        """Update the parameters with the learning rates of `step` if all gradients are finite; zero the gradients."""
        norm = full_tensor(nn.utils.clip_grad_norm_(self.network, self.config.max_grad_norm))
        compression_norm = full_tensor(
            nn.utils.clip_grad_norm_(self.compression, self.config.compression_max_grad_norm)
        )
        rate = scheduled(self.config, step, self.config.learning_rate)
        compression_rate = scheduled(self.config, step, self.config.compression_learning_rate)
        update, compression = Update(rate, norm, compression_norm), set(self.compression)
        finite = update.finite
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = compression_rate if group["params"][0] in compression else rate
            if finite:
                optimizer.step()
            optimizer.zero_grad()
        return update

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the optimizers by name, the same in all processes, for `restore`."""
        return {
            f"{kind}.{key}.{self.names[parameter]}": full_tensor(value)
            for kind, optimizer in self.optimizers.items()
            for parameter, values in optimizer.state.items()
            for key, value in values.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this process accumulated since the last update, by name, for `restore`."""
        return {
            f"gradient.{name}": full_tensor(parameter.grad)
            for parameter, name in self.names.items()
            if parameter.grad is not None
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load what `state` and `gradients` returned."""
        parameters = {name: parameter for parameter, name in self.names.items()}
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "gradient":
                parameters[rest].grad = distribute_like(value, parameters[rest])
            elif kind in self.optimizers:
                key, _, target = rest.partition(".")
                parameter = parameters[target]
                self.optimizers[kind].state[parameter][key] = distribute_like(value, parameter)


def is_hidden(name: str) -> bool:
    """Return True if a parameter of the network belongs to attention or to a feed-forward network."""
    return ".attention." in name or ".feed_forward." in name


def scheduled(config: TrainConfig, step: int, highest: float) -> float:
    """Return the learning rate at `step`, counted from 1: linear warm-up from the minimum, then cosine decay to it."""
    lowest = min(config.min_learning_rate, highest)
    if step <= config.warmup_steps:
        return lowest + (highest - lowest) * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * progress)) / 2


def steps_per_update(config: TrainConfig, step: int) -> int:
    """Return the number of steps per update at `step` (Sec. 5.5.1)."""
    late = config.late_update_step and step >= config.late_update_step
    return config.late_steps_per_update if late else config.steps_per_update
