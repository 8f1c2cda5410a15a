"""Limits of a server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import CompressiveError


@dataclass(frozen=True)
class Limits:
    """Limits of a server; requests beyond them are refused.

    Raises:
        CompressiveError: A limit is not positive.
    """

    resident: int = 64
    """Sessions in main memory; with --sessions the least recently used are moved to disk and loaded on demand."""
    stored: int = 1024
    """Sessions in total, those on disk included."""
    idle: float = 3600.0
    """Seconds after which an unused session is moved to disk, or deleted without --sessions."""
    queue: int = 128
    """Waiting and running requests."""
    batch_size: int = 16
    """Sessions per forward pass."""
    request_bytes: int = 1_048_576
    """Bytes of a request."""
    max_tokens: int = 4096
    """Tokens generated per request."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) <= 0:
                raise CompressiveError(f"{limit.name} ({getattr(self, limit.name)}) must be more than 0")


DEFAULT_LIMITS = Limits()
