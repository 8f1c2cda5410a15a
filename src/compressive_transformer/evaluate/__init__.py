"""How well a model predicts text: nats, and from them word perplexity and bits per byte.

`score` holds what comes out, `scoring` the one loop that reads, `buckets` says which tokens count together,
`dynamic` lets the model learn on from what it was scored on, `cutting` shortens a split.
"""

from .buckets import BORDERS, Buckets, ByFrequency, ByPosition
from .dynamic import dynamic_evaluate
from .result import Evaluation, Score
from .run import evaluate, sweep
from .subset import beginnings

__all__ = [
    "BORDERS",
    "Buckets",
    "ByFrequency",
    "ByPosition",
    "Evaluation",
    "Score",
    "beginnings",
    "dynamic_evaluate",
    "evaluate",
    "sweep",
]
