"""The one loop in which a text is inspected: a segment at a time, so that a book needs little more room than a page."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...attention.positions import PositionCache
from ...data.tokenizers import Tokenizer
from ...errors import CompressiveError
from ...evaluate.buckets import Pieces
from ...evaluate.reconstruction import Reconstruction, squares_of_commits, watched_commits
from ...generate.stream import Stream
from ...memory import Memory
from ...model import CompressiveTransformer, with_lengths
from .attention import AttentionByAge, TokenAttention, attention_of_tokens, observed_attention
from .kept import KeptWatch
from .result import Inspection

SPREAD = 16
"""Tokens, spread evenly over a text, whose attention is kept; and as many that compressed memory helps most."""

NO_COMPRESSED = "the model has no compressed memory (compressed_length is 0 in every layer)"


@torch.no_grad()
def inspect_text(
    model: CompressiveTransformer,
    tokenizer: Tokenizer,
    text: str | bytes,
    *,
    tokens: Sequence[int] = (),
    spread: int = SPREAD,
    progress: Callable[[int], None] | None = None,
) -> Inspection:
    """What `model` does with a text that it reads from its beginning, as `Stream.score` does.

    tokens: places in the text, from 0, of tokens whose attention is kept slot by slot.
    spread: the same for so many tokens spread evenly over the text, and for so many that compressed memory helps
    most.
    progress: told how many tokens were read.

    Without compressed memory means: the same network reads the same text with `compressed_length` 0 from its first
    token on, as `with_lengths` makes it, so that nothing of compressed memory reaches a prediction, neither directly
    nor by what recent states took from it; states that wait for their group to fill are gone too. The difference
    says what compressed memory is worth to this network, which was trained to have it. A network trained without it
    is another matter: inspect that one and compare.

    What is held besides a few numbers a token does not grow with the text. The model is left in the mode in which it
    came. Raises CompressiveError for an empty text, for one that the tokenizer cannot hold, for places that are not in
    it, and where the model's numbers are not finite.
    """
    ids = Stream(model, tokenizer).encode(text)
    if not len(ids):
        raise CompressiveError("the text is empty: there is nothing to read")
    if wrong := [token for token in tokens if not 0 <= token < len(ids)]:
        raise CompressiveError(f"token ({wrong[0]}) must lie in 0 .. {len(ids) - 1}, the tokens of the text")
    if spread < 0:
        raise CompressiveError(f"spread ({spread}) must be 0 or more")
    evenly = {(2 * at + 1) * len(ids) // (2 * spread) for at in range(spread)}
    inputs = torch.cat([torch.tensor([tokenizer.start]), ids[:-1]])
    length, training = model.config.segment_length, model.training
    model.eval()
    try:
        reader = _Reader(model, len(ids), sorted(evenly.union(tokens)), spread)
        with reader.watching():
            for segment, targets in zip(inputs.split(length), ids.split(length), strict=True):
                reader.read(segment, targets)
                if progress is not None:
                    progress(len(segment))
        return reader.result(Pieces.of(tokenizer, ids.numpy()))
    finally:
        model.train(training)


def _finite(nats: Tensor, first: int) -> NDArray[np.float64]:
    """The `nats [segment]`. Raises CompressiveError where one, of the tokens from `first` on, is not finite."""
    if len(broken := (~nats.isfinite()).nonzero()):
        raise CompressiveError(
            f"the model gives token {first + int(broken[0])} of the text no finite probability; its weights may be "
            "damaged: evaluate another checkpoint"
        )
    found: NDArray[np.float64] = nats.cpu().numpy()
    return found


class _Reader:
    """One text being read, with and without compressed memory side by side."""

    def __init__(self, model: CompressiveTransformer, tokens: int, chosen: list[int], best: int) -> None:
        self._model, self._chosen, self._best = model, chosen, best
        self._compresses = any(layout.compressed_length for layout in model.layouts)
        self._plain = with_lengths(model, compressed_length=0) if self._compresses else None
        self._memory, self._distances = model.empty_memory(1), PositionCache()
        self._plain_memory = self._plain.empty_memory(1) if self._plain else None
        self._nats, self._nats_without = np.zeros(tokens), np.zeros(tokens)
        self._by_age, self._kept = AttentionByAge(model), KeptWatch(model)
        self._squares = torch.zeros(model.config.n_layers, 3, dtype=torch.float64)
        self._attended: dict[int, TokenAttention] = {}
        self._helped: list[tuple[float, int, TokenAttention]] = []  # nats gained, −place: a heap

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, `read` sees what happens in the model."""
        with watched_commits(self._model) as self._commits:
            yield

    def read(self, inputs: Tensor, targets: Tensor) -> None:
        """Read the next segment: `inputs` and `targets [segment]`."""
        before, device = self._memory, self._model.embedding.weight.device
        first = int(before.seen)
        places = slice(first, first + len(inputs))
        inputs, targets = inputs.to(device), targets.to(device)
        kept = self._kept.slots()
        self._commits.clear()
        with observed_attention(self._model, self._by_age.tell), self._kept.watching():
            output = self._model(inputs[None], before, None, targets[None], position_cache=self._distances)
        self._memory, after = output.memory, output.memory.seen
        self._nats[places] = _finite(output.nats[0], first)
        self._squares += squares_of_commits(self._model, self._commits, before=before.seen, after=after)
        self._kept.read(before=before.seen, after=after)
        if self._plain is not None:
            output = self._plain(inputs[None], self._plain_memory, None, targets[None], position_cache=self._distances)
            self._plain_memory = output.memory
            self._nats_without[places] = _finite(output.nats[0], first)
        self._attend(inputs, before, places, kept)

    def _attend(self, inputs: Tensor, before: Memory, places: slice, kept: dict[int, list[int]]) -> None:
        """Keep the attention of chosen tokens of the segment, and of those that gain more than any before."""
        chosen = [token for token in self._chosen if places.start <= token < places.stop]
        gains = self._nats_without[places] - self._nats[places]
        least = self._helped[0][0] if self._helped and len(self._helped) == self._best else 0.0
        order = np.argsort(-gains, kind="stable")[: self._best].tolist()
        helped = [places.start + at for at in order if gains[at] > least and self._plain is not None]
        wanted = sorted({*chosen, *helped})
        if not wanted:
            return
        # Read anew, since which tokens these are is known only now; seldom, since a text has few records.
        found = attention_of_tokens(self._model, before, inputs, [token - places.start for token in wanted], kept)
        for token, attention in zip(wanted, found, strict=True):
            if token in chosen:
                self._attended[token] = attention
            if token in helped:
                heapq.heappush(self._helped, (float(gains[token - places.start]), -token, attention))
                if len(self._helped) > self._best:
                    heapq.heappop(self._helped)

    def result(self, pieces: Pieces) -> Inspection:
        """What was found, once all is read."""
        helped = {attention.token: attention for *_, attention in self._helped}
        kept, missing = self._kept.states(), {}
        if not self._compresses:
            missing = dict.fromkeys(("nats_without", "reconstruction", "kept"), NO_COMPRESSED)
        elif not bool(self._squares[:, 2].any()):
            missing["reconstruction"] = "the text is too short: nothing left recent memory for a compressed slot"
        if not kept:
            name = self._model.config.compression
            missing.setdefault(
                "kept", f"compression = {name!r} makes new states of the evicted ones; only most-used keeps some"
            )
        return Inspection(
            config=self._model.config,
            pieces=pieces,
            nats=self._nats,
            nats_without=self._nats_without if self._compresses else None,
            attention=self._by_age.layers(len(self._nats)),
            tokens=tuple(attention for _, attention in sorted({**helped, **self._attended}.items())),
            reconstruction=None if "reconstruction" in missing else Reconstruction.of(self._squares),
            kept=None if "kept" in missing else kept,
            missing=missing,
        )
