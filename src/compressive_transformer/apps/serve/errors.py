"""Requests that the server refuses."""

from __future__ import annotations

from ...errors import CompressiveError


class Refusal(CompressiveError):
    """A request that is refused, with the HTTP status for the reason.

    Args:
        status: HTTP status.
        code: One word for programs, for example "session_busy".
        message: One line for people.
        retry_after: Seconds after which the same request may succeed; None if it never will.
    """

    def __init__(self, status: int, code: str, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


def stopping() -> Refusal:
    """Return the refusal of all requests while the server stops."""
    return Refusal(503, "stopping", "the server is stopping; retry when it is back", retry_after=5)


def cancelled() -> Refusal:
    """Return the reason why the job of a disconnected client ends; no client sees it."""
    return Refusal(499, "cancelled", "the client disconnected")
