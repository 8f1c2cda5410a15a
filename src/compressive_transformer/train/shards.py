"""Parameters in shards over processes (FSDP2): how they are cut, gathered and taken up again.

Whole tensors are what checkpoints hold, so a run may go on with shards or without. All processes call these functions
alike, since they talk to one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from ..model import CompressiveTransformer
from ..model.block import Block
from .distributed import Processes


def shard(model: CompressiveTransformer, processes: Processes) -> None:
    """Leave each process its share of all parameters; a block's are gathered while it computes."""
    # Only who shards waits for these imports.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(processes.device.type, (processes.world,))
    for block in cast(Iterable[Block], model.blocks):
        # Gradients of a block are reduced together, those of f_c too where a process commits nothing.
        block.compression_in_graph = True
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_shard(tensor: Tensor) -> bool:
    """Whether this process holds only a part of it: a DTensor, whose class few ever need to import."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this process may hold a shard."""
    full: Tensor = tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return full


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as `like`, a parameter, is held: on its device, in shards if it is and their shapes agree."""
    tensor = tensor.to(like.device)
    if not is_shard(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements)


def gathered(model: CompressiveTransformer) -> CompressiveTransformer:
    """A model whose parameters are whole: this one, or a copy of what processes hold in shards."""
    if not any(map(is_shard, model.parameters())):
        return model
    with torch.device("meta"):
        copy = CompressiveTransformer(model.config)
    copy.load_state_dict({name: whole(value) for name, value in model.state_dict().items()}, assign=True)
    return copy.train(model.training)
