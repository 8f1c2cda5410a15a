"""Work for one request: read tokens, then write some, with an event for each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.tokenizers import Tokenizer
from ...generate.sampling import Sampling, StopMatcher
from ...memory import Memory
from ...model.embedding import token_nats
from .errors import Refusal
from .state import State, States


@dataclass(frozen=True, eq=False)
class TokensRead:
    """Event: tokens were read."""

    nats: Tensor
    """`[tokens]`, -ln p(token | all before); the start of a document has none."""


@dataclass(frozen=True)
class TokenWritten:
    """Event: a token was written."""

    token: int
    nats: float
    """-ln p(token | all before) of the model, whatever it was sampled from."""
    text: str
    """Text that became ready to be shown; it may be empty, or belong to earlier tokens."""


@dataclass(frozen=True)
class Finished:
    """Event: the job is done."""

    reason: str
    """Writing ends by "stop" or "length", reading by "read"; "cancelled" if the client disconnected."""
    text: str = ""
    """Text that was held back."""


@dataclass(frozen=True)
class Failed:
    """Event: the job failed; the session is unchanged."""

    refusal: Refusal


Event = TokensRead | TokenWritten | Finished | Failed
OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class Writing:
    """Options of writing after reading."""

    tokens: int
    sampling: Sampling


class Job:
    """Work for one request. Only the worker's thread calls its methods; any thread may set `cancelled`."""

    def __init__(
        self,
        states: States,
        state: State,
        tokens: Tensor,
        *,
        tokenizer: Tokenizer,
        writing: Writing | None = None,
        on_event: OnEvent,
        ended: Callable[[State | None], None] = lambda state: None,
    ) -> None:
        """Prepare a job.

        Args:
            states: The states of the model.
            state: State to continue from.
            tokens: Tokens to read, `[tokens]`; the start of a document goes before them if need be.
            tokenizer: The tokenizer.
            writing: Options of writing; None to read only.
            on_event: Called with each event, in the worker's thread; the last one is `Finished` or `Failed`.
            ended: Called with the new state just before the last event, None if it is unchanged.
        """
        start = [tokenizer.start] if state.logits is None else []
        self.left = torch.cat([torch.tensor(start, dtype=torch.int64), tokens])
        self.state = state
        self.cancelled = False
        self.reason = ""
        """Reason for the end of writing; empty before."""
        self._states, self._on_event, self._ended = states, on_event, ended
        self.writing = writing
        if writing is not None:
            self._draw = writing.sampling.sampler(tokenizer.start)
            self._decode, self._cut = tokenizer.decoder(), StopMatcher(writing.sampling.stop)
            self._since: list[int] = []  # tokens written since `state`
            self._count = 0

    @property
    def room(self) -> int:
        """Tokens to read before the next commit."""
        segment = self._states.model.config.segment_length
        return min(len(self.left), segment - self.state.seen % segment)

    def read(self, memory: Memory, logits: Tensor) -> None:
        """Record that the next `len(logits)` tokens were read, with logits `[tokens, vocab_size]` after each."""
        tokens, self.left = self.left[: len(logits)], self.left[len(logits) :]
        if self.state.logits is None:
            expected, targets = logits[:-1], tokens[1:]
        else:
            expected, targets = torch.cat([self.state.logits[None], logits[:-1]]), tokens
        if len(targets):
            self._on_event(TokensRead(token_nats(expected[None], targets[None].to(logits.device))[0].cpu()))
        self.state = self._states.after(self.state, memory, logits[-1], tokens)

    def draw(self, logits: Tensor) -> int:
        """Draw the next token to write from `logits [vocab_size]`."""
        return self._draw(logits)

    def wrote(self, token: int, nats: float) -> None:
        """Record that `token` was written."""
        assert self.writing is not None
        self._since.append(token)
        self._count += 1
        text = self._cut(self._decode(token))
        if self._cut.found:
            self.reason = "stop"
        elif self._count == self.writing.tokens:
            self.reason = "length"
        self._on_event(TokenWritten(token, nats, text))

    @property
    def turn(self) -> int:
        """Tokens written in this turn."""
        return len(self._since)

    def written(self, memory: Memory, logits: Tensor) -> State:
        """Return the state with all tokens written so far."""
        return self._states.after(self.state, memory, logits, torch.tensor(self._since, dtype=torch.int64))

    def pause(self, memory: Memory, logits: Tensor) -> None:
        """End a turn; writing continues from here later."""
        self.state, self._since = self.written(memory, logits), []

    def finish(self, reason: str) -> None:
        """End the job with its current state."""
        rest = ""
        if self.writing is not None and not self._cut.found:
            rest = self._cut(self._decode.flush()) + self._cut.flush()
        self._ended(self.state)
        self._on_event(Finished(reason, rest))

    def fail(self, refusal: Refusal) -> None:
        """End the job with the state unchanged."""
        self._ended(None)
        self._on_event(Failed(refusal))
