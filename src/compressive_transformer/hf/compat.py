"""Names that differ between the releases of transformers that are supported (5.12 and newer)."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin

from ..errors import CompressiveError
from .cache import CompressiveTransformerCache

# Release 5.24 renamed `past_key_values` to `cache`. The model takes both names, and returns the one of this release.
_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _PARAMETERS else "past_key_values"


def one_cache(cache: Any, past_key_values: Any) -> CompressiveTransformerCache:
    """Return the cache, whichever of its two names it has, or a new one."""
    if cache is None:
        cache = past_key_values
    if cache is None:
        return CompressiveTransformerCache()
    if past_key_values is not None and past_key_values is not cache:
        raise CompressiveError("past_key_values and cache are two names of the same argument: pass one of them")
    if not isinstance(cache, CompressiveTransformerCache):
        raise CompressiveError(
            f"the cache must be a CompressiveTransformerCache, got {type(cache).__name__}: leave it out to start one"
        )
    return cache


def refuse(arguments: dict[str, Any]) -> None:
    """Raise CompressiveError for arguments of transformers that ask for something the model does not have."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise CompressiveError(
                f"`{name}` is not supported: the model takes `input_ids`, computes positions itself and returns "
                "logits; docs/transformers.md lists what is supported"
            )
