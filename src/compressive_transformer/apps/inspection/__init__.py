"""Inspection: what a model remembers of a text, as numbers and as a page.

`reading` holds the loop, `result` the numbers; `attention` and `kept` observe the model while it reads, `contrast`
compares two readings; `report`, `drawing` and `page` show the result.
"""

from .attention import AgeBucket, HeadRead, LayerAttention, LayerRead, Slot, TokenAttention
from .contrast import Contrast, Word, WordBucket, different_texts
from .kept import KeptStates
from .reading import SPREAD, inspect_text
from .report import InspectionReport, require_page
from .result import Inspection

__all__ = [
    "SPREAD",
    "AgeBucket",
    "Contrast",
    "HeadRead",
    "Inspection",
    "InspectionReport",
    "KeptStates",
    "LayerAttention",
    "LayerRead",
    "Slot",
    "TokenAttention",
    "Word",
    "WordBucket",
    "different_texts",
    "inspect_text",
    "require_page",
]
