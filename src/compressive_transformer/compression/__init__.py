"""Compression functions f_c (Sec. 3.2) and the losses that train them: `functions` and `losses`."""

from .functions import (
    COMPRESSIONS,
    AttentionPool,
    Compression,
    Convolution,
    DilatedConvolutions,
    MaxPool,
    MeanPool,
    MostUsed,
    OverlappingConvolution,
    build_compression,
    match_rms,
)
from .losses import Decoder, attention_reconstruction, auto_encoding, mean_and_relative

__all__ = [
    "COMPRESSIONS",
    "AttentionPool",
    "Compression",
    "Convolution",
    "Decoder",
    "DilatedConvolutions",
    "MaxPool",
    "MeanPool",
    "MostUsed",
    "OverlappingConvolution",
    "attention_reconstruction",
    "auto_encoding",
    "build_compression",
    "match_rms",
    "mean_and_relative",
]
