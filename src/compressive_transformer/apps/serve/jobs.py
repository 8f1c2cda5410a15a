"""What a worker does for one request: read tokens, then write some, and tell of it piece by piece."""

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
class Read:
    """Tokens were read."""

    nats: Tensor
    """`[tokens]`, -ln p(token | all before); the start of a document has none."""


@dataclass(frozen=True)
class Wrote:
    """A token was written, and read as what comes after it must be."""

    token: int
    nats: float
    """-ln p(token | all before) by the model itself, whatever it was sampled from."""
    text: str
    """What became ready to be shown: maybe nothing, maybe of earlier tokens."""


@dataclass(frozen=True)
class Done:
    """All is done."""

    reason: str
    """Of writing: "stop" where a stop appeared, else "length"; of reading "read"; "cancelled" where nobody listens."""
    text: str = ""
    """What was still held back."""


@dataclass(frozen=True)
class Failed:
    """It was not done; the session stands where it stood before."""

    refusal: Refusal


Event = Read | Wrote | Done | Failed


@dataclass(frozen=True)
class Writing:
    """What to write after reading."""

    tokens: int
    sampling: Sampling


class Job:
    """One request's work: the worker's thread alone calls its methods, anybody may set `cancelled`."""

    def __init__(
        self,
        states: States,
        state: State,
        tokens: Tensor,
        *,
        tokenizer: Tokenizer,
        writing: Writing | None = None,
        tell: Callable[[Event], None],
        ended: Callable[[State | None], None] = lambda state: None,
    ) -> None:
        """
        tokens: What to read `[tokens]`; the start of the document is put before where it was not read yet.
        tell: Is told of each event in the worker's thread; the last one is `Done` or `Failed`.
        ended: Is given the new state just before the last event, None where it stays the old one.
        """
        start = [tokenizer.start] if state.logits is None else []
        self.left = torch.cat([torch.tensor(start, dtype=torch.int64), tokens])
        self.state = state
        self.cancelled = False
        self.reason = ""
        """Why writing has come to its end; empty before."""
        self._states, self._tell, self._ended = states, tell, ended
        self.writing = writing
        if writing is not None:
            self._draw = writing.sampling.sampler(tokenizer.start)
            self._decode, self._cut = tokenizer.decoder(), StopMatcher(writing.sampling.stop)
            self._since: list[int] = []  # tokens that were written since `state`
            self._count = 0

    @property
    def room(self) -> int:
        """Tokens that can be read before the next commit, as many as are left at most."""
        segment = self._states.model.config.segment_length
        return min(len(self.left), segment - self.state.seen % segment)

    def read(self, memory: Memory, logits: Tensor) -> None:
        """Take in that the next `len(logits)` tokens were read, with logits `[tokens, vocab_size]` after each."""
        tokens, self.left = self.left[: len(logits)], self.left[len(logits) :]
        if self.state.logits is None:
            expected, targets = logits[:-1], tokens[1:]
        else:
            expected, targets = torch.cat([self.state.logits[None], logits[:-1]]), tokens
        if len(targets):
            self._tell(Read(token_nats(expected[None], targets[None].to(logits.device))[0].cpu()))
        self.state = self._states.after(self.state, memory, logits[-1], tokens)

    def draw(self, logits: Tensor) -> int:
        """The next token to write, from `logits [vocab_size]`."""
        return self._draw(logits)

    def wrote(self, token: int, nats: float) -> None:
        """Take in that `token` was written."""
        assert self.writing is not None
        self._since.append(token)
        self._count += 1
        text = self._cut(self._decode(token))
        if self._cut.found:
            self.reason = "stop"
        elif self._count == self.writing.tokens:
            self.reason = "length"
        self._tell(Wrote(token, nats, text))

    @property
    def turn(self) -> int:
        """Tokens that were written in this turn."""
        return len(self._since)

    def written(self, memory: Memory, logits: Tensor) -> State:
        """The state with all that was written so far."""
        return self._states.after(self.state, memory, logits, torch.tensor(self._since, dtype=torch.int64))

    def pause(self, memory: Memory, logits: Tensor) -> None:
        """End of a turn; writing goes on from here."""
        self.state, self._since = self.written(memory, logits), []

    def finish(self, reason: str) -> None:
        """End well where it stands."""
        rest = ""
        if self.writing is not None and not self._cut.found:
            rest = self._cut(self._decode.flush()) + self._cut.flush()
        self._ended(self.state)
        self._tell(Done(reason, rest))

    def fail(self, refusal: Refusal) -> None:
        """End with nothing changed."""
        self._ended(None)
        self._tell(Failed(refusal))
