"""Errors of requests."""

from __future__ import annotations

from ...errors import CompressiveError


class Refusal(CompressiveError):
    """Refused request, with its HTTP status."""

    def __init__(self, status: int, code: str, message: str, *, retry_after: int | None = None) -> None:
        """Set up the error.

        Args:
            status: HTTP status.
            code: Code for programs, such as "session_busy".
            message: Message for people.
            retry_after: Seconds after which the request may succeed; None if it never will.
        """
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


def stopping() -> Refusal:
    """Return the error for requests to a server that is shutting down."""
    return Refusal(503, "stopping", "the server is shutting down; try again later", retry_after=5)


def gone() -> Refusal:
    """Return the error that ends the work for a client that has disconnected, and never reaches it."""
    return Refusal(499, "cancelled", "the client has disconnected")
