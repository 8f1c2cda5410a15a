"""Sampling: how the next token is chosen, and where generated text ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CompressiveError


@dataclass(frozen=True)
class Sampling:
    """Options of generation. This is their only list: streams, the command line and the server take them from here.

    Raises:
        CompressiveError: A value is out of range.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 always takes the most likely token, 1 samples from the model's distribution."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0 for all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to this, in (0, 1]."""
    seed: int | None = None
    """Seed of the random numbers: the same seed gives the same text; by default it differs each time."""
    stop: tuple[str, ...] = ()
    """Strings before which the text ends."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not 0 <= self.temperature < float("inf"):
            raise CompressiveError(f"temperature ({self.temperature}) must be 0 (the most likely token) or more")
        if self.top_k < 0:
            raise CompressiveError(f"top_k ({self.top_k}) must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise CompressiveError(f"top_p ({self.top_p}) must be more than 0 and at most 1 (all tokens)")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise CompressiveError(f"seed ({self.seed}) must be 0 or more, and less than 2**63")
        if "" in self.stop:
            raise CompressiveError("stop must have at least one character; leave it out to stop after `tokens`")

    def sampler(self, start: int) -> Callable[[Tensor], int]:
        """Return a function that draws a token from `logits [vocab_size]`, never the id `start`.

        It has its random generator: two samplers with the same seed draw the same tokens from the same logits.
        """
        generator = torch.Generator()
        generator.manual_seed(generator.seed() if self.seed is None else self.seed)

        def draw(logits: Tensor) -> int:
            logits = logits.to("cpu", torch.float64, copy=True)
            logits[start] = float("-inf")  # stands before documents, never inside
            return sample(logits, self, generator)

        return draw

    def until_stop(self, texts: Iterator[str]) -> Iterator[str]:
        """Yield texts as they come, up to the first stop string."""
        matcher = StopMatcher(self.stop)
        for text in texts:
            if ready := matcher(text):
                yield ready
            if matcher.found:
                return
        if rest := matcher.flush():
            yield rest


DEFAULT_SAMPLING = Sampling()


class StopMatcher:
    """Incremental search for stop strings, which holds text back while it may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        """True once a stop string has appeared; the text after it is discarded."""
        self._stops, self._held = stops, ""

    def __call__(self, text: str) -> str:
        """Take more text, and return what can be shown by now."""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found, ready, self._held = True, self._held[: min(places)], ""
            return ready
        longest = min(max(map(len, self._stops), default=0) - 1, len(self._held))
        rests = (self._held[-size:] for size in range(longest, 0, -1))
        rest = next((rest for rest in rests if any(stop.startswith(rest) for stop in self._stops)), "")
        ready, self._held = self._held.removesuffix(rest), rest
        return ready

    def flush(self) -> str:
        """Return the text that is held back, because nothing follows."""
        rest, self._held = self._held, ""
        return rest


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token id drawn from `logits [vocab_size]`, float64 on the CPU."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax((logits - logits.max()) / sampling.temperature, dim=0).sort(
        descending=True, stable=True
    )
    if sampling.top_k:
        probabilities[sampling.top_k :] = 0
    # A token stays while those before it have not reached top_p; the most likely one always stays.
    before = probabilities.cumsum(0) - probabilities
    probabilities[before >= sampling.top_p * probabilities.sum()] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
