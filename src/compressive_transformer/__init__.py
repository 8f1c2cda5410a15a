"""The Compressive Transformer (Rae et al. 2019): language models whose memory compresses instead of forgetting."""

from .checkpoint import load, save
from .compression import COMPRESSIONS, Compression
from .config import ModelConfig, TrainConfig
from .data import Corpus, Segment, Split, lanes, open_corpus, prepare
from .data.tokenizers import Tokenizer, load_tokenizer
from .errors import CompressiveError, CompressiveWarning
from .evaluate import ByFrequency, ByPosition, Evaluation, Score, compare_runs, evaluate, sweep
from .generate import Sampling, ScoredLine, Stream, score_lines
from .memory import Memory
from .model import CompressiveTransformer, Output, next_token_loss, with_compression, with_lengths
from .train import train

__all__ = [
    "COMPRESSIONS",
    "ByFrequency",
    "ByPosition",
    "Compression",
    "CompressiveError",
    "CompressiveTransformer",
    "CompressiveWarning",
    "Corpus",
    "Evaluation",
    "Memory",
    "ModelConfig",
    "Output",
    "Sampling",
    "Score",
    "ScoredLine",
    "Segment",
    "Split",
    "Stream",
    "Tokenizer",
    "TrainConfig",
    "compare_runs",
    "evaluate",
    "lanes",
    "load",
    "load_tokenizer",
    "next_token_loss",
    "open_corpus",
    "prepare",
    "save",
    "score_lines",
    "sweep",
    "train",
    "with_compression",
    "with_lengths",
]
