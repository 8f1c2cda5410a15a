"""Plain Transformer-XL (Dai et al. 2019) in the form of its published code: einsum and relative shift.

Time comes first, `[time, batch, d_model]`; scores are `[query, key, batch, head]`; one projection makes queries, keys
and values of memory and segment together; norms stand behind the sub-layers. Memory is first in, first out, with as
many slots as the compressive models have in both tiers: what attention costs is then equal, and this one compresses
nothing. Decoding gives it one token at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from contenders import Contender, reading_one_by_one
from machine import DEVICE
from timing import Step
from works import IDS, Work

States = list[Tensor]


class ClassicalLayer(nn.Module):
    """Relative attention over [memory | segment], then a feed-forward network."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        width, self.n_heads = work.d_model, work.n_heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.position = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(work.n_heads, width // work.n_heads))
        self.position_bias = nn.Parameter(torch.zeros(work.n_heads, width // work.n_heads))
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor, memory: Tensor, sinusoids: Tensor, future: Tensor) -> Tensor:
        """Return hidden states `[query, batch, d_model]`; `sinusoids [key, d_model]`, largest distance first."""
        projected = self.query_key_value(torch.cat([memory, hidden]))
        queries, keys, values = (part.unflatten(-1, (self.n_heads, -1)) for part in projected.chunk(3, dim=-1))
        queries = queries[len(memory) :]
        rows = self.position(sinusoids).unflatten(-1, (self.n_heads, -1))
        content = torch.einsum("ibhd,jbhd->ijbh", queries + self.content_bias, keys)
        position = relative_shift(torch.einsum("ibhd,jhd->ijbh", queries + self.position_bias, rows))
        scores = (content + position) * queries.shape[-1] ** -0.5
        weights = torch.softmax(scores.masked_fill(future[:, :, None, None], float("-inf")), dim=1)
        mixed = torch.einsum("ijbh,jbhd->ibhd", weights, values)
        hidden = self.attention_norm(hidden + self.output(mixed.flatten(2)))
        return self.feed_forward_norm(hidden + self.feed_forward(hidden))


class ClassicalTransformerXL(nn.Module):
    """Embedding, layers, and logits of the same matrix."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.slots = work.slots
        self.embedding = nn.Embedding(IDS, work.d_model)
        nn.init.normal_(self.embedding.weight, std=work.d_model**-0.5)
        self.layers = nn.ModuleList(ClassicalLayer(work) for _ in range(work.n_layers))
        frequencies = 10_000 ** (-torch.arange(0, work.d_model, 2) / work.d_model)
        self.register_buffer("frequencies", frequencies)

    def forward(self, tokens: Tensor, memory: States) -> tuple[Tensor, States]:
        """Return logits of `tokens [batch, chunk]`, and the memory after them."""
        hidden = self.embedding(tokens.t())
        queries, keys = len(hidden), len(memory[0]) + len(hidden)
        angles = torch.arange(keys - 1, -1, -1, device=DEVICE)[:, None] * self.frequencies
        sinusoids = torch.cat([angles.sin(), angles.cos()], dim=-1)
        future = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).triu(1 + keys - queries)
        after = []
        for layer, states in zip(self.layers, memory, strict=True):
            after.append(torch.cat([states, hidden])[-self.slots :].detach())
            hidden = layer(hidden, states, sinusoids, future)
        return functional.linear(hidden, self.embedding.weight).transpose(0, 1), after


def relative_shift(scores: Tensor) -> Tensor:
    """Move entry (i, j + queries - 1 - i) to (i, j): pad a column and reshape."""
    queries, keys = scores.shape[:2]
    padded = torch.cat([scores.new_zeros(queries, 1, *scores.shape[2:]), scores], dim=1)
    return padded.view(keys + 1, queries, *scores.shape[2:])[1:].view_as(scores)


class Classical(Contender):
    """Plain Transformer-XL as a contender."""

    name = "classical Transformer-XL"

    def build(self) -> nn.Module:
        return ClassicalTransformerXL(self.work)

    def full_memory(self, batch: int) -> States:
        shape = (self.work.slots, batch, self.work.d_model)
        return [torch.randn(shape, device=DEVICE) for _ in range(self.work.n_layers)]

    def slots(self, memory: States) -> set[int]:
        return {len(states) for states in memory}

    def read(self, tokens: Tensor, memory: States) -> tuple[Tensor, States, Tensor]:
        logits, memory = self.model(tokens, memory)
        return logits, memory, logits.new_zeros(())

    @torch.no_grad()
    def decoder(self, batch: int, at: int) -> Step:
        return reading_one_by_one(self, batch, at)
