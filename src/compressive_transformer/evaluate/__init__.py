"""How well a model predicts text: nats, and from them word perplexity and bits per byte.

`run` holds the loop that reads, `result` what comes out, `buckets` says which tokens count together, `dynamic` lets
the model learn from what it was scored on, `subset` shortens a split, `compare` sets two runs side by side, `recall`
and `reconstruction` ask what memory holds, `cost` what a config costs.
"""

from .buckets import BORDERS, Buckets, ByFrequency, ByPosition
from .compare import Comparison, compare, compare_runs
from .cost import Cost, Description, describe
from .dynamic import dynamic_evaluate
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
    "Recall",
    "Reconstruction",
    "Score",
    "compare",
    "compare_runs",
    "describe",
    "dynamic_evaluate",
    "evaluate",
    "measure_reconstruction",
    "recall_accuracy",
    "sweep",
    "truncate_split",
]
