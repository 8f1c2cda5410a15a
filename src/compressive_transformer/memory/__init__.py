"""Memory of a stream: tensors that go in and come out, and where the states in them stand.

Slots sit at fixed places, newest last, so that key positions are constants and shapes are static. One number
a lane, `seen`, says which slots are filled and which tokens each of them stands for.
"""

from .commit import append_compressed, evicted_groups, new_groups, next_pending, next_recent, place_segment
from .layout import SlotLayout
from .state import LayerMemory, Memory, empty_memory, join, pad_slots
from .usage import AttentionSums, add_received, mean_usage, next_usage

__all__ = [
    "AttentionSums",
    "LayerMemory",
    "Memory",
    "SlotLayout",
    "add_received",
    "append_compressed",
    "empty_memory",
    "evicted_groups",
    "join",
    "mean_usage",
    "new_groups",
    "next_pending",
    "next_recent",
    "next_usage",
    "pad_slots",
    "place_segment",
]
