"""What a model remembers of a text: numbers for each token, attention by age, what slots stand for; and a page of it.

`reading` holds the one loop, `result` what comes out; `attention` and `kept` look on while the model reads, `contrast`
says where one reading is better than another; `report`, `drawing` and `page` show it all.
"""

from .attention import AgeBucket, HeadRead, LayerAttention, LayerRead, Slot, TokenAttention
from .contrast import Bucket, Contrast, Word, different_texts
from .kept import KeptStates
from .reading import SPREAD, inspect_text
from .report import InspectionReport, require_page
from .result import Inspection

__all__ = [
    "SPREAD",
    "AgeBucket",
    "Bucket",
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
    "different_texts",
    "inspect_text",
    "require_page",
]
