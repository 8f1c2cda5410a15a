"""A server for one model: sessions with unbounded history at constant memory (extra `serve`)."""

from .engine import Engine
from .errors import Refusal
from .limits import Limits

__all__ = ["Engine", "Limits", "Refusal"]
