"""The network: `block` is the paper's Algorithm 1, `model` takes a stream through its blocks."""

from .derive import with_compression, with_lengths
from .embedding import IGNORE_INDEX, next_token_loss, token_nats
from .model import CompressiveTransformer, Output

__all__ = [
    "IGNORE_INDEX",
    "CompressiveTransformer",
    "Output",
    "next_token_loss",
    "token_nats",
    "with_compression",
    "with_lengths",
]
