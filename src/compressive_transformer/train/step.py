"""Forward pass of one training step: the next segments of each lane, read one after another with their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import TrainConfig
from ..data.lanes import Segment
from ..memory import Memory
from ..model import CompressiveTransformer
from .distributed import Processes, shard


@dataclass(frozen=True, eq=False)
class StepLosses:
    """Losses of a window, and the memory after it, detached."""

    nats: Tensor
    """Scalar, the task loss summed over all targets, in double precision."""
    compression_loss: Tensor
    """Scalar, the mean over segments of `Output.compression_loss`."""
    reconstruction_error: Tensor
    """`[n_layers]`, `Output.reconstruction_error` summed over segments."""
    commits: Tensor
    """`[n_layers]`, number of segments in which it was measured."""
    memory: Memory


class SegmentWindow(nn.Module):
    """Reader of consecutive segments; gradients reach back to the start of the window.

    In a window of one segment the task loss never reaches a compression function, since what a commit compresses
    is read from the next segment on. With `compression_loss = "bptt"` compressed states stay in the graph, so in
    longer windows it does. Hidden states enter memory detached all the same: the network's gradient is that of
    single segments.

    A single module, so that data-parallel training sees one forward and one backward pass for all of it.
    """

    def __init__(self, model: CompressiveTransformer, precision: Literal["fp32", "bf16"]) -> None:
        super().__init__()
        self.model = model
        self.precision = precision

    def forward(self, segments: Sequence[Segment], memory: Memory) -> StepLosses:
        """Read `segments`, starting from `memory` and resetting it in lanes that start a document."""
        device, nats, outputs = self.model.embedding.weight.device, [], []
        for segment in segments:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                memory = memory.reset(segment.starts)
                output = self.model(segment.tokens.to(device), memory, segment.lengths, segment.targets.to(device))
            nats.append(output.nats.sum())
            outputs.append(output)
            memory = output.memory
        errors = torch.stack([output.reconstruction_error for output in outputs])
        return StepLosses(
            nats=torch.stack(nats).sum(),
            compression_loss=torch.stack([output.compression_loss for output in outputs]).mean(),
            reconstruction_error=errors.sum(0),
            commits=(errors > 0).sum(0),
            memory=memory.detach(),
        )


def parallel_window(model: CompressiveTransformer, config: TrainConfig, processes: Processes) -> nn.Module:
    """Return a window that averages gradients over all processes, sharding the parameters if `config.sharded`."""
    window = SegmentWindow(model, config.precision)
    if processes.world == 1:
        return window
    if config.sharded:
        shard(model, processes)
        return window
    # A step whose lanes all read short documents compresses nothing, so f_c may get no gradient.
    return nn.parallel.DistributedDataParallel(window, find_unused_parameters=True)


def split_micro_batches(segments: Sequence[Segment], count: int) -> list[list[Segment]]:
    """Return the segments split into `count` equal groups of lanes; `total_targets` stays that of all lanes."""

    def split(segment: Segment, index: int) -> Segment:
        tensors: dict[str, Any] = {
            name: value.chunk(count)[index] for name, value in segment._asdict().items() if isinstance(value, Tensor)
        }
        return segment._replace(**tensors)

    return [[split(segment, index) for segment in segments] for index in range(count)]
