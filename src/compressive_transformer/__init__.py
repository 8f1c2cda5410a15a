"""The Compressive Transformer (Rae et al. 2019): language models whose memory compresses instead of forgetting."""

from .checkpoint import load, save
from .comparison import Comparison, compare, compare_runs
from .compression import COMPRESSIONS, Compression
from .config import ModelConfig, TrainConfig
from .corpus import Corpus, Document, Split, open_corpus, prepare
from .decoding import CachedDecoder
from .describe import Cost, Description, describe
from .errors import CompressiveError, CompressiveWarning
from .evaluate import ByFrequency, ByPosition, Evaluation, Score, beginnings, dynamic_evaluate, evaluate, sweep
from .experiment import Results, run_experiment
from .inspection import Inspection, InspectionReport, inspect_text
from .lanes import Segment, lanes
from .live import ScoredLine, score_lines
from .memory import Memory, SlotLayout
from .model import CompressiveTransformer, Output, next_token_loss, with_lengths
from .positions import Distances
from .recall import Recall, recall_accuracy
from .reconstruction import Reconstruction, measure_reconstruction
from .stream import Stream
from .tokenizer import Tokenizer, load_tokenizer
from .train import train
from .transfer import with_compression

__all__ = [
    "COMPRESSIONS",
    "ByFrequency",
    "ByPosition",
    "CachedDecoder",
    "Comparison",
    "Compression",
    "CompressiveError",
    "CompressiveTransformer",
    "CompressiveWarning",
    "Corpus",
    "Cost",
    "Description",
    "Distances",
    "Document",
    "Evaluation",
    "Inspection",
    "InspectionReport",
    "Memory",
    "ModelConfig",
    "Output",
    "Recall",
    "Reconstruction",
    "Results",
    "Score",
    "ScoredLine",
    "Segment",
    "SlotLayout",
    "Split",
    "Stream",
    "Tokenizer",
    "TrainConfig",
    "beginnings",
    "compare",
    "compare_runs",
    "describe",
    "dynamic_evaluate",
    "evaluate",
    "inspect_text",
    "lanes",
    "load",
    "load_tokenizer",
    "measure_reconstruction",
    "next_token_loss",
    "open_corpus",
    "prepare",
    "recall_accuracy",
    "run_experiment",
    "save",
    "score_lines",
    "sweep",
    "train",
    "with_compression",
    "with_lengths",
]
