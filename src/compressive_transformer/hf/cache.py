"""The cache of `generate`: a `Memory`, and how many columns of ids it has read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CompressiveError
from ..memory import Memory


class CompressiveTransformerCache:
    """What the model keeps of a text, in the place of transformers' keys and values. It never grows.

    A call of the model changes the cache that it is given, as caches of transformers are changed; `memory` itself is
    replaced, never changed, so `copy.copy(cache)` is a second cache that goes its own way at no cost.
    """

    # What transformers asks of a cache: whether its layers are recurrent (they would then be given new ids only),
    # whether it can be compiled as it is, and whether its end can be cut off.
    is_linear = (False,)
    is_compileable = False
    is_croppable = False

    def __init__(self, memory: Memory | None = None, columns: int = 0) -> None:
        """Begin with `memory` that has read `columns` columns of ids; without any, with nothing."""
        self.memory = memory
        self.columns = columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of ids that were read, those of padding included, which did not enter memory."""
        return self.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: there is no limit."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Lane b goes on from what lane `beam_idx[b]` has read."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each lane `repeats` times, side by side."""
        if self.memory is not None:
            self.memory = self.memory.select(torch.arange(self.memory.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The lanes `indices [new batch]` only, in that order; a lane may be repeated."""
        if self.memory is not None:
            self.memory = self.memory.select(indices.to("cpu", torch.int64))

    def crop(self, max_length: int) -> None:
        """Refused with CompressiveError: what compression has replaced cannot be brought back."""
        raise CompressiveError(
            f"the cache cannot be cut to {max_length} columns, since memory is compressed as it is read; "
            "keep a copy.copy(cache) from before"
        )

    def reset(self) -> None:
        """Forget all: new documents begin."""
        self.memory, self.columns = None, 0
