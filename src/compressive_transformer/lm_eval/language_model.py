"""What the harness asks of a language model: likelihoods of texts and continuations, and text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lm_eval.models as _models  # noqa: F401 (registering before it is imported hides the harness's own models)
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from torch import Tensor

from ..checkpoint import load
from ..data import Segment
from ..errors import CompressiveError
from ..evaluate import read_segments
from ..generate.stream import Stream
from ..model.embedding import IGNORE_INDEX, token_nats

MAX_TOKENS = 256
"""Tokens of a text where a task does not say how many, as in the harness's own models."""


@register_model("compressive")
class CompressiveLM(LM):  # type: ignore[misc]
    """A run as the harness evaluates it; every text begins a document with empty memory.

    However long a text is, nothing of it is cut, and memory is carried through all of it: rolling likelihoods are those
    of `compressive evaluate`.
    """

    def __init__(
        self, run: str, batch_size: int | str = 8, device: str | None = None, max_batch_size: int | None = None
    ) -> None:
        """Load `run`, to read `batch_size` texts side by side, on which no result depends."""
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise CompressiveError(f"batch_size ({batch_size}) must be a number, 1 or more")
        self.batch_size = int(batch_size)
        self.model, self.tokenizer = load(run)
        self.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each continuation after its context: ln p, and whether it is the likeliest token by token."""
        rows = []
        for context, continuation in (request.args for request in requests):
            # Spaces belong to the words that follow them, as everywhere in the harness.
            words = context.rstrip()
            before = self.tokenizer.encode(words)
            whole = self.tokenizer.encode(context + continuation)
            rows.append((self._with_start(whole), len(before)))
        return self._scores(rows, greedy=True)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """ln p of each text, its first token included."""
        rows = [(self._with_start(self.tokenizer.encode(request.args[0])), 0) for request in requests]
        return [likelihood for likelihood, _ in self._scores(rows, greedy=False)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to a text of `until`; the likeliest tokens unless `do_sample` is set."""
        return [self._written(*request.args) for request in requests]

    def _written(self, context: str, options: dict[str, Any]) -> str:
        options = dict(options)
        until = options.pop("until", None) or []
        ends = [until] if isinstance(until, str) else [end for end in until if end]
        tokens = options.pop("max_gen_toks", MAX_TOKENS)
        sampled = options.pop("do_sample", bool(options.get("temperature", 0)))
        temperature = float(options.pop("temperature", 1.0)) if sampled else 0.0
        options.pop("temperature", None)
        if unknown := sorted(options.keys() - {"top_k", "top_p"}):
            raise CompressiveError(f"{unknown[0]!r} is not an option of this model's texts; it has top_k and top_p")
        stream = Stream(self.model, self.tokenizer)
        stream.read(context)
        text, seed = "", int(torch.randint(2**31, ()))  # the harness sets the state of torch
        for piece in stream.iter_text(tokens, temperature=temperature, seed=seed, **options):
            text += piece
            if any(end in text for end in ends):
                break
        return text[: min([len(text), *(text.find(end) for end in ends if end in text)])]

    def _with_start(self, ids: Any) -> Tensor:
        return torch.cat([torch.tensor([self.tokenizer.start]), torch.as_tensor(ids, dtype=torch.int64)])

    def _scores(self, rows: Sequence[tuple[Tensor, int]], *, greedy: bool) -> list[tuple[float, bool]]:
        """Return for each row of ids ln p of those from place `first` of the text, and True if all are likeliest."""
        nats, likeliest = torch.zeros(len(rows), dtype=torch.float64), torch.ones(len(rows), dtype=torch.bool)
        for segment, _, output in read_segments(self.model, self._segments(rows), with_targets=not greedy):
            busy = segment.documents >= 0
            documents = segment.documents[busy]
            lost = output.nats
            if greedy:
                targets = segment.targets.to(output.logits.device)
                lost = token_nats(output.logits, targets)
                right = ((output.logits.argmax(-1) == targets) | (targets == IGNORE_INDEX)).all(1).cpu()
                likeliest[documents] &= right[busy]
            assert lost is not None
            nats[documents] += lost.sum(1).cpu()[busy]
        return list(zip((-nats).tolist(), likeliest.tolist(), strict=True))

    def _segments(self, rows: Sequence[tuple[Tensor, int]]) -> Iterator[Segment]:
        """Yield the segments of all rows, `batch_size` of them side by side, the longest first.

        The last lanes are empty where there are fewer rows.
        """
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row][0]))
        for start in range(0, len(order), self.batch_size):
            yield from self._batch_segments(rows, order[start : start + self.batch_size])

    def _batch_segments(self, rows: Sequence[tuple[Tensor, int]], numbers: list[int]) -> Iterator[Segment]:
        lanes, length = min(self.batch_size, len(rows)), self.model.config.segment_length
        documents = torch.full((lanes,), -1)
        documents[: len(numbers)] = torch.tensor(numbers)
        lengths = torch.zeros(lanes, dtype=torch.int64)
        lengths[: len(numbers)] = torch.tensor([len(rows[number][0]) - 1 for number in numbers])
        tokens, targets = (torch.full((lanes, max(1, int(lengths.max()))), fill) for fill in (0, IGNORE_INDEX))
        for lane, number in enumerate(numbers):
            ids, first = rows[number]
            tokens[lane, : len(ids) - 1] = ids[:-1]
            targets[lane, first : len(ids) - 1] = ids[first + 1 :]
        for first, (inputs, wanted) in enumerate(zip(tokens.split(length, 1), targets.split(length, 1), strict=True)):
            yield Segment(
                tokens=inputs,
                targets=wanted,
                starts=torch.full((lanes,), first == 0),
                lengths=(lengths - first * length).clamp(0, inputs.shape[1]),
                documents=documents,
                total_targets=int((wanted != IGNORE_INDEX).sum()),
            )
