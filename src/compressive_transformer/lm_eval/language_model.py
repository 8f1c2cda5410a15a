"""The language model of the harness: likelihoods of texts and continuations, and generated text."""

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
from ..evaluate import read_segments, text_segments
from ..generate.stream import Stream
from ..model.embedding import IGNORE_INDEX, token_nats

MAX_TOKENS = 256
"""Default number of tokens to generate, as in the models of the harness."""


@register_model("compressive")
class CompressiveLM(LM):  # type: ignore[misc]
    """A run as a model of the harness. Each text starts a document with empty memory.

    Texts are never truncated; memory reads all of them, so rolling likelihoods are those of `compressive evaluate`.

    Args:
        run: Folder of the run.
        batch_size: Texts that are read side by side. The results do not depend on it.
        device: Device; by default the GPU if there is one.
        max_batch_size: Ignored.

    Raises:
        CompressiveError: The run cannot be loaded, or `batch_size` is not a number of at least 1.
    """

    def __init__(
        self, run: str, batch_size: int | str = 8, device: str | None = None, max_batch_size: int | None = None
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise CompressiveError(f"batch_size ({batch_size}) must be a number, 1 or more")
        self.batch_size = int(batch_size)
        self.model, self.tokenizer = load(run)
        self.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return ln p of each continuation after its context, and True if each of its tokens is the likeliest."""
        rows = []
        for context, continuation in (request.args for request in requests):
            # Spaces belong to the next word, as everywhere in the harness.
            before = self.tokenizer.encode(context.rstrip())
            rows.append((self._with_start(self.tokenizer.encode(context + continuation)), len(before)))
        return self._scores(rows, greedy=True)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return ln p of each text, its first token included."""
        rows = [(self._with_start(self.tokenizer.encode(request.args[0])), 0) for request in requests]
        return [likelihood for likelihood, _ in self._scores(rows, greedy=False)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, up to a text of `until`; greedy unless `do_sample` is set."""
        return [self._text_after(*request.args) for request in requests]

    def _text_after(self, context: str, options: dict[str, Any]) -> str:
        """Return the text after a context, with the options of a task."""
        options = dict(options)
        until = options.pop("until", None) or []
        ends = [until] if isinstance(until, str) else [end for end in until if end]
        tokens = options.pop("max_gen_toks", MAX_TOKENS)
        sampled = options.pop("do_sample", bool(options.get("temperature", 0)))
        temperature = float(options.pop("temperature", 1.0)) if sampled else 0.0
        options.pop("temperature", None)
        if unknown := sorted(options.keys() - {"top_k", "top_p"}):
            raise CompressiveError(
                f"{unknown[0]!r} is not supported; options of generation are do_sample, temperature, top_k and top_p"
            )
        stream = Stream(self.model, self.tokenizer)
        stream.read(context)
        text, seed = "", int(torch.randint(2**31, ()))  # the harness seeds torch
        for piece in stream.iter_text(tokens, temperature=temperature, seed=seed, **options):
            text += piece
            if any(end in text for end in ends):
                break
        return text[: min([len(text), *(text.find(end) for end in ends if end in text)])]

    def _with_start(self, ids: Any) -> Tensor:
        """Return the ids of a text after the start id."""
        return torch.cat([torch.tensor([self.tokenizer.start]), torch.as_tensor(ids, dtype=torch.int64)])

    def _scores(self, rows: Sequence[tuple[Tensor, int]], *, greedy: bool) -> list[tuple[float, bool]]:
        """Return for each row of ids ln p of those from place `first` of the text, and True if all are likeliest."""
        nats, likeliest = torch.zeros(len(rows), dtype=torch.float64), torch.ones(len(rows), dtype=torch.bool)
        for segment, _, output in read_segments(self.model, self._segments(rows), with_targets=not greedy):
            busy, lost = segment.documents >= 0, output.nats
            documents = segment.documents[busy]
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

        The last lanes are empty if there are fewer rows.
        """
        order, lanes = sorted(range(len(rows)), key=lambda row: -len(rows[row][0])), min(self.batch_size, len(rows))
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            width = max(1, len(rows[numbers[0]][0]) - 1)
            tokens, targets = torch.zeros(lanes, width, dtype=torch.int64), torch.full((lanes, width), IGNORE_INDEX)
            lengths, documents = torch.zeros(lanes, dtype=torch.int64), torch.full((lanes,), -1)
            for lane, number in enumerate(numbers):
                ids, first = rows[number]
                lengths[lane], documents[lane] = len(ids) - 1, number
                tokens[lane, : len(ids) - 1] = ids[:-1]
                targets[lane, first : len(ids) - 1] = ids[first + 1 :]
            length = self.model.config.segment_length
            yield from text_segments(tokens, targets, lengths=lengths, documents=documents, segment_length=length)
