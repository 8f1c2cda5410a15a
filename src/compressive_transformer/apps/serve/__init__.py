"""Server for one model: sessions with unbounded history at constant memory (extra `serve`)."""

from .engine import Engine, Limits
from .errors import Refusal

__all__ = ["Engine", "Limits", "Refusal"]
