"""One process or several of one job, as `torchrun` starts them."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Processes:
    """This process among all of its job."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.world > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def wait(self) -> None:
        """Return once all processes have come here."""
        if self.world > 1:
            distributed.barrier()


@contextlib.contextmanager
def init_distributed() -> Iterator[Processes]:
    """The job that the environment of `torchrun` describes; without one, this process alone.

    Processes talk over NCCL where there are GPUs, one for each, else over gloo.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if world == 1:
        yield Processes(0, 1, device)
        return
    if cuda:
        torch.cuda.set_device(device)
    # A group that is there already stays: one process cannot safely leave its group and form it again.
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if cuda else "gloo")
        atexit.register(distributed.destroy_process_group)
    yield Processes(distributed.get_rank(), world, device)
