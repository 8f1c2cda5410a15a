"""The Compressive Transformer (Rae et al. 2019): a stream of tokens through its blocks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention.positions import PositionCache, chunk_positions
from ..config import ModelConfig
from ..errors import CompressiveError, CompressiveWarning
from ..memory import Memory, SlotLayout, empty_memory
from .block import Block, ChunkPlan
from .checks import check_memory, check_token_ids, checked_lengths, checked_targets
from .embedding import IGNORE_INDEX, build_embedding


@dataclass(frozen=True, eq=False)
class Output:
    """Result of the model for a chunk of tokens."""

    memory: Memory
    """Memory after the chunk."""
    compression_loss: Tensor
    """Scalar, summed over layers and commits; reaches the compression functions only. 0 without gradient."""
    reconstruction_error: Tensor
    """`[n_layers]` squared error / squared target of that loss, mean over commits; 0 where there was none."""
    nats: Tensor | None
    """`[batch, chunk]` negative log-likelihood of each target, in double precision, 0 where ignored; None without
    targets."""
    _logits: Tensor | None

    @property
    def logits(self) -> Tensor:
        """`[batch, chunk, vocab_size]`; undefined for padding.

        Raises CompressiveError for a model with an adaptive vocabulary that was given targets.
        """
        if self._logits is None:
            raise CompressiveError("an adaptive model that is given targets computes nats only; call it without")
        return self._logits


class CompressiveTransformer(nn.Module):
    """A language model that reads a stream segment by segment and remembers it in two tiers of memory.

    Memory goes in and comes out; nothing that depends on data is kept in the module. However a stream is cut
    into calls, logits and memory are the same.

    Args:
        config: Sizes of the network and of its memory.
        attention: Kernel of relative attention: "auto" chooses by device, "cpu" is made for CPUs, "sdpa" is
            `scaled_dot_product_attention`, for devices with fused kernels. All give the same numbers up to rounding.

    Raises:
        CompressiveError: The compression function is not registered, or does not fit the config.

    Example:
        >>> model = ct.CompressiveTransformer(ct.ModelConfig(vocab_size=257))
        >>> output = model(tokens)  # [batch, chunk]
        >>> output = model(more_tokens, output.memory)
    """

    gradient_checkpointing: int = 0
    """Recompute the activations of every n-th block in the backward pass, 1 for all: less memory, more time."""

    def __init__(self, config: ModelConfig, attention: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.layouts = tuple(SlotLayout.of(config, layer) for layer in range(config.n_layers))
        self.embedding = build_embedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer, attention) for layer in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self._initialize()
        self._warn()

    def empty_memory(self, batch_size: int) -> Memory:
        """Return the memory of `batch_size` lanes that have read nothing, on the model's device and in its dtype.

        Raises:
            CompressiveError: `batch_size` is less than 1, or the device has no room for the memory.
        """
        if batch_size < 1:
            raise CompressiveError(f"batch_size ({batch_size}) must be 1 or more")
        weight = self.embedding.weight
        try:
            return empty_memory(
                self.config, batch_size, usage=self._uses_usage(), device=weight.device, dtype=weight.dtype
            )
        except RuntimeError as error:
            slots = sum(layout.compressed_length + layout.recent_length for layout in self.layouts)
            size = batch_size * slots * self.config.d_model * weight.element_size()
            raise CompressiveError(
                f"memory of {batch_size} lanes cannot be held: it takes {size:,} bytes on {weight.device}; "
                "use shorter memories or fewer lanes"
            ) from error

    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        lengths: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        position_cache: PositionCache | None = None,
    ) -> Output:
        """Read a chunk of tokens of any length, and commit each segment that it completes.

        Args:
            tokens: Token ids, `[batch, chunk]`.
            memory: Memory before the chunk; by default empty.
            lengths: Tokens that each lane reads, `[batch]`, int64; the rest is padding, which nothing depends on. By
                default the whole chunk.
            targets: Next tokens, `[batch, chunk]`, int64, -100 where there is none; the output has their nats then.
            position_cache: Internal: projections of positions kept from call to call while weights stay the same.

        Returns:
            Logits for the next token after each token, and the memory that follows.

        Raises:
            CompressiveError: Tokens, memory, lengths or targets do not fit one another or the model.
        """
        if position_cache is not None and torch.is_grad_enabled():
            raise CompressiveError("a position cache is for reading without gradient: call in torch.no_grad()")
        lengths = checked_lengths(tokens, lengths)
        targets = checked_targets(tokens, targets, lengths)
        for ids in (tokens,) if targets is None else (tokens, targets.masked_fill(targets == IGNORE_INDEX, 0)):
            check_token_ids(ids, self.config.vocab_size)
        memory = self.empty_memory(len(tokens)) if memory is None else memory
        self.check_memory(memory, len(tokens))
        layout = self.layouts[0]  # segments are as long in every layer
        room = layout.segment_length - layout.pending(memory.seen)
        if bool((lengths <= room).all()):
            return self._read(tokens, memory, lengths, targets, position_cache)
        outputs, read = [], torch.zeros_like(lengths)
        while bool((read < lengths).any()):
            room = layout.segment_length - layout.pending(memory.seen)
            taken = torch.minimum(room, lengths - read)
            places = read[:, None] + torch.arange(int(taken.max()))
            places = places.clamp(max=tokens.shape[1] - 1).to(tokens.device)
            wanted = None if targets is None else targets.gather(1, places)
            output = self._read(tokens.gather(1, places), memory, taken, wanted, position_cache)
            outputs.append((read, taken, output))
            memory, read = output.memory, read + taken
        return _joined(outputs, tokens.shape[1])

    def _read(
        self,
        tokens: Tensor,
        memory: Memory,
        lengths: Tensor,
        targets: Tensor | None,
        position_cache: PositionCache | None,
    ) -> Output:
        """Read a chunk in which no lane goes beyond its current segment."""
        plans = self._plans(memory.seen, lengths, tokens.shape[1], position_cache)
        hidden = self.dropout(self.embedding(tokens))
        every = self.gradient_checkpointing if torch.is_grad_enabled() else 0
        layers, losses = [], []
        for number, (block, layer, layout) in enumerate(zip(self.blocks, memory.layers, self.layouts, strict=True)):
            # The reentrant form would lose the gradient of the compression loss, which lies inside a tuple.
            recompute = every > 0 and number % every == 0
            run = partial(checkpoint, block, use_reentrant=False) if recompute else block
            hidden, layer, loss = run(hidden, layer, plans[layout])
            layers.append(layer)
            losses.append(loss)
        logits, nats = self.embedding.read_out(self.final_norm(hidden), targets)
        zero = self.embedding.weight.new_zeros(())
        return Output(
            memory=Memory(memory.seen + lengths, tuple(layers)),
            compression_loss=torch.stack([zero if loss is None else loss.loss for loss in losses]).sum(),
            reconstruction_error=torch.stack([zero if loss is None else loss.relative_error for loss in losses]),
            nats=nats,
            _logits=logits,
        )

    def _plans(
        self, seen: Tensor, lengths: Tensor, chunk: int, position_cache: PositionCache | None
    ) -> dict[SlotLayout, ChunkPlan]:
        """Return the plan of a chunk for each layout; all layers of a layout share one computation."""
        plans = {}
        for layout in set(self.layouts):
            positions = chunk_positions(
                self.config,
                layout,
                seen=seen,
                lengths=lengths,
                chunk=chunk,
                like=self.embedding.weight,
                cache=position_cache,
            )
            plans[layout] = ChunkPlan(layout, seen, seen + lengths, positions)
        return plans

    def check_memory(self, memory: Memory, batch_size: int) -> None:
        """Raise CompressiveError unless `memory` belongs to this model and has `batch_size` lanes."""
        check_memory(self.config, memory, batch_size=batch_size, like=self.embedding.weight, usage=self._uses_usage())

    def _uses_usage(self) -> list[bool]:
        return [block.uses_usage for block in cast(Iterable[Block], self.blocks)]

    def _initialize(self) -> None:
        """Draw normal weights of deviation d_model^-1/2; what adds to the residual stream is scaled down with depth.

        A compression function keeps the weights that its class starts with.
        """
        deviation = self.config.d_model**-0.5
        for name, module in self.named_modules():
            if ".compression" in name:
                continue
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.output.weight", "feed_forward.2.weight")):
                nn.init.normal_(parameter, std=deviation * (2 * self.config.n_layers) ** -0.5)

    def _warn(self) -> None:
        """Warn where a compression function would never learn; not on meta, where a model takes other weights."""
        learns = any(block.learns_to_compress for block in self.blocks)
        if learns and self.config.compression_loss == "none" and not self.embedding.weight.is_meta:
            warnings.warn(
                f'compression_loss = "none": nothing trains the compression function {self.config.compression!r}, it '
                'stays as it starts; choose "attention", "auto-encoding" or "bptt", or a function without parameters',
                CompressiveWarning,
                stacklevel=3,
            )


def _joined(outputs: list[tuple[Tensor, Tensor, Output]], chunk: int) -> Output:
    """Return one output of several pieces, each with `taken [batch]` tokens from place `read [batch]` on."""
    last = outputs[-1][2]
    device, real, to = last.compression_loss.device, [], []
    for read, taken, _ in outputs:
        lanes, places = (torch.arange(int(taken.max())) < taken[:, None]).nonzero(as_tuple=True)
        real.append((lanes.to(device), places.to(device)))
        to.append(lanes * chunk + read[lanes] + places)

    def join(parts: list[Tensor | None]) -> Tensor | None:
        pieces = [part for part in parts if part is not None]
        if not pieces:
            return None
        rows = torch.cat([part[at] for part, at in zip(pieces, real, strict=True)])
        empty = rows.new_zeros(last.memory.batch_size * chunk, *rows.shape[1:])
        joined: Tensor = empty.index_copy(0, torch.cat(to).to(device), rows).unflatten(0, (-1, chunk))
        return joined

    loss = torch.stack([output.compression_loss for *_, output in outputs]).sum()
    errors = torch.stack([output.reconstruction_error for *_, output in outputs])
    error = errors.sum(0) / (errors > 0).sum(0).clamp(min=1)
    return replace(
        last,
        compression_loss=loss,
        reconstruction_error=error,
        nats=join([output.nats for *_, output in outputs]),
        _logits=join([output._logits for *_, output in outputs]),
    )
