"""States that a selecting function (most-used) keeps: their tokens, and the attention that they had received."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...memory import new_groups
from ...model import CompressiveTransformer


@dataclass(frozen=True, eq=False)
class KeptStates:
    """Evicted states that one layer kept while a text was read."""

    layer: int
    evicted: int
    """States that left recent memory, with that of the document's start."""
    tokens: NDArray[np.int64]
    """Tokens whose states were kept, in order; -1 is the start."""
    usage: float
    """Mean usage of the kept states: attention received from a token, a mean over heads."""
    usage_of_others: float
    """Mean usage of the other evicted states."""


class KeptWatch:
    """Recorder of the layers whose function selects states, while one lane reads a segment at a time."""

    def __init__(self, model: CompressiveTransformer) -> None:
        blocks: Any = model.blocks
        self._layouts = model.layouts
        functions = {layer: block.compression for layer, block in enumerate(blocks)}
        self._functions = {layer: f for layer, f in functions.items() if f is not None and f.selects}
        self._usage: dict[int, Tensor] = {}
        self._kept = {layer: array("q") for layer in self._functions}
        self._sums = {layer: torch.zeros(3, dtype=torch.float64) for layer in self._functions}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record usage inside the `with` block, for `read`."""

        def watch(layer: int) -> Callable[..., None]:
            def compressing(_: Any, arguments: tuple[Any, ...]) -> None:
                self._usage[layer] = arguments[1]

            return compressing

        handles = [f.register_forward_pre_hook(watch(layer)) for layer, f in self._functions.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def read(self, *, before: Tensor, after: Tensor) -> None:
        """Record the commit, if any, between `before [1]` and `after [1]` tokens."""
        for layer, usage in self._usage.items():
            layout = self._layouts[layer]
            new = int(new_groups(layout, before=before, after=after))
            if not new:
                continue
            rate, groups = layout.compression_rate, usage.shape[1]
            first = (int(layout.compressed_groups(after)) - groups) * rate  # the token at the oldest place, if any
            places = self._functions[layer].kept(usage)[0, groups - new :].cpu()
            self._kept[layer].extend((first + places).tolist())
            received = usage[0].flatten().double().cpu()
            evicted = received[received.isfinite()]
            self._sums[layer] += torch.stack([torch.tensor(float(len(evicted))), evicted.sum(), received[places].sum()])
        self._usage.clear()

    def slots(self) -> dict[int, list[int]]:
        """Return by layer the token in each filled slot of compressed memory, as the model counts."""
        return {layer: kept[-self._layouts[layer].compressed_length :].tolist() for layer, kept in self._kept.items()}

    def states(self) -> tuple[KeptStates, ...]:
        """Return the kept states of the whole text, layer by layer."""
        states = []
        for layer, kept in self._kept.items():
            evicted, usage, usage_of_kept = self._sums[layer].tolist()
            others = evicted - len(kept)
            tokens = np.array(kept, np.int64) - 1
            means = usage_of_kept / max(len(kept), 1), (usage - usage_of_kept) / max(others, 1)
            states.append(KeptStates(layer, int(evicted), tokens, *means))
        return tuple(states)
