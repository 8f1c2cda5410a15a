"""Embedding of token ids and read-out of probabilities, with tied weights, and the losses of both."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import ModelConfig

IGNORE_INDEX = -100
"""A target that no loss counts."""


class TiedEmbedding(nn.Embedding):
    """One row a token, which is its input and, as a dot product with the last hidden state, its logit."""

    def read_out(self, hidden: Tensor, targets: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return logits `[batch, chunk, vocab_size]` of `hidden [batch, chunk, d_model]`, and the nats of targets."""
        logits = functional.linear(hidden, self.weight)
        return logits, None if targets is None else token_nats(logits, targets)


class AdaptiveEmbedding(nn.Module):
    """Adaptive input (Baevski and Auli 2018) and adaptive softmax (Grave et al. 2017) for large vocabularies.

    Ids, which must be in the order of frequency, fall into clusters: the first has rows of d_model numbers, each
    further one `adaptive_factor` times narrower rows and a projection. Rows and projections are tied between input
    and output; only the logits of the clusters themselves, which have no input, have weights of their own.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.cutoffs = config.adaptive_cutoffs
        self.first = nn.Embedding(self.cutoffs[0], config.d_model)
        self.tails = nn.ModuleList(
            Tail(low, high, config.d_model // config.adaptive_factor**number, config.d_model)
            for number, (low, high) in enumerate(pairwise((*self.cutoffs, config.vocab_size)), start=1)
        )
        self.clusters = nn.Linear(config.d_model, len(self.tails), bias=False)

    @property
    def weight(self) -> Tensor:
        """The rows of the first cluster `[adaptive_cutoffs[0], d_model]`."""
        return self.first.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the first hidden states `[batch, chunk, d_model]` of `tokens [batch, chunk]`."""
        ids = tokens.flatten()
        embedded = self.first(ids.clamp(max=self.cutoffs[0] - 1))
        for tail, members in self._members(ids):
            embedded = embedded.index_copy(0, members, tail(ids[members]).to(embedded.dtype))
        return cast(Tensor, embedded.view(*tokens.shape, -1))

    def read_out(self, hidden: Tensor, targets: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return log-probabilities `[batch, chunk, vocab_size]`, or None and the nats of targets."""
        if targets is None:
            first, clusters = self._first_log_probabilities(hidden)
            inside = [tail.log_probabilities(hidden) for tail in self._tails()]
            return torch.cat([first, *(part + clusters[..., at, None] for at, part in enumerate(inside))], dim=-1), None
        nats = self._nats(hidden.flatten(0, 1), targets.flatten())
        return None, nats.view_as(targets)

    def _nats(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the nats of `targets [rows]`, computing no more of the vocabulary than their clusters."""
        scored = (targets != IGNORE_INDEX).nonzero().squeeze(1)
        hidden, wanted = hidden[scored], targets[scored]
        first, clusters = self._first_log_probabilities(hidden)
        found = _at(first, wanted.clamp(max=self.cutoffs[0] - 1))
        for at, (tail, members) in enumerate(self._members(wanted)):
            inside = _at(tail.log_probabilities(hidden[members]), wanted[members] - tail.low)
            found = found.index_copy(0, members, clusters[members, at] + inside)
        nats = torch.zeros(targets.shape, dtype=torch.float64, device=hidden.device)
        return nats.index_copy(0, scored, -found.double())

    def _members(self, ids: Tensor) -> Iterator[tuple[Tail, Tensor]]:
        """Yield each cluster but the first, and the places `[members]` of its tokens in `ids [rows]`."""
        cluster = torch.bucketize(ids, torch.tensor(self.cutoffs, dtype=ids.dtype, device=ids.device), right=True)
        for number, tail in enumerate(self._tails(), start=1):
            yield tail, (cluster == number).nonzero().squeeze(1)

    def _tails(self) -> list[Tail]:
        return cast("list[Tail]", list(self.tails))

    def _first_log_probabilities(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the tokens of the first cluster, and of each other cluster as a whole."""
        scores = torch.cat([functional.linear(hidden, self.first.weight), self.clusters(hidden)], dim=-1)
        first, clusters = _log_softmax(scores).split([self.cutoffs[0], len(self.cutoffs)], dim=-1)
        return first, clusters


class Tail(nn.Module):
    """The ids `low` to `high`, the latter not included: rows narrower than d_model, and their projection."""

    def __init__(self, low: int, high: int, width: int, d_model: int) -> None:
        super().__init__()
        self.low = low
        self.rows = nn.Embedding(high - low, width)
        # Of this deviation inputs and logits begin as large as those of a row of d_model numbers.
        self.projection = nn.Parameter(torch.randn(width, d_model) * width**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the first hidden states `[members, d_model]`."""
        embedded: Tensor = self.rows(ids - self.low)
        return embedded @ self.projection

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities of the cluster's tokens, given the cluster, `[..., high - low]`."""
        narrow = functional.linear(hidden, self.projection)
        return _log_softmax(functional.linear(narrow, self.rows.weight))


def build_embedding(config: ModelConfig) -> TiedEmbedding | AdaptiveEmbedding:
    """Return the embedding that the config names: adaptive where there are cutoffs."""
    return AdaptiveEmbedding(config) if config.adaptive_cutoffs else TiedEmbedding(config.vocab_size, config.d_model)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats a target.

    Args:
        logits: `[batch, segment, vocab_size]`.
        targets: Next tokens, `[batch, segment]`; -100 is ignored.

    Returns:
        Scalar; 0 where there are no targets.
    """
    total = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return total / (targets != IGNORE_INDEX).sum().clamp(min=1)


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the nats `[batch, segment]` of each target, -ln p, in double precision; 0 where ignored."""
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return losses.double().view_as(targets)


def _at(values: Tensor, columns: Tensor) -> Tensor:
    """Return one value `[rows]` of each row of `values [rows, columns]`, that of its column `[rows]`."""
    return values.gather(1, columns[:, None]).squeeze(1)


def _log_softmax(scores: Tensor) -> Tensor:
    # Half precision would lose the small differences between probable tokens.
    return scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
