"""The Compressive Transformer (Rae et al. 2019): how a stream goes through its blocks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..attention.positions import PositionCache, chunk_positions
from ..config import ModelConfig
from ..errors import CompressiveError, CompressiveWarning
from ..memory import Memory, SlotLayout, empty_memory
from .block import Block, ChunkPlan, TierStates
from .checks import check_token_ids, checked_lengths, checked_targets
from .embedding import IGNORE_INDEX, build_embedding


@dataclass(frozen=True, eq=False)
class Output:
    """What the model gives for a chunk of tokens."""

    logits: Tensor
    """`[batch, chunk, vocab_size]`; of padding, undefined. An adaptive model that is given targets leaves them out:
    `[batch, chunk, 0]`."""
    memory: Memory
    """Memory after the chunk."""
    compression_loss: Tensor
    """Scalar, summed over layers and commits; reaches the compression functions only. 0 without gradient."""
    reconstruction_error: Tensor
    """`[n_layers]` squared error / squared target of that loss, mean over commits; 0 where there was none."""
    nats: Tensor | None = None
    """`[batch, chunk]` negative log-likelihood of each target, in double precision, 0 where ignored; None without
    targets."""


class CompressiveTransformer(nn.Module):
    """A language model that reads a stream segment by segment and remembers it in two tiers of memory.

    Memory goes in and comes out; nothing that depends on data is kept in the module. However a stream is cut
    into calls, logits and memory are the same.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layouts = tuple(SlotLayout.of(config, layer) for layer in range(config.n_layers))
        self.embedding = build_embedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self._initialize()
        self._warn()

    def empty_memory(self, batch_size: int) -> Memory:
        """The memory of `batch_size` lanes that have read nothing, on the model's device and in its dtype.

        Raises CompressiveError where the device has no room for it.
        """
        if batch_size < 1:
            raise CompressiveError(f"batch_size ({batch_size}) must be 1 or more")
        weight, usage = self.embedding.weight, [bool(block.uses_usage) for block in self.blocks]
        try:
            return empty_memory(self.config, batch_size, usage=usage, device=weight.device, dtype=weight.dtype)
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
        distances: PositionCache | None = None,
    ) -> Output:
        """Logits for the next token after each of `tokens [batch, chunk]`, and the memory that follows.

        A chunk may have any length. With `lengths [batch]` lane b reads its first `lengths[b]` tokens and the
        rest is padding, which nothing depends on. Without `memory` the lanes start empty. With the next tokens as
        `targets [batch, chunk]`, -100 where there is none, the output has their nats too; padding has none.
        `distances` are what earlier calls have projected, with the same weights and without gradient.

        Raises CompressiveError where tokens, memory, lengths or targets do not fit one another or the model, and for
        `distances` where there is gradient.
        """
        if distances is not None and torch.is_grad_enabled():
            raise CompressiveError("distances are kept where there is no gradient: call the model in torch.no_grad()")
        lengths = checked_lengths(tokens, lengths)
        targets = checked_targets(tokens, targets, lengths)
        for ids in (tokens,) if targets is None else (tokens, targets.masked_fill(targets == IGNORE_INDEX, 0)):
            check_token_ids(ids, self.config.vocab_size)
        memory = self.empty_memory(len(tokens)) if memory is None else memory
        self.check_memory(memory, len(tokens))
        layout = self.layouts[0]  # segments are as long in every layer
        room = layout.segment_length - layout.pending(memory.seen)
        if bool((lengths <= room).all()):
            return self._read(tokens, memory, lengths, targets, distances)
        outputs, read = [], torch.zeros_like(lengths)
        while bool((read < lengths).any()):
            room = layout.segment_length - layout.pending(memory.seen)
            taken = torch.minimum(room, lengths - read)
            places = read[:, None] + torch.arange(int(taken.max()))
            places = places.clamp(max=tokens.shape[1] - 1).to(tokens.device)
            wanted = None if targets is None else targets.gather(1, places)
            output = self._read(tokens.gather(1, places), memory, taken, wanted, distances)
            outputs.append((read, taken, output))
            memory, read = output.memory, read + taken
        return _joined(outputs, tokens.shape[1])

    def _read(
        self, tokens: Tensor, memory: Memory, lengths: Tensor, targets: Tensor | None, distances: PositionCache | None
    ) -> Output:
        """One pass over a chunk in which no lane reads beyond its current segment."""
        weight, after = self.embedding.weight, memory.seen + lengths
        chunks = {}
        for layout in set(self.layouts):  # all layers of a layout share one computation
            positions = chunk_positions(
                self.config,
                layout,
                seen=memory.seen,
                lengths=lengths,
                chunk=tokens.shape[1],
                like=weight,
                distances=distances,
            )
            chunks[layout] = ChunkPlan(layout, memory.seen, after, positions)
        hidden = self.dropout(self.embedding(tokens))
        zero = weight.new_zeros(())
        tiers = []
        layers = zip(memory.compressed, memory.recent, memory.pending, strict=True)
        usages = memory.usage or [zero] * len(self.blocks)
        each = zip(self.blocks, self.layouts, layers, usages, strict=True)
        for block, layout, (compressed, recent, pending), usage in each:
            hidden, tier = block(hidden, TierStates(compressed, recent, pending, usage, zero, zero), chunks[layout])
            tiers.append(tier)
        logits, nats = self.embedding.read_out(self.final_norm(hidden), targets)
        return Output(
            logits=logits,
            memory=Memory(
                seen=after,
                compressed=tuple(tier.compressed for tier in tiers),
                recent=tuple(tier.recent for tier in tiers),
                pending=tuple(tier.pending for tier in tiers),
                usage=tuple(tier.usage for tier in tiers) if memory.usage else (),
            ),
            compression_loss=torch.stack([tier.loss for tier in tiers]).sum(),
            reconstruction_error=torch.stack([tier.error for tier in tiers]),
            nats=nats,
        )

    def check_memory(self, memory: Memory, batch_size: int) -> None:
        """Raise CompressiveError unless `memory` is one of this model's, of `batch_size` lanes."""
        d_model = self.config.d_model
        tiers = (memory.compressed, memory.recent, memory.pending)
        way_out = f"start from model.empty_memory({batch_size})"
        if (layers := [len(tier) for tier in tiers]) != [self.config.n_layers] * 3:
            raise CompressiveError(
                f"memory does not fit: it must have {self.config.n_layers} layers in each tier, got {layers}; {way_out}"
            )
        seen = memory.seen
        if seen.shape != (batch_size,) or seen.dtype != torch.int64 or bool((seen < 0).any()):
            raise CompressiveError(
                f"memory does not fit: seen must be int64 [batch = {batch_size}], 0 or more, "
                f"got {seen.dtype} {list(seen.shape)}; {way_out}"
            )
        like = self.embedding.weight
        for held in (one for tier in tiers for one in tier):
            # Autocast leaves states of a lower precision than parameters, which are read as they are.
            fits = held.is_floating_point() and torch.promote_types(held.dtype, like.dtype) == like.dtype
            if not fits or held.device != like.device:
                raise CompressiveError(
                    f"memory does not fit: the model is {like.dtype} on {like.device}, states are {held.dtype} on "
                    f"{held.device}; {way_out}, or take it there by memory.to(...)"
                )
        pending = int(self.layouts[0].pending(seen).max())
        for layer, (layout, *states) in enumerate(zip(self.layouts, *tiers, strict=True)):
            lengths = (layout.compressed_length, layout.recent_length, pending)
            shapes = [tuple(one.shape) for one in states]
            expected = [(batch_size, length, d_model) for length in lengths]
            wide_enough = shapes[2] == (batch_size, *shapes[2][1:2], d_model) and shapes[2][1] >= pending
            if shapes[:2] != expected[:2] or not wide_enough:
                raise CompressiveError(
                    f"memory does not fit: compressed, recent and pending states of layer {layer} must be {expected}, "
                    f"[batch, slot, d_model] each, got {shapes}; {way_out}"
                )
        each = zip(self.blocks, memory.recent, memory.pending, strict=True)
        widths = [bool(block.uses_usage) * (recent.shape[1] + own.shape[1]) for block, recent, own in each]
        usage = [(batch_size, width, 1) for width in widths] if any(block.uses_usage for block in self.blocks) else []
        if (given := [tuple(states.shape) for states in memory.usage]) != usage:
            raise CompressiveError(
                f"memory does not fit: usage must be {usage}, [batch, slot, 1] a layer, got {given}; "
                f"compression = {self.config.compression!r} decides; {way_out}"
            )

    def _initialize(self) -> None:
        """Normal weights of deviation d_model^-1/2; what adds to the residual stream is scaled down with depth.

        A compression function starts as its own class says.
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
        """Say where a compression function would never learn; not of a model built on meta, to take other weights."""
        learns = any(block.learns_to_compress for block in self.blocks)
        if learns and self.config.compression_loss == "none" and not self.embedding.weight.is_meta:
            warnings.warn(
                f'compression_loss = "none": nothing trains the compression function {self.config.compression!r}, it '
                'stays as it starts; choose "attention", "auto-encoding" or "bptt", or a function without parameters',
                CompressiveWarning,
                stacklevel=3,
            )


def _joined(outputs: list[tuple[Tensor, Tensor, Output]], chunk: int) -> Output:
    """One output of several pieces, each read from place `read [batch]` on for `taken [batch]` tokens."""
    last = outputs[-1][2]
    device, real, to = last.logits.device, [], []
    for read, taken, output in outputs:
        lanes, places = (torch.arange(output.logits.shape[1]) < taken[:, None]).nonzero(as_tuple=True)
        real.append((lanes.to(device), places.to(device)))
        to.append(lanes * chunk + read[lanes] + places)

    def join(parts: list[Tensor]) -> Tensor:
        rows = torch.cat([part[at] for part, at in zip(parts, real, strict=True)])
        empty = rows.new_zeros(last.memory.batch_size * chunk, *rows.shape[1:])
        joined: Tensor = empty.index_copy(0, torch.cat(to).to(device), rows).unflatten(0, (-1, chunk))
        return joined

    nats = [output.nats for *_, output in outputs if output.nats is not None]
    loss = torch.stack([output.compression_loss for *_, output in outputs]).sum()
    errors = torch.stack([output.reconstruction_error for *_, output in outputs])
    error = errors.sum(0) / (errors > 0).sum(0).clamp(min=1)
    return replace(
        last,
        logits=join([output.logits for *_, output in outputs]),
        compression_loss=loss,
        reconstruction_error=error,
        nats=join(nats) if nats else None,
    )
