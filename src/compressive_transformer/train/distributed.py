"""Distributed training: the processes that `torchrun` starts, and parameters sharded over them (FSDP2)."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from ..memory import LayerMemory
from ..model import CompressiveTransformer, from_parameters
from ..model.block import Block, CompressionLoss

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Rank of this process, number of processes, and the device of this process."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes files and prints."""
        return self.rank == 0

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        if self.world > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return True if `flag` is True in any process."""
        return flag if self.world == 1 else bool(self.all_reduce(torch.tensor(float(flag), device=self.device)))

    def gather(self, value: T) -> list[T]:
        """Return the picklable `value` of each process, in the order of ranks."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            distributed.barrier()


@contextlib.contextmanager
def init_distributed() -> Iterator[Processes]:
    """Yield the processes that the environment of `torchrun` describes; without it, this process alone.

    The backend is NCCL with one GPU per process, else gloo.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if world == 1:
        yield Processes(0, 1, device)
        return
    if cuda:
        torch.cuda.set_device(device)
    # An existing group stays: a process cannot safely leave its group and form it again.
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if cuda else "gloo")
        atexit.register(distributed.destroy_process_group)
    yield Processes(distributed.get_rank(), world, device)


# Sharding. Checkpoints hold full tensors, so a run can resume with or without it. Each function below is a collective:
# all processes must call it.


def shard(model: CompressiveTransformer, processes: Processes) -> None:
    """Keep a shard of all parameters in each process; those of a block are gathered while it computes."""
    # Imports that only sharding pays for.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(processes.device.type, (processes.world,))
    for block in cast(Iterable[Block], model.blocks):
        block.register_forward_hook(_with_zero_loss)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _with_zero_loss(
    block: Block, _: Any, result: tuple[Tensor, LayerMemory, CompressionLoss | None]
) -> tuple[Tensor, LayerMemory, CompressionLoss | None]:
    """Add a zero to the loss of f_c: gradients of a block are reduced together, also where nothing commits."""
    hidden, memory, loss = result
    if not (torch.is_grad_enabled() and block.learns_to_compress):
        return result
    parameters = [p for name, p in block.named_parameters() if name.startswith("compression")]
    zero = 0 * torch.stack([p.sum() for p in parameters]).sum()
    loss = CompressionLoss(zero, zero.detach()) if loss is None else loss._replace(loss=loss.loss + zero)
    return hidden, memory, loss


def is_sharded(tensor: Tensor) -> bool:
    """Return True if this process holds only a part of the tensor, a DTensor."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered if it is sharded."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a full tensor on the device of `like`, and sharded as `like` if their shapes agree."""
    tensor = tensor.to(like.device)
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements)


def unshard(model: CompressiveTransformer) -> CompressiveTransformer:
    """Return the model itself, or an unsharded copy of a sharded one."""
    if not any(map(is_sharded, model.parameters())):
        return model
    return from_parameters(model.config, {k: full_tensor(v) for k, v in model.state_dict().items()}, model)
