"""The cache of `generate`: a `Memory`, or the decoder that is ahead of it, and how many columns of ids it has read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import CompressiveError
from ..generate import CachedDecoder
from ..memory import Memory
from ..model import CompressiveTransformer


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
        self._memory = memory
        self._decoder: CachedDecoder | None = None
        self.columns = columns

    @property
    def memory(self) -> Memory | None:
        """What the lanes remember; None before anything was read."""
        return self._memory if self._decoder is None else self._decoder.memory

    @memory.setter
    def memory(self, memory: Memory | None) -> None:
        self._memory, self._decoder = memory, None

    @property
    def batch_size(self) -> int | None:
        """Number of lanes; None before anything was read."""
        if self._decoder is not None:
            return self._decoder.batch_size
        return None if self._memory is None else self._memory.batch_size

    def step(self, model: CompressiveTransformer, tokens: Tensor) -> Tensor:
        """Logits `[batch, vocab_size]` after one more token of each lane, read by a decoder that goes on from memory.

        The decoder has packed the weights of `model` as they were at its first step. Setting `memory`, to what it is
        too, ends it.
        """
        if self._decoder is None:
            assert self._memory is not None
            self._decoder = CachedDecoder(model, self._memory)
        return self._decoder.step(tokens)

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
        if self.batch_size is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The lanes `indices [new batch]` only, in that order; a lane may be repeated."""
        indices = indices.to("cpu", torch.int64)
        if self._decoder is not None:
            self._decoder.select(indices)
        elif self._memory is not None:
            self._memory = self._memory.select(indices)

    def crop(self, max_length: int) -> None:
        """Refused with CompressiveError: what compression has replaced cannot be brought back."""
        raise CompressiveError(
            f"the cache cannot be cut to {max_length} columns, since memory is compressed as it is read; "
            "keep a copy.copy(cache) from before"
        )

    def reset(self) -> None:
        """Forget all: new documents begin."""
        self.memory, self.columns = None, 0

    def __getstate__(self) -> dict[str, Any]:
        # A copy goes its own way: the decoder, which changes as it steps, stays here.
        return {**self.__dict__, "_memory": self.memory, "_decoder": None}
