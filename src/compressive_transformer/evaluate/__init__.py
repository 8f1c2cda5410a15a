"""Evaluation of a model on text: nats, and from them word perplexity and bits per byte.

- `run` scores a split; `reading` holds the loop that reads it, `result` the scores, `subset` shortens a split
- `buckets` scores parts of a text, `dynamic` lets the model learn from what it was scored on
- `compare` sets two models side by side
- `recall` and `reconstruction` measure what memory holds, `cost` what a config costs
"""

from .buckets import BORDERS, Buckets, ByFrequency, ByPosition
from .compare import Comparison, compare, compare_runs
from .cost import Cost, Description, describe
from .dynamic import dynamic_evaluate
from .reading import ReadSegment, read_segments, read_split, text_segments
from .recall import Recall, recall_accuracy
from .reconstruction import Reconstruction, measure_reconstruction
from .result import Evaluation, Score
from .run import evaluate, sweep
from .subset import truncate_split

__all__ = [
    "BORDERS",
    "Buckets",
    "ByFrequency",
    "ByPosition",
    "Comparison",
    "Cost",
    "Description",
    "Evaluation",
    "ReadSegment",
    "Recall",
    "Reconstruction",
    "Score",
    "compare",
    "compare_runs",
    "describe",
    "dynamic_evaluate",
    "evaluate",
    "measure_reconstruction",
    "read_segments",
    "read_split",
    "recall_accuracy",
    "sweep",
    "text_segments",
    "truncate_split",
]
