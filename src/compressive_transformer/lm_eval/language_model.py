"""What the harness asks of a language model: likelihoods of texts and continuations, and text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lm_eval.models as _models  # noqa: F401 (registering before it is imported hides the harness's own models)
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from torch import Tensor

from ..attention.positions import PositionCache
from ..checkpoint import load
from ..errors import CompressiveError
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
        self._distances = PositionCache()

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
        """Of each row of ids: ln p of those from place `first` of the text on, and whether they are the likeliest."""
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row][0]))
        found: dict[int, tuple[float, bool]] = {}
        for at in range(0, len(order), self.batch_size):
            batch_size = order[at : at + self.batch_size]
            found |= dict(zip(batch_size, self._batch_scores([rows[row] for row in batch_size], greedy), strict=True))
        return [found[row] for row in range(len(rows))]

    @torch.no_grad()
    def _batch_scores(self, rows: Sequence[tuple[Tensor, int]], greedy: bool) -> Iterator[tuple[float, bool]]:
        segment, device = self.model.config.segment_length, self.model.embedding.weight.device
        lengths = torch.tensor([len(ids) - 1 for ids, _ in rows])
        tokens, targets = (torch.full((len(rows), max(1, int(lengths.max()))), value) for value in (0, IGNORE_INDEX))
        for row, (ids, first) in enumerate(rows):
            tokens[row, : len(ids) - 1] = ids[:-1]
            targets[row, first : len(ids) - 1] = ids[first + 1 :]
        memory = self.model.empty_memory(len(rows))
        nats, likeliest = torch.zeros(len(rows), dtype=torch.float64), torch.ones(len(rows), dtype=torch.bool)
        for first in range(0, tokens.shape[1], segment):
            part = slice(first, first + segment)
            read, wanted = tokens[:, part].to(device), targets[:, part].to(device)
            own = (lengths - first).clamp(0, read.shape[1])
            output = self.model(read, memory, own, None if greedy else wanted, position_cache=self._distances)
            memory = output.memory
            nats += (token_nats(output.logits, wanted) if greedy else output.nats).sum(1).cpu()
            if greedy:
                likeliest &= ((output.logits.argmax(-1) == wanted) | (wanted == IGNORE_INDEX)).all(1).cpu()
        return zip((-nats).tolist(), likeliest.tolist(), strict=True)
