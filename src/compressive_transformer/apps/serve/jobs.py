"""Work of one request: tokens to read, then tokens to generate. Each step is reported as an event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.tokenizers import Tokenizer
from ...generate import Sampling, StreamState
from ...generate.sampling import StopMatcher
from ...memory import Memory
from ...model import CompressiveTransformer
from ...model.embedding import token_nats
from .errors import Refusal


@dataclass(frozen=True, eq=False)
class TokensRead:
    """Event: tokens were read."""

    nats: Tensor
    """`[tokens]`, -ln p(token | all before); the start of a document has none."""


@dataclass(frozen=True)
class TokenWritten:
    """Event: a token was generated and read."""

    token: int
    nats: float
    """-ln p(token | all before) of the model, whatever the sampling."""
    text: str
    """Text that is complete now; it may be empty or belong to earlier tokens."""


@dataclass(frozen=True)
class Finished:
    """Event: the job is complete."""

    reason: str
    """"read" without generation; else "stop" at a stop string or "length"; "cancelled" or "stopping" if interrupted."""
    text: str = ""
    """Text that was held back."""


@dataclass(frozen=True)
class Failed:
    """Event: the job failed and the session is unchanged."""

    refusal: Refusal


Event = TokensRead | TokenWritten | Finished | Failed


class Writer:
    """Generation of one job: the random generator, the text decoder, the search for stop strings.

    Args:
        tokenizer: The tokenizer.
        tokens: Tokens to generate; 0 for a job that only reads.
        sampling: How they are chosen.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: int, sampling: Sampling) -> None:
        self.start = tokenizer.start
        """Id of the start of a document."""
        self.draw = sampling.sampler(tokenizer.start)
        """Function that returns the next token for `logits [vocab_size]`."""
        self.reason = "" if tokens else "read"
        """Why no token follows: "read", "stop" or "length"; empty before the end."""
        self._left = tokens
        self._decode = tokenizer.decoder()
        self._matcher = StopMatcher(sampling.stop)

    def add(self, token: int) -> str:
        """Return the text that is complete with `token`."""
        self._left -= 1
        text = self._matcher(self._decode(token))
        self.reason = "stop" if self._matcher.found else "" if self._left else "length"
        return text

    def flush(self) -> str:
        """Return the text that was held back, because no token follows."""
        return "" if self._matcher.found else self._matcher(self._decode.flush()) + self._matcher.flush()


class Job:
    """Work of one request. Only the worker thread calls its methods; any thread may set `cancelled`.

    Args:
        model: The model.
        state: The state to continue from.
        tokens: Tokens to read, `[tokens]`, after the start of the document if it was not read yet.
        writer: The generation that follows.
        on_event: Callback for events, in the worker thread; the last one is `Finished` or `Failed`.
        on_end: Callback just before the last event, with the new state, or None if the job failed.
    """

    def __init__(
        self,
        model: CompressiveTransformer,
        state: StreamState,
        tokens: Tensor,
        writer: Writer,
        *,
        on_event: Callable[[Event], None],
        on_end: Callable[[StreamState | None], None],
    ) -> None:
        self.left = tokens if state.seen else torch.cat([torch.tensor([writer.start]), tokens])
        self.state = state
        self.writer = writer
        self.cancelled = False
        self._on_event, self._on_end = on_event, on_end
        self._written: list[int] = []  # since `state`
        self._segment_length = model.config.segment_length
        # Tokens that all slots together can stand for, which the memory view shows.
        self._tail_length = max(
            layout.segment_length + layout.recent_length + layout.compression_rate * layout.compressed_length
            for layout in model.layouts
        )

    @property
    def chunk(self) -> Tensor:
        """The next tokens to read, up to the next commit."""
        return self.left[: self._segment_length - self.state.seen % self._segment_length]

    @property
    def turn(self) -> int:
        """Tokens that were generated in this turn."""
        return len(self._written)

    def read(self, memory: Memory, logits: Tensor) -> None:
        """Record that the next `len(logits)` tokens were read, with logits `[tokens, vocab_size]` after each."""
        tokens, self.left = self.left[: len(logits)], self.left[len(logits) :]
        if self.state.logits is None:
            expected, targets = logits[:-1], tokens[1:]
        else:
            expected, targets = torch.cat([self.state.logits[None], logits[:-1]]), tokens
        if len(targets):
            self._on_event(TokensRead(token_nats(expected[None], targets[None].to(logits.device))[0].cpu()))
        self.state = self._state_after(memory, logits[-1], tokens)

    def write(self, token: int, nats: float) -> None:
        """Record that `token` was generated."""
        self._written.append(token)
        self._on_event(TokenWritten(token, nats, self.writer.add(token)))

    def state_at(self, memory: Memory, logits: Tensor) -> StreamState:
        """Return the state with all generated tokens."""
        return self._state_after(memory, logits, torch.tensor(self._written, dtype=torch.int64))

    def pause(self, memory: Memory, logits: Tensor) -> None:
        """End a turn of generation."""
        self.state, self._written = self.state_at(memory, logits), []

    def finish(self, reason: str) -> None:
        """End the job with its present state."""
        self._on_end(self.state)
        self._on_event(Finished(reason, self.writer.flush()))

    def fail(self, refusal: Refusal) -> None:
        """End the job without any change."""
        self._on_end(None)
        self._on_event(Failed(refusal))

    def _state_after(self, memory: Memory, logits: Tensor, tokens: Tensor) -> StreamState:
        return StreamState(memory, logits.clone(), torch.cat([self.state.tail, tokens])[-self._tail_length :])
