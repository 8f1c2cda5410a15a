"""Memory of a stream: tensors that go in and come out, and where the states in them stand.

Slots sit at fixed places, newest last, so that key positions are constants and shapes are static. One number
a lane, `seen`, says which slots are filled and which tokens each of them stands for.
"""

from .commit import append_compressed, evicted_groups, new_groups, next_pending, next_recent, place_segment
from .layout import SlotLayout
from .state import Memory, empty_memory, join, pad_slots

__all__ = [
    "Memory",
    "SlotLayout",
    "append_compressed",
    "empty_memory",
    "evicted_groups",
    "join",
    "new_groups",
    "next_pending",
    "next_recent",
    "pad_slots",
    "place_segment",
]
