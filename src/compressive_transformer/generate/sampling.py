"""How the next token is chosen, and where the text that is written ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CompressiveError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Raises CompressiveError for values that mean nothing."""

    temperature: float = 1.0
    """0 takes the likeliest token, 1 samples from the model's own distribution."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0 for all."""
    top_p: float = 1.0
    """Sample among the fewest tokens that have this probability together, in (0, 1]."""
    seed: int | None = None
    """The same seed after the same reading gives the same text; None for another each time."""
    stop: tuple[str, ...] = ()
    """End before the first of these appears."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise CompressiveError(f"temperature ({self.temperature}) must be 0 (the likeliest token) or more")
        if self.top_k < 0:
            raise CompressiveError(f"top_k ({self.top_k}) must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise CompressiveError(f"top_p ({self.top_p}) must be more than 0 and at most 1 (all tokens)")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise CompressiveError(f"seed ({self.seed}) must be 0 or more, and less than 2**63")
        if "" in self.stop:
            raise CompressiveError("stop must hold at least one character; leave it out to stop after `tokens`")

    def sampler(self, start: int) -> Callable[[Tensor], int]:
        """What draws a token from `logits [vocab_size]`, one after another; never the id `start`."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)

        def draw(logits: Tensor) -> int:
            logits = logits.to("cpu", torch.float64, copy=True)
            logits[start] = float("-inf")  # stands before documents, never inside
            return sample(logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, generator=generator)

        return draw

    def until_stop(self, texts: Iterator[str]) -> Iterator[str]:
        """The texts up to the first place of a stop, as they come."""
        if not self.stop:
            yield from texts
            return
        cut = StopText(self.stop)
        for text in texts:
            if ready := cut(text):
                yield ready
            if cut.found:
                return
        if rest := cut.flush():
            yield rest


class StopText:
    """Text up to the first place of one of `stops`, never giving out a beginning of one too early."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        """Whether a stop has appeared; what comes after it is nobody's affair."""
        self._stops, self._held = stops, ""

    def __call__(self, text: str) -> str:
        """What can be given out once `text` has come, too."""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found, ready, self._held = True, self._held[: min(places)], ""
            return ready
        longest = min(max(map(len, self._stops), default=0) - 1, len(self._held))
        keep = next((size for size in range(longest, 0, -1) if self._begins_a_stop(self._held[-size:])), 0)
        cut = len(self._held) - keep
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready

    def flush(self) -> str:
        """The rest, where nothing more comes."""
        rest, self._held = self._held, ""
        return rest

    def _begins_a_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)


def sample(logits: Tensor, *, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """A token id drawn from `logits [vocab_size]`, as `Sampling` describes."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax((logits - logits.max()) / temperature, dim=0).sort(
        descending=True, stable=True
    )
    if top_k:
        probabilities[top_k:] = 0
    # A token stays while those before it have not reached top_p; the likeliest always stays.
    before = probabilities.cumsum(0) - probabilities
    probabilities[before >= top_p * probabilities.sum()] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def require_tokens(tokens: int) -> None:
    """Raise CompressiveError unless there is something to write."""
    if tokens < 1:
        raise CompressiveError(f"tokens ({tokens}) must be 1 or more")
