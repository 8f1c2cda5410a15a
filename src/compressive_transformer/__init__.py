"""The Compressive Transformer (Rae et al. 2019): language models whose memory compresses instead of forgetting."""

from .apps.experiment import Results, run_experiment
from .apps.inspection import Inspection, InspectionReport, inspect_text
from .attention.positions import Distances
from .checkpoint import load, save
from .compression import COMPRESSIONS, Compression
from .config import ModelConfig, TrainConfig
from .data import Corpus, Document, Split, open_corpus, prepare
from .data.lanes import Segment, lanes
from .data.tokenizers import Tokenizer, load_tokenizer
from .errors import CompressiveError, CompressiveWarning
from .evaluate import ByFrequency, ByPosition, Evaluation, Score, beginnings, dynamic_evaluate, evaluate, sweep
from .evaluate.compare import Comparison, compare, compare_runs
from .evaluate.cost import Cost, Description, describe
from .evaluate.recall import Recall, recall_accuracy
from .evaluate.reconstruction import Reconstruction, measure_reconstruction
from .generate import CachedDecoder
from .generate.line_scores import ScoredLine, score_lines
from .generate.stream import Stream
from .memory import Memory, SlotLayout
from .model import CompressiveTransformer, Output, next_token_loss, with_lengths
from .model.derive import with_compression
from .train import train

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
