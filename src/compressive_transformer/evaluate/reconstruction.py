"""Attention reconstruction error (Algorithm 2) of any compression function, beside that of mean pooling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..attention import Projected
from ..compression import attention_reconstruction, match_rms
from ..data import Split
from ..memory import SlotLayout, new_groups
from ..model import CompressiveTransformer
from .reading import read_split

Commits = dict[int, tuple[Projected, Tensor, Tensor]]
"""By layer, the projections, evicted groups and compressed states of its commit."""


@dataclass(frozen=True)
class Reconstruction:
    """Squared error / squared target of attention reconstruction (Algorithm 2), one number per layer.

    0 is perfect, 1 is as bad as reading zeros. Layers that never evict have 0.
    """

    error: tuple[float, ...]
    """Error of the compression functions of the model."""
    mean_pooling: tuple[float, ...]
    """Error of mean pooling of the same evicted states."""

    @classmethod
    def from_squares(cls, squares: Tensor) -> Self:
        """Return the relative errors of summed `squares [n_layers, 3]`, see `squares_of_commits`."""
        error, pooled, target = squares.unbind(1)
        target = target.clamp(min=torch.finfo(target.dtype).tiny)
        return cls(tuple((error / target).tolist()), tuple((pooled / target).tolist()))


def measure_reconstruction(model: CompressiveTransformer, split: Split, *, batch_size: int = 8) -> Reconstruction:
    """Measure how well compressed memory replaces the evicted states, over all commits while a split is read.

    The measure is the same whatever the model's `compression_loss`, and works for functions without parameters.

    Args:
        model: The model.
        split: The documents, read from their starts.
        batch_size: Documents that are read side by side. The result does not depend on it.

    Returns:
        The error of each layer, and that of mean pooling.

    Raises:
        CompressiveError: The split was prepared with another tokenizer than the model's, or `batch_size` is less than
            1.
    """
    totals = torch.zeros(model.config.n_layers, 3, dtype=torch.float64)
    with watched_commits(model) as commits:
        for _, memory, output in read_split(model, split, batch_size=batch_size):
            with torch.no_grad():
                totals += squares_of_commits(model, commits, before=memory.seen, after=output.memory.seen)
            commits.clear()
    return Reconstruction.from_squares(totals)


def squares_of_commits(model: CompressiveTransformer, commits: Commits, *, before: Tensor, after: Tensor) -> Tensor:
    """Return summed squares `[n_layers, 3]` of the commits of one call: error, error of mean pooling, target.

    `before` and `after [batch]` are the tokens seen before and after the call. A layer without a commit has 0.
    """
    sums = torch.zeros(model.config.n_layers, 3, dtype=torch.float64)
    for layer, (projected, evicted, new) in commits.items():
        attention: Any = model.blocks[layer].attention
        counts = new_groups(SlotLayout.of(model.config, layer), before=before, after=after)
        queries = attention.content_queries(projected.queries)  # of whole segments
        target_slots = attention.frozen_keys_values(evicted.flatten(1, 2))
        new = match_rms(new, evicted) if model.blocks[layer].matches_rms else new
        pooled = evicted.mean(2)
        pooled = match_rms(pooled, evicted) if model.config.compressed_scale == "rms" else pooled
        for column, compressed in enumerate((new, pooled)):
            slots = attention.frozen_keys_values(compressed)
            squares, target = attention_reconstruction(queries, target_slots, slots, counts=counts)
            sums[layer, column], sums[layer, 2] = squares.double().sum(), target.double().sum()
    return sums


@contextlib.contextmanager
def watched_commits(model: CompressiveTransformer) -> Iterator[Commits]:
    """Yield a dictionary that the model fills with the commits of each layer while it reads a segment of each lane.

    Entries stay until the layer commits again; clear it between calls.
    """
    projected: dict[int, Projected] = {}
    commits: Commits = {}
    handles = []

    def watch(layer: int, attention: Any, compression: Any) -> None:
        def reading(_: Any, arguments: tuple[Any, ...]) -> None:
            projected[layer] = arguments[0]

        def compressing(_: Any, arguments: tuple[Any, ...], new: Tensor) -> None:
            commits[layer] = (projected[layer], arguments[0][:, :, : compression.compression_rate], new)

        handles.append(attention.register_forward_pre_hook(reading))
        handles.append(compression.register_forward_hook(compressing))

    for layer, block in enumerate(model.blocks):
        if block.compression is not None:
            watch(layer, block.attention, block.compression)
    try:
        yield commits
    finally:
        for handle in handles:
            handle.remove()
