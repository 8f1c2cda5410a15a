"""What compression loses, measured for any function beside mean pooling; reading itself pays nothing for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import Projected
from .compression import attention_reconstruction, matched
from .corpus import Split
from .lanes import Lanes, Segment
from .memory import Memory, SlotLayout, new_groups
from .model import CompressiveTransformer


@dataclass(frozen=True)
class Reconstruction:
    """Squared error / squared target of attention reconstruction (Algorithm 2), one number a layer.

    0 is perfect, 1 as bad as zeros in place of what attention read. 0 too where a layer never evicts.
    """

    error: tuple[float, ...]
    """That of the model's compression functions."""
    mean_pooling: tuple[float, ...]
    """That of mean pooling on the same evicted states."""


def measure_reconstruction(model: CompressiveTransformer, split: Split, *, batch: int = 8) -> Reconstruction:
    """How well compressed memory stands in for what was evicted, over all commits while `split` is read.

    Documents are read from their beginnings, `batch` of them side by side, on which the result does not depend. It
    is the same measure whatever the model's `compression_loss`, also for functions without parameters.

    Raises CompressiveError where the split was made with another tokenizer than the model's.
    """
    split.require_ids(model.config.vocab_size)
    batch, training = min(batch, len(split.documents)), model.training
    memory = model.empty_memory(batch)
    totals = torch.zeros(model.config.n_layers, 3, dtype=torch.float64)
    model.eval()
    try:
        for segment in Lanes(split, batch=batch, length=model.config.segment_length):
            memory, sums = _read(model, segment, memory.reset(segment.starts))
            totals += sums
    finally:
        model.train(training)
    error, pooled, target = totals.unbind(1)
    target = target.clamp(min=torch.finfo(target.dtype).tiny)
    return Reconstruction(tuple((error / target).tolist()), tuple((pooled / target).tolist()))


@torch.no_grad()
def _read(model: CompressiveTransformer, segment: Segment, memory: Memory) -> tuple[Memory, Tensor]:
    """The next memory, and `[n_layers, 3]`: squares of the error, of mean pooling's, and of the target."""
    with _commits(model) as commits:
        after = model(segment.tokens.to(model.embedding.weight.device), memory, segment.lengths).memory
    sums = torch.zeros(model.config.n_layers, 3, dtype=torch.float64)
    for layer, (projected, evicted, new) in commits.items():
        attention: Any = model.blocks[layer].attention
        layout = SlotLayout.of(model.config, layer)
        counts = new_groups(layout, before=memory.seen, after=after.seen)
        queries = attention.content_queries(projected.queries)  # of whole segments
        target_slots = attention.frozen_keys_values(evicted.flatten(1, 2))
        new = matched(new, evicted) if model.blocks[layer].matches else new
        pooled = evicted.mean(2)
        pooled = matched(pooled, evicted) if model.config.compressed_scale == "matched" else pooled
        for at, compressed in enumerate((new, pooled)):
            slots = attention.frozen_keys_values(compressed)
            squares, target = attention_reconstruction(queries, target_slots, slots, counts=counts)
            sums[layer, at], sums[layer, 2] = squares.double().sum(), target.double().sum()
    return after, sums


@contextlib.contextmanager
def _commits(model: CompressiveTransformer) -> Iterator[dict[int, tuple[Projected, Tensor, Tensor]]]:
    """Filled while the model reads: the projections, evicted groups and compressed states of each layer's commit."""
    projected: dict[int, Projected] = {}
    commits: dict[int, tuple[Projected, Tensor, Tensor]] = {}
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
