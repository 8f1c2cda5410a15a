"""How well a model predicts text: nats, and from them word perplexity and bits per byte."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from .corpus import Split
from .errors import CompressiveError
from .lanes import IGNORE, Lanes
from .model import CompressiveTransformer
from .settings import as_table
from .tokenizer import Tokenizer

LONG_ENOUGH = 16_384
"""Tokens of a document after which its cold start, with memory still empty, weighs little."""


@dataclass(frozen=True)
class Score:
    """The negative log-likelihood of some text, with what it can be divided by."""

    nats: float
    tokens: int
    words: int
    bytes: int

    @property
    def word_perplexity(self) -> float:
        """exp(nats / whitespace-separated words) (Sec. 4.2); inf where it is beyond floating point."""
        return _exp(self.nats / self.words) if self.words else math.inf

    @property
    def bits_per_byte(self) -> float:
        """nats / ln 2 / UTF-8 bytes."""
        return self.nats / math.log(2) / self.bytes

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood of a token; depends on the tokenizer."""
        return self.nats / self.tokens

    def table(self) -> dict[str, float | int | None]:
        """Counts and measures as plain values; a perplexity beyond floating point is None, as JSON has no inf."""
        perplexity = self.word_perplexity
        return {
            **asdict(self),
            "nats_per_token": self.nats_per_token,
            "bits_per_byte": self.bits_per_byte,
            "word_perplexity": perplexity if math.isfinite(perplexity) else None,
        }


@dataclass(frozen=True)
class Evaluation:
    """The score of a split: in total, of each document, and under which conditions."""

    total: Score
    documents: tuple[tuple[str, Score], ...]
    """Title and score of each document, in the order of the split."""
    conditions: dict[str, Any]
    """What is needed to do it again: memory lengths, data, versions."""

    def __str__(self) -> str:
        total, memory = self.total, self.conditions["model"]
        lines = [
            f"{self.conditions['split']}: {len(self.documents)} documents, {total.bytes:,} bytes, "
            f"{total.words:,} words, {total.tokens:,} tokens",
            f"bits per byte     {total.bits_per_byte:.4f}",
            f"word perplexity   {total.word_perplexity:.2f}"
            + ("" if self.conditions["lossless"] else "   (not sound: the tokenizer loses text)"),
            f"nats per token    {total.nats_per_token:.4f}   (total {total.nats:,.1f} nats)",
            f"memory            segment {memory['segment_length']}, recent {memory['memory_length']}, "
            f"compressed {memory['compressed_length']} at rate {memory['compression_rate']}",
        ]
        return "\n".join(lines)

    def table(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        documents = [{"title": title, **score.table()} for title, score in self.documents]
        return {**self.total.table(), "conditions": self.conditions, "documents": documents}


def evaluate(
    model: CompressiveTransformer,
    split: Split,
    *,
    batch: int = 8,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """The score of each document of `split`, read from its beginning with memory, each token predicted once.

    The result does not depend on `batch`, the number of documents that are read side by side. For other memory
    lengths see `with_lengths`. Process `rank` of `world` reads its share, and all of them get the whole result.
    `progress` is told how many tokens were scored.

    Raises CompressiveError where the split was made with another tokenizer than the model's, and where `batch` is
    less than the number of processes.
    """
    if batch < world:
        raise CompressiveError(f"batch ({batch}) must be at least the number of processes ({world})")
    if split.vocab_size != model.config.vocab_size:
        raise CompressiveError(
            f"the corpus has {split.vocab_size} token ids, the model {model.config.vocab_size}; "
            "prepare the corpus with the tokenizer of the model's run"
        )
    nats = torch.zeros(len(split.documents), dtype=torch.float64)
    training, device = model.training, model.embedding.weight.device
    model.eval()
    try:
        # More lanes than documents would only be idle.
        share = min(batch, len(split.documents) + world - 1) // world
        memory = model.empty_memory(share)
        length = model.config.segment_length
        for segment in Lanes(split, batch=share * world, length=length, rank=rank, world=world):
            memory = memory.reset(segment.starts)
            with torch.no_grad():
                output = model(segment.tokens.to(device), memory, segment.lengths)
                lost = token_nats(output.logits, segment.targets.to(device)).sum(1).cpu()
            memory = output.memory
            reading = segment.documents >= 0
            nats.index_add_(0, segment.documents[reading], lost[reading])
            if progress is not None:
                progress(segment.total_targets)
    finally:
        model.train(training)
    if world > 1:
        total = nats.to(device)
        torch.distributed.all_reduce(total)
        nats = total.cpu()
    return _evaluation(model, split, nats)


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood `[batch, segment]` of each target in nats, in double precision; 0 where ignored."""
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return losses.double().view_as(targets)


def beginnings(split: Split, tokenizer: Tokenizer, tokens: int) -> Split:
    """The split cut down to about `tokens` tokens: the beginnings of documents spread evenly over it.

    Rather fewer documents than short pieces: each keeps `LONG_ENOUGH` tokens where it has them, so that most are
    predicted with full memory. Words and bytes are counted anew, on the text that is left. Raises CompressiveError
    for less than one token.
    """
    if tokens < 1:
        raise CompressiveError(f"tokens ({tokens}) must be 1 or more")
    if tokens >= sum(document.tokens for document in split.documents):
        return split
    count = min(len(split.documents), max(1, tokens // LONG_ENOUGH))
    share = -(-tokens // count)
    documents = []
    for index in range(0, len(split.documents) * count, len(split.documents)):
        document = split.documents[index // count]
        if document.tokens > share:
            text, kept = _whole_characters(tokenizer, split.read(index // count, 0, share))
            document = replace(document, tokens=kept, words=len(text.split()), bytes=len(text.encode()))
        documents.append(document)
    return replace(split, documents=tuple(documents))


def _whole_characters(tokenizer: Tokenizer, tokens: NDArray[np.int64]) -> tuple[str, int]:
    """The text of tokens without a character that the end cuts in two, and how many tokens that takes."""
    text, kept = tokenizer.decode(tokens), len(tokens)
    # UTF-8 takes at most four bytes a character, so at most three tokens are the beginning of one.
    while text.endswith("\N{REPLACEMENT CHARACTER}") and kept > max(1, len(tokens) - 3):
        kept -= 1
        text = tokenizer.decode(tokens[:kept])
    return text, kept


def _evaluation(model: CompressiveTransformer, split: Split, nats: Tensor) -> Evaluation:
    scores = [
        (document.title, Score(lost, document.tokens, document.words, document.bytes))
        for document, lost in zip(split.documents, nats.tolist(), strict=True)
    ]
    total = Score(
        nats=math.fsum(score.nats for _, score in scores),
        tokens=sum(score.tokens for _, score in scores),
        words=sum(score.words for _, score in scores),
        bytes=sum(score.bytes for _, score in scores),
    )
    conditions = {
        "split": split.name,
        "corpus_fingerprint": split.fingerprint,
        "lossless": split.lossless,
        "averaging": "sums over all documents: exp(nats / words), nats / ln 2 / bytes",
        "model": as_table(model.config),
        "parameters_sha256": _fingerprint(model),
        "precision": str(model.embedding.weight.dtype).removeprefix("torch."),
        "device": model.embedding.weight.device.type,
        "versions": {
            "compressive-transformer": version("compressive-transformer"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    return Evaluation(total, tuple(scores), conditions)


def _fingerprint(model: CompressiveTransformer) -> str:
    """sha256 of all parameters with their names: says which weights were scored."""
    digest = hashlib.sha256()
    for name, parameter in model.state_dict().items():
        digest.update(name.encode())
        digest.update(parameter.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
