"""Other packages as contenders, used as in their own training and generation code.

If a package skips work by mistake, it is corrected here, so that all do the same work.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from compressive_transformer_pytorch import CompressiveTransformer as LucidrainsModel
from labml import tracker
from torch import Tensor, nn
from x_transformers import Decoder, TransformerWrapper

from contenders import Contender, reading_one_by_one
from machine import DEVICE
from timing import Step
from works import IDS, segments

# labml-nn 0.5.1 calls this, and no labml that one can install has it.
if not hasattr(tracker, "debug"):
    tracker.debug = lambda *_: None

from labml_nn.transformers.compressive import (
    AttentionReconstructionLoss,
    CompressiveTransformerLayer,
    Conv1dCompression,
)
from labml_nn.transformers.compressive import CompressiveTransformer as LabmlLayers
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.xl import RelativeMultiHeadAttention


class Lucidrains(Contender):
    """compressive-transformer-pytorch with a plain residual stream."""

    name = "lucidrains"
    compression = "compress_mem_fn"

    def build(self) -> nn.Module:
        work = self.work
        return LucidrainsModel(
            num_tokens=IDS,
            dim=work.d_model,
            seq_len=work.segment_length,
            depth=work.n_layers,
            mem_len=work.memory_length,
            cmem_len=work.compressed_length,
            cmem_ratio=work.compression_rate,
            heads=work.n_heads,
            gru_gated_residual=False,
        )

    def full_memory(self, batch: int) -> Any:
        lengths = (self.work.memory_length, self.work.compressed_length)
        layers, width = self.work.n_layers, self.work.d_model
        return tuple(torch.randn(layers, batch, length, width, device=DEVICE) for length in lengths)

    def slots(self, memory: Any) -> set[int]:
        return {sum(states.shape[2] for states in memory)}

    def read(self, tokens: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        # It calls detach_() on its projection of keys and values, in the middle of each forward pass: from then on
        # that takes no gradient, neither from this pass nor from any later one.
        self.model.requires_grad_(True)
        logits, memory, compression_loss = self.model(tokens, memories=memory)
        self.model.requires_grad_(True)
        return logits, memory, compression_loss

    @torch.no_grad()
    def decoder(self, batch: int, at: int) -> Step:
        """Decode as its `generate`: the model reads the whole segment so far for each token."""
        self.model.eval()
        memory, segment = self.full_memory(batch), self.prefix(batch, at)

        @torch.no_grad()
        def step(tokens: Tensor) -> Tensor:
            nonlocal memory, segment
            if segment.shape[1] == self.work.segment_length:
                segment = segment[:, :0]
            segment = torch.cat([segment, tokens[:, None]], dim=1)
            logits, memory, _ = self.model(segment, memories=memory, mask=torch.ones_like(segment, dtype=torch.bool))
            return logits[:, -1]

        return step


class LabmlModel(nn.Module):
    """Embedding, mask and logits as in labml-nn's training script, which needs torchvision to import."""

    def __init__(self, layers: nn.Module, d_model: int) -> None:
        super().__init__()
        self.embedding, self.layers, self.logits = nn.Embedding(IDS, d_model), layers, nn.Linear(d_model, IDS)
        self.masks: dict[tuple[int, int], Tensor] = {}

    def forward(self, tokens: Tensor, memory: tuple[list[Tensor], list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
        """Return logits `[batch, chunk, id]` and the states that enter memory, `[time, batch, d_model]` per layer."""
        recent, compressed = memory
        shape = (tokens.shape[1], len(compressed[0]) + len(recent[0]) + tokens.shape[1])
        if shape not in self.masks:
            self.masks = {
                shape: torch.ones(shape, dtype=torch.bool, device=DEVICE).tril(shape[1] - shape[0])[:, :, None]
            }
        hidden, states = self.layers(self.embedding(tokens.t()), recent, compressed, self.masks[shape])
        return self.logits(hidden).transpose(0, 1), states


class Labml(Contender):
    """labml-nn."""

    name = "labml"
    compression = ".compress."

    def build(self) -> nn.Module:
        width = self.work.d_model
        layer = CompressiveTransformerLayer(
            d_model=width,
            self_attn=RelativeMultiHeadAttention(self.work.n_heads, width, 0.0),
            feed_forward=FeedForward(width, 4 * width, 0.0),
            dropout_prob=0.0,
            compress=Conv1dCompression(self.work.compression_rate, width),
        )
        layers = LabmlLayers(layer, self.work.n_layers)
        self.reconstruction = AttentionReconstructionLoss(layers.layers)
        return LabmlModel(layers, width)

    def full_memory(self, batch: int) -> Any:
        lengths, shape = (self.work.memory_length, self.work.compressed_length), (batch, self.work.d_model)
        return tuple(
            [torch.randn(length, *shape, device=DEVICE) for _ in range(self.work.n_layers)] for length in lengths
        )

    def slots(self, memory: Any) -> set[int]:
        return {len(recent) + len(compressed) for recent, compressed in zip(*memory, strict=True)}

    def read(self, tokens: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        logits, states = self.model(tokens, memory)
        memory, evicted = self._update(memory, states)
        wanted = self.model.training and evicted
        return logits, memory, self.reconstruction(states, evicted) if wanted else logits.new_zeros(())

    @torch.no_grad()
    def _update(self, memory: Any, states: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Update memory as in its script: states beyond recent memory are compressed in whole groups."""
        recent = [torch.cat(pair) for pair in zip(memory[0], states, strict=True)]
        rate = self.work.compression_rate
        count = rate * -(-(len(recent[0]) - self.work.memory_length) // rate)
        if count <= 0:
            return (recent, memory[1]), []
        evicted = [states[:count] for states in recent]
        layers = self.model.layers.layers
        new = [layer.compress(states) for layer, states in zip(layers, evicted, strict=True)]
        length = self.work.compressed_length
        compressed = [torch.cat(pair)[-length:] for pair in zip(memory[1], new, strict=True)]
        return ([states[count:] for states in recent], compressed), evicted

    @torch.no_grad()
    def decoder(self, batch: int, at: int) -> Step:
        """Decode as its `sample`: one token at a time, each of which enters memory immediately."""
        return reading_one_by_one(self, batch, 0)


class XTransformers(Contender):
    """x-transformers with its memory: first in, first out, of equal attention width; rotary, fused attention."""

    name = "x-transformers"

    def build(self) -> nn.Module:
        work = self.work
        layers = Decoder(
            dim=work.d_model,
            depth=work.n_layers,
            heads=work.n_heads,
            attn_dim_head=work.d_model // work.n_heads,
            rotary_pos_emb=True,
            rotary_emb_dim=work.d_model // work.n_heads,
            attn_flash=True,
        )
        sizes = {"num_tokens": IDS, "max_seq_len": work.segment_length, "max_mem_len": work.slots}
        return TransformerWrapper(**sizes, use_abs_pos_emb=False, attn_layers=layers)

    @torch.no_grad()
    def full_memory(self, batch: int) -> Any:
        # Read as many segments as it needs to fill its memory.
        count, memory = -(-self.work.slots // self.work.segment_length), None
        for tokens, _ in islice(segments(batch, self.work.segment_length), count):
            _, memory, _ = self.read(tokens.to(DEVICE), memory)
        return memory

    def slots(self, memory: Any) -> set[int]:
        return {states.shape[1] for states in memory}

    def read(self, tokens: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        logits, memory = self.model(tokens, mems=memory, return_mems=True)
        return logits, memory, logits.new_zeros(())

    @torch.no_grad()
    def decoder(self, batch: int, at: int) -> Step:
        """Decode as its memory wrapper's `generate`: with a KV cache until the segment ends."""
        self.model.eval()
        memory, segment, cache = self.full_memory(batch), self.prefix(batch, at), None
        options: dict[str, Any] = {"return_mems": True, "return_intermediates": True}
        if at:
            _, cache = self.model(segment, mems=memory, **options)

        @torch.no_grad()
        def step(tokens: Tensor) -> Tensor:
            nonlocal memory, segment, cache
            segment = torch.cat([segment, tokens[:, None]], dim=1)
            logits, cache = self.model(segment, mems=memory, cache=cache, **options)
            if segment.shape[1] == self.work.segment_length:
                memory, segment, cache = cache.mems, segment[:, :0], None
            return logits[:, -1]

        return step


PEERS: dict[str, type[Contender]] = {peer.name: peer for peer in (Lucidrains, Labml, XTransformers)}
