"""What processes hold for themselves, taken up by another number of them: no lane is lost, doubled or moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressive_transformer.errors import CompressiveError
from compressive_transformer.memory import Memory, join
from compressive_transformer.train.resume import memories_from, named_memories, reshard
from runs import tiny_model

LANES = 12


def owns_of(whole: Memory, *, world: int, parts: int) -> list[dict[str, Tensor]]:
    """What processes hold when each has its share of the lanes, in parts; of f_c only the first has a gradient."""
    size, owns = LANES // (world * parts), []
    for rank in range(world):
        firsts = [(rank * parts + part) * size for part in range(parts)]
        own = named_memories([whole.select(torch.arange(first, first + size)) for first in firsts])
        own["gradient.a"] = torch.full((2,), float(rank))
        if rank == 0:
            own["gradient.b"] = torch.full((3,), 6.0)
        owns.append(own)
    return owns


@pytest.mark.parametrize("compression", ["mean", "most-used"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_every_lane_keeps_its_memory_and_its_place(before: int, after: int, parts: int, compression: str) -> None:
    model = tiny_model(compression=compression).eval()
    lengths = 5 + torch.arange(LANES)  # some in the midst of a segment
    tokens = torch.arange(LANES * 20).view(LANES, 20) % 256
    whole = model(tokens, None, lengths).memory
    owns = owns_of(whole, world=before, parts=parts)
    shares = [reshard(owns, micro_batches=parts, rank=rank, world=after) for rank in range(after)]
    again = join([memory for share in shares for memory in memories_from(share, parts)])
    assert again.state_dict().keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    for share in shares:
        # An update averages over processes: of equal shares that is the mean over those that were before.
        assert share["gradient.a"].tolist() == [(before - 1) / 2] * 2
        assert share["gradient.b"].tolist() == [6.0 / before] * 3
        assert {memory.batch_size for memory in memories_from(share, parts)} == {LANES // (after * parts)}


def test_lanes_that_cannot_be_shared_out_are_refused() -> None:
    owns = owns_of(tiny_model().empty_memory(LANES), world=1, parts=1)
    with pytest.raises(CompressiveError, match="its 12 lanes cannot be split into 5 equal parts"):
        reshard(owns, micro_batches=1, rank=4, world=5)
