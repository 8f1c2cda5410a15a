"""Reading of an inspected text, a segment at a time, so that a book needs little more memory than a page."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data import Segment
from ...data.tokenizers import Tokenizer
from ...errors import CompressiveError
from ...evaluate import read_segments, text_segments
from ...evaluate.buckets import TokenSpans
from ...evaluate.reconstruction import Reconstruction, squares_of_commits, watched_commits
from ...memory import Memory
from ...model import CompressiveTransformer, Output, with_lengths
from .attention import AttentionByAge, TokenAttention, attention_of_tokens, observed_attention
from .kept import KeptWatch
from .result import Inspection

SPREAD = 16
"""Default number of tokens, spread evenly over a text, whose attention is kept."""

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
    """Inspect a model while it reads a text from its beginning, as `Stream.score` does.

    "Without compressed memory" means that the same network reads the same text with `compressed_length` 0 from its
    first token on, so that compressed memory reaches no prediction, neither directly nor through recent states; states
    that wait for their group to fill are missing too. The difference is the value of compressed memory to this network,
    which was trained with it. To compare with a network trained without it, inspect that one too.

    Apart from a few numbers a token, memory use does not grow with the text.

    Args:
        model: The model; its mode is restored at the end.
        tokenizer: The tokenizer that the model was trained with.
        text: The text, or bytes for a model whose tokens are bytes.
        tokens: Places in the text, from 0, of tokens whose attention is kept slot by slot.
        spread: Number of further tokens whose attention is kept: as many spread evenly over the text, and as many that
            compressed memory helps most.
        progress: Called with the number of tokens read, after each segment.

    Returns:
        Nats of each token `[tokens]` with and without compressed memory, attention by age and slot by slot,
        reconstruction error, and states that were kept.

    Raises:
        CompressiveError: The text is empty, or the tokenizer cannot encode it; a place is not in it; or the model's
            numbers are not finite.
    """
    ids = torch.from_numpy(tokenizer.encode(text))
    _check(len(ids), tokens, spread)
    evenly = {(2 * number + 1) * len(ids) // (2 * spread) for number in range(spread)}
    inputs = torch.cat([torch.tensor([tokenizer.start]), ids[:-1]])
    lengths, length = torch.tensor([len(ids)]), model.config.segment_length
    segments = list(text_segments(inputs[None], ids[None], lengths=lengths, segment_length=length))
    reader = _Reader(model, len(ids), sorted(evenly.union(tokens)), spread)
    with reader.reading(segments):
        for segment in segments:
            reader.read()
            if progress is not None:
                progress(segment.total_targets)
    return reader.result(TokenSpans.from_ids(tokenizer, ids.numpy()))


def _check(length: int, tokens: Sequence[int], spread: int) -> None:
    """Raise CompressiveError if a text of `length` tokens cannot be inspected so."""
    if not length:
        raise CompressiveError("the text is empty: there is nothing to read")
    if wrong := [token for token in tokens if not 0 <= token < length]:
        raise CompressiveError(f"token ({wrong[0]}) must lie in 0 .. {length - 1}, the tokens of the text")
    if spread < 0:
        raise CompressiveError(f"spread ({spread}) must be 0 or more")


def _finite(output: Output, first: int) -> NDArray[np.float64]:
    """Return the nats `[segment]`. Raises CompressiveError if one, of the tokens from `first` on, is not finite."""
    assert output.nats is not None
    nats = output.nats[0]
    if len(broken := (~nats.isfinite()).nonzero()):
        raise CompressiveError(
            f"the probability of token {first + int(broken[0])} of the text is not finite; the weights may be damaged: "
            "try another checkpoint"
        )
    finite: NDArray[np.float64] = nats.cpu().numpy()
    return finite


class _Reader:
    """Reader of one text, with and without compressed memory side by side."""

    def __init__(self, model: CompressiveTransformer, tokens: int, chosen: list[int], best: int) -> None:
        self._model, self._chosen, self._best = model, chosen, best
        self._compresses = any(layout.compressed_length for layout in model.layouts)
        self._nats, self._nats_without = np.zeros(tokens), np.zeros(tokens)
        self._by_age, self._kept = AttentionByAge(model), KeptWatch(model)
        self._squares = torch.zeros(model.config.n_layers, 3, dtype=torch.float64)
        self._attended: dict[int, TokenAttention] = {}
        self._helped: list[tuple[float, int, TokenAttention]] = []  # nats gained, −place: a heap

    @contextlib.contextmanager
    def reading(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Read the segments of a text inside the `with` block, one at each call of `read`."""
        with contextlib.ExitStack() as stack:
            self._commits = stack.enter_context(watched_commits(self._model))
            read = read_segments(self._model, segments, with_targets=True)
            self._read = stack.enter_context(contextlib.closing(read))
            if self._compresses:
                plain = with_lengths(self._model, compressed_length=0)
                read = read_segments(plain, segments, with_targets=True)
                self._plain_read = stack.enter_context(contextlib.closing(read))
            yield

    def read(self) -> None:
        """Read the next segment."""
        kept = self._kept.slots()
        self._commits.clear()
        with observed_attention(self._model, self._by_age.add), self._kept.watching():
            segment, before, output = next(self._read)
        first, after = int(before.seen), output.memory.seen
        places = slice(first, int(after))
        self._nats[places] = _finite(output, first)
        self._squares += squares_of_commits(self._model, self._commits, before=before.seen, after=after)
        self._kept.read(before=before.seen, after=after)
        if self._compresses:
            self._nats_without[places] = _finite(next(self._plain_read).output, first)
        self._attend(segment.tokens[0].to(self._model.embedding.weight.device), before, places, kept)

    def _attend(self, inputs: Tensor, before: Memory, places: slice, kept: dict[int, list[int]]) -> None:
        """Keep the attention of chosen tokens of the segment, and of those that gain more than any before."""
        chosen = [token for token in self._chosen if places.start <= token < places.stop]
        gains = self._nats_without[places] - self._nats[places]
        least = self._helped[0][0] if self._helped and len(self._helped) == self._best else 0.0
        order = np.argsort(-gains, kind="stable")[: self._best].tolist()
        helped = [places.start + place for place in order if gains[place] > least and self._compresses]
        wanted = sorted({*chosen, *helped})
        if not wanted:
            return
        # The segment is read again, since only now these tokens are known; rarely, since a text has few records.
        attentions = attention_of_tokens(self._model, before, inputs, [token - places.start for token in wanted], kept)
        for token, attention in zip(wanted, attentions, strict=True):
            if token in chosen:
                self._attended[token] = attention
            if token in helped:
                heapq.heappush(self._helped, (float(gains[token - places.start]), -token, attention))
                if len(self._helped) > self._best:
                    heapq.heappop(self._helped)

    def result(self, pieces: TokenSpans) -> Inspection:
        """Return the inspection, once the text is read."""
        helped = {attention.token: attention for *_, attention in self._helped}
        kept, missing = self._kept.states(), {}
        if not self._compresses:
            missing = dict.fromkeys(("nats_without", "reconstruction", "kept"), NO_COMPRESSED)
        elif not bool(self._squares[:, 2].any()):
            missing["reconstruction"] = "the text is too short: no state left recent memory"
        if not kept:
            name = self._model.config.compression
            missing.setdefault(
                "kept",
                f"compression = {name!r} makes new states; functions like most-used keep evicted ones",
            )
        return Inspection(
            config=self._model.config,
            pieces=pieces,
            nats=self._nats,
            nats_without=self._nats_without if self._compresses else None,
            attention=self._by_age.layers(len(self._nats)),
            tokens=tuple(attention for _, attention in sorted({**helped, **self._attended}.items())),
            reconstruction=None if "reconstruction" in missing else Reconstruction.from_squares(self._squares),
            kept=None if "kept" in missing else kept,
            missing=missing,
        )
