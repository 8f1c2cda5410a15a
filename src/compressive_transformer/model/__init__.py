"""The network: `block` is the paper's Algorithm 1, `model` takes a stream through its blocks."""

from .checks import evaluation_mode
from .derive import from_parameters, with_compression, with_lengths
from .embedding import IGNORE_INDEX, next_token_loss, token_nats
from .model import CompressiveTransformer, Output

__all__ = [
    "IGNORE_INDEX",
    "CompressiveTransformer",
    "Output",
    "evaluation_mode",
    "from_parameters",
    "next_token_loss",
    "token_nats",
    "with_compression",
    "with_lengths",
]
