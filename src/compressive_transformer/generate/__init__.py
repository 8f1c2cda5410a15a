"""Text out of a model: a stream that reads, scores and writes, and a decoder with cached keys and values."""

from .decoder import CachedDecoder
from .layers import has_plain_layers
from .line_scores import ScoredLine, score_lines
from .packed import PRECISIONS, Precision, check_precision
from .sampling import Sampling
from .stream import Stream
from .stream_state import StreamState

__all__ = [
    "PRECISIONS",
    "CachedDecoder",
    "Precision",
    "Sampling",
    "ScoredLine",
    "Stream",
    "StreamState",
    "check_precision",
    "has_plain_layers",
    "score_lines",
]
