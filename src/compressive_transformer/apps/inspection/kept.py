"""What the function most-used keeps: which tokens, and how much attention they had received."""

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

from ...compression.functions import MostUsed
from ...memory import new_groups
from ...model import CompressiveTransformer


@dataclass(frozen=True, eq=False)
class KeptStates:
    """What one layer kept of all that it evicted while a text was read."""

    layer: int
    evicted: int
    """States that left recent memory, the start of the document counted."""
    tokens: NDArray[np.int64]
    """The tokens of the text whose states were kept, in order; -1 is the start."""
    usage: float
    """Mean usage of the kept states: the attention that one received from a token, a mean over heads."""
    usage_of_others: float
    """The same of the evicted states that were not kept."""


class KeptWatch:
    """Follows the layers of a model that compress by most-used, while one lane reads a segment at a time."""

    def __init__(self, model: CompressiveTransformer) -> None:
        blocks: Any = model.blocks
        self._layouts = model.layouts
        self._functions = {n: b.compression for n, b in enumerate(blocks) if isinstance(b.compression, MostUsed)}
        self._usage: dict[int, Tensor] = {}
        self._kept = {layer: array("q") for layer in self._functions}
        self._sums = {layer: torch.zeros(3, dtype=torch.float64) for layer in self._functions}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, `read` can be told what was read."""

        def watch(layer: int) -> Callable[..., None]:
            def compressing(_: Any, arguments: tuple[Any, ...]) -> None:
                self._usage[layer] = arguments[1]

            return compressing

        handles = [own.register_forward_pre_hook(watch(layer)) for layer, own in self._functions.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def read(self, *, before: Tensor, after: Tensor) -> None:
        """Take in what was committed while the lane went from `before [1]` to `after [1]` tokens."""
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
        """By layer, the token that each filled slot of compressed memory holds now, as the model counts."""
        return {layer: kept[-self._layouts[layer].compressed_length :].tolist() for layer, kept in self._kept.items()}

    def states(self) -> tuple[KeptStates, ...]:
        """What was kept of all that was read."""
        found = []
        for layer, kept in self._kept.items():
            evicted, usage, usage_of_kept = self._sums[layer].tolist()
            others = evicted - len(kept)
            tokens = np.array(kept, np.int64) - 1
            means = usage_of_kept / max(len(kept), 1), (usage - usage_of_kept) / max(others, 1)
            found.append(KeptStates(layer, int(evicted), tokens, *means))
        return tuple(found)
