"""The cache of `generate`: a `Memory`, or a cached decoder ahead of it, and the number of columns of ids read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import CompressiveError
from ..generate.decoder import CachedDecoder  # not of the package: an export would take all of it
from ..memory import Memory
from ..model import CompressiveTransformer


class CompressiveTransformerCache:
    """Memory of the rows that were read, in the place of keys and values in transformers. It never grows.

    A call of the model changes its cache, as in transformers; `memory` itself is replaced, never changed, so
    `copy.copy(cache)` is an independent cache at no cost.

    Args:
        memory: Memory that has read `columns` columns of ids; None to start with nothing read.
        columns: Columns of ids that were read, with those of padding.
    """

    # Read by transformers: recurrent layers would get only new ids; a static cache could be compiled; and the end of
    # the text could be cut off from the cache.
    is_linear = (False,)
    is_compileable = False
    is_croppable = False

    def __init__(self, memory: Memory | None = None, columns: int = 0) -> None:
        self._memory = memory
        self._decoder: CachedDecoder | None = None
        self.columns = columns

    @property
    def memory(self) -> Memory | None:
        """Memory of all lanes; None before anything was read."""
        return self._memory if self._decoder is None else self._decoder.memory

    @memory.setter
    def memory(self, memory: Memory | None) -> None:
        self._memory, self._decoder = memory, None

    def end_decoding(self) -> None:
        """Drop the decoder of `step`, and with it the weights that it has packed; memory stays."""
        self.memory = self.memory

    @property
    def batch_size(self) -> int | None:
        """Number of lanes; None before anything was read."""
        if self._decoder is not None:
            return self._decoder.batch_size
        return None if self._memory is None else self._memory.batch_size

    def step(self, model: CompressiveTransformer, tokens: Tensor) -> Tensor:
        """Read one more token of each lane with a cached decoder that continues from memory.

        The decoder packs the weights that `model` has at its first step. Setting `memory` and `end_decoding` drop it.

        Args:
            model: The model that has read the memory.
            tokens: Token ids `[batch]`.

        Returns:
            Logits `[batch, vocab_size]` of the next token.
        """
        if self._decoder is None:
            assert self._memory is not None
            self._decoder = CachedDecoder(model, self._memory)
        return self._decoder.step(tokens)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns of ids that were read, with those of padding, which did not enter memory."""
        return self.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return -1: there is no limit."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each lane b by lane `beam_idx[b]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each lane `repeats` times, side by side."""
        if self.batch_size is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the lanes `indices` `[new batch]`, in that order; a lane may be repeated."""
        indices = indices.to("cpu", torch.int64)
        if self._decoder is not None:
            self._decoder.select(indices)
        elif self._memory is not None:
            self._memory = self._memory.select(indices)

    def crop(self, max_length: int) -> None:
        """Raise CompressiveError: states that were compressed cannot be restored."""
        raise CompressiveError(
            f"the cache cannot be cropped to {max_length} columns: compressed states cannot be restored; "
            "use a copy.copy(cache) made earlier"
        )

    def reset(self) -> None:
        """Clear the cache: the next ids start new documents."""
        self.memory, self.columns = None, 0

    def __getstate__(self) -> dict[str, Any]:
        # Copies are independent: the decoder, which changes with each step, stays here.
        return {**self.__dict__, "_memory": self.memory, "_decoder": None}
