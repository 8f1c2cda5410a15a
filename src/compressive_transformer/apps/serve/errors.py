"""What a server says no to, and how a client is told."""

from __future__ import annotations

from ...errors import CompressiveError


class Refusal(CompressiveError):
    """A request that is not carried out, with the HTTP status that says why."""

    def __init__(self, status: int, code: str, message: str, *, retry_after: int | None = None) -> None:
        """
        code: one word for programs, as "session_busy".
        retry_after: seconds after which the same request may go through; None where it never will.
        """
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


def stopping() -> Refusal:
    """What is told to those who ask a server that is about to end."""
    return Refusal(503, "stopping", "the server is stopping; ask again when it is back", retry_after=5)


def gone() -> Refusal:
    """What ends the work for a client that does not listen any more, and so is never told."""
    return Refusal(499, "cancelled", "the client has gone")
