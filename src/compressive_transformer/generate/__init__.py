"""Decoding token by token: cached keys and values, packed weights, quantised if asked for."""

from .decoder import CachedDecoder
from .lanes import LaneDecoder
from .layers import is_plain
from .packed import PRECISIONS, Precision, check_precision

__all__ = ["PRECISIONS", "CachedDecoder", "LaneDecoder", "Precision", "check_precision", "is_plain"]
