"""What each process of a run holds for itself, by name, and how another number of processes takes it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import CompressiveError
from ..memory import Memory, join
from .distributed import Processes
from .resume import ResumePoint


def named_memories(memories: Sequence[Memory]) -> dict[str, Tensor]:
    """The memories of the parts of a process's lanes, as `memories_of` reads them."""
    return {
        f"memory-{part}.{name}": tensor
        for part, memory in enumerate(memories)
        for name, tensor in memory.state_dict().items()
    }


def memories_of(own: Mapping[str, Tensor], parts: int) -> list[Memory]:
    """What `named_memories` named. Raises CompressiveError where tensors are missing."""
    memories = []
    for part in range(parts):
        prefix = f"memory-{part}."
        named = {name.removeprefix(prefix): tensor for name, tensor in own.items() if name.startswith(prefix)}
        memories.append(Memory.from_state_dict(named))
    return memories


def own_state(point: ResumePoint, before: int, *, parts: int, processes: Processes) -> dict[str, Tensor]:
    """What this process takes up of the state that the `before` processes of a checkpoint held for themselves.

    Raises CompressiveError where some of it is missing.
    """
    if type(before) is not int or before < 1:  # it comes from a file
        raise CompressiveError(f"it is of {before!r} processes")
    if before == processes.world:
        return point.process(processes.rank)
    owns = [point.process(rank) for rank in range(before)]
    return reshard(owns, parts=parts, rank=processes.rank, world=processes.world)


def reshard(owns: Sequence[Mapping[str, Tensor]], *, parts: int, rank: int, world: int) -> dict[str, Tensor]:
    """What process `rank` of `world` takes up of what other processes, `owns`, held for themselves.

    Every lane keeps its memory: lanes stay in order and are cut into `parts` a process. What was accumulated of a
    gradient is averaged over processes when an update is made, so each takes the mean. Random states stay behind.

    Raises CompressiveError where lanes are too many or too few to be shared out.
    """
    whole = join([memory for own in owns for memory in memories_of(own, parts)])
    if whole.batch_size % (world * parts):
        raise CompressiveError(f"it holds {whole.batch_size} lanes, which {world * parts} parts cannot share")
    lanes = torch.arange(whole.batch_size).chunk(world * parts)
    tensors = named_memories([whole.select(lanes[rank * parts + part]) for part in range(parts)])
    for name in {name for own in owns for name in own if name.startswith("gradient.")}:
        # A process whose lanes evicted nothing has no gradient of f_c.
        tensors[name] = torch.stack([own[name] for own in owns if name in own]).sum(0) / len(owns)
    return tensors
