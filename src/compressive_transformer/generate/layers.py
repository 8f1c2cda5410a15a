"""The weights of a model as decoding reads them: packed once, with the projected distances of relative attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..attention import RelativeAttention, rotated
from ..attention.positions import Positions, RelativePositions, relative_positions
from ..errors import CompressiveError
from ..memory import SlotLayout
from ..model import CompressiveTransformer
from ..model.block import Block, ChunkPlan, TierStates
from ..model.embedding import TiedEmbedding
from .packed import Precision, check_precision, pack


class Scratch:
    """Room for what one layer computes for one token, shared by all layers; heads and lanes are one axis, heads first.

    Written again by each layer: views that are made once cost nothing, where each would cost as much as a small sum.
    """

    def __init__(self, like: Tensor, *, biases: int, n_heads: int, batch_size: int, d_head: int) -> None:
        self.batch_size = batch_size
        self.queries = like.new_zeros(max(1, biases), n_heads, batch_size, d_head)
        self.content = self.queries[0].view(n_heads * batch_size, 1, d_head)
        self.shifted = self.queries[1:].unbind(0)
        self.mixed = like.new_zeros(n_heads * batch_size, 1, d_head)
        self.mixed_lanes = self.mixed.view(n_heads, batch_size, d_head).transpose(0, 1)  # [batch, head, d_head]


@dataclass(frozen=True, eq=False)
class Reach:
    """What one token of one layer reads and writes: views into buffers, of slots up to its own place."""

    own: Tensor
    """Where its key and value go and, under rotary positions, its turned key `[2 or 3, head, batch, d_head]`."""
    keys: Tensor
    """`[head · batch, d_head, slot]`."""
    values: Tensor
    """`[head · batch, slot, d_head]`."""
    scores: Tensor
    """Room for scores `[head · batch, 1, slot]`, shared by all layers."""
    masked: Tensor
    """Those of compressed and recent slots `[head, batch, slot]`."""
    scratch: Scratch
    rows: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
    """Of each region projected distances `[head, d_head, slot]`, room for scores `[head, batch, slot]`, and where they
    go; relative attention only."""
    angles: Tensor | None = None
    """Of the token's place `[1, 1, d_head]`; rotary attention only."""


class PackedLayer:
    """One block, for tokens read one at a time."""

    def __init__(self, block: Block, precision: Precision) -> None:
        self.block = block
        attention = block.attention
        self.n_heads, self.d_head = attention.n_heads, attention.d_head
        scale = self.d_head**-0.5
        self.project = pack(torch.cat([attention.query.weight * scale, attention.key_value.weight]), precision)
        self.output = pack(attention.output.weight, precision)
        widen, _, narrow = cast("list[nn.Linear]", list(block.feed_forward))
        # In full precision gelu(x) = (y + y · erf y) / √2 with y = x / √2: two sums, where `gelu` calls a library that
        # takes as long as a product for one row. Both factors go into the weights.
        self.by_erf = precision == "full"
        factor = 0.5**0.5 if self.by_erf else 1.0
        self.widen, self.narrow = pack(widen.weight * factor, precision), pack(narrow.weight * factor, precision)
        self.widen_bias = (widen.bias.detach() * factor).to(self.widen.dtype)
        self.narrow_bias = narrow.bias.detach().clone()
        self.attention_norm, self.feed_forward_norm = _norm(block.attention_norm), _norm(block.feed_forward_norm)
        self.biases: Tensor | None = None
        if isinstance(attention, RelativeAttention):  # of content, of distances, and of compressed distances if other
            biases: list[Tensor] = [attention.content_bias, attention.position_bias]
            if attention.own_compressed_position:
                biases.append(attention.compressed_position_bias)
            self.biases = (torch.stack(biases) * scale)[:, :, None]

    def step(self, hidden: Tensor, reach: Reach, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The next layer's input and the state that memory keeps, `[batch, d_model]` each, and what was attended.

        `mask [slot]` is 0 or -inf for compressed and recent slots, None where all are filled. What was attended are
        weights `[head · batch, 1, slot]`.
        """
        state = self.attention_norm(hidden) if self.block.pre_norm else hidden
        scores = self._scores(self.project(state), reach)
        if mask is not None:
            reach.masked.add_(mask)
        weights = torch.softmax(scores, dim=-1)
        torch.bmm(weights, reach.values, out=reach.scratch.mixed)
        return self.finish(hidden, reach.scratch.mixed_lanes.reshape(hidden.shape)), state, weights

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The next layer's input from this one's and what attention mixed of the values, `[batch, d_model]` each."""
        pre_norm = self.block.pre_norm
        attended = self.output(mixed, hidden)
        if not pre_norm:
            attended = self.attention_norm(attended)
        inner = self.feed_forward_norm(attended) if pre_norm else attended
        inner = self.widen(inner, self.widen_bias)
        inner = torch.addcmul(inner, inner, torch.erf(inner)) if self.by_erf else functional.gelu(inner)
        hidden = self.narrow(inner, attended + self.narrow_bias)
        return hidden if pre_norm else self.feed_forward_norm(hidden)

    def _scores(self, projected: Tensor, reach: Reach) -> Tensor:
        """Scores `[head · batch, 1, slot]` of queries in `projected [batch, 3 · d_model]`, whose keys are kept."""
        batch_size, width = projected.shape
        d_model, scratch = width // 3, reach.scratch
        # [query, key and value, head, batch, d_head] in one view each
        sizes, strides = (self.n_heads, batch_size, self.d_head), (d_model, self.d_head, width, 1)
        queries = projected.as_strided((1, *sizes), strides)
        keys_values = projected.as_strided((2, *sizes), strides, d_model)
        if self.biases is None:
            assert reach.angles is not None
            reach.own[:2].copy_(keys_values)
            # `rotated` takes [batch, place, head, d_head]: here query and key are the batch, heads the places.
            both = torch.cat([queries, keys_values[:1]]).to(reach.keys.dtype)
            turned = rotated(both, reach.angles.expand(1, self.n_heads, -1))
            scratch.queries.copy_(turned[:1])
            reach.own[2].copy_(turned[1])
            return torch.bmm(scratch.content, reach.keys, out=reach.scores)
        reach.own.copy_(keys_values)
        torch.add(queries, self.biases, out=scratch.queries)
        for at, (rows, room, scores) in enumerate(reach.rows):
            torch.bmm(scratch.shifted[at % len(scratch.shifted)], rows, out=room)
            scores.copy_(room)
        return reach.scores.baddbmm_(scratch.content, reach.keys)


def has_plain_layers(model: CompressiveTransformer) -> bool:
    """Whether the layers that are packed compute with their own weights alone; adapters and quantised layers do not."""
    for block in cast("list[Block]", list(model.blocks)):
        attention, network = block.attention, list(block.feed_forward.children())
        products = [attention.query, attention.key_value, attention.output, *network[::2]]
        norms = [block.attention_norm, block.feed_forward_norm]
        if any(type(layer).forward is not nn.Linear.forward for layer in products):
            return False
        if any(type(layer).forward is not nn.LayerNorm.forward for layer in norms):
            return False
    return True


def _norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """A layer norm without the cost of calling a module."""
    assert isinstance(norm, nn.LayerNorm)
    return partial(
        torch.layer_norm, normalized_shape=norm.normalized_shape, weight=norm.weight, bias=norm.bias, eps=norm.eps
    )


class PackedModel:
    """A model for decoding: packed layers, read-out, and distances projected once for each kind of segment."""

    def __init__(self, model: CompressiveTransformer, precision: Precision) -> None:
        """Raises CompressiveError for a model with layers that are not its own (see `is_plain`)."""
        check_precision(precision, model.embedding.weight.device)
        if not has_plain_layers(model):
            raise CompressiveError(
                "a layer of the model computes with more than its own weights, which decoding would leave out: merge "
                "adapters first, or read with the model itself"
            )
        self.model = model
        self.config = model.config
        self.layers = [PackedLayer(cast(Block, block), precision) for block in model.blocks]
        # The logits of an adaptive embedding are those of the model, in full precision.
        tied = isinstance(model.embedding, TiedEmbedding)
        self.read_out = pack(model.embedding.weight, precision) if tied else None
        self._rows: dict[tuple[SlotLayout, int], tuple[list[Tensor], int]] = {}

    def logits(self, hidden: Tensor) -> Tensor:
        """`[batch, d_model]` -> `[batch, vocab_size]`, in the model's dtype."""
        hidden = self.model.final_norm(hidden)
        if self.read_out is None:
            made, _ = self.model.embedding.read_out(hidden[:, None], None)
            return made[:, 0]
        return self.read_out(hidden).to(hidden.dtype)

    def layers_of(self, layout: SlotLayout) -> list[int]:
        """The layers that have this layout."""
        return [layer for layer, other in enumerate(self.model.layouts) if other == layout]

    def rows(self, layout: SlotLayout, seen: Tensor) -> tuple[list[Tensor], int]:
        """Distances from all tokens of a segment that begins at `seen [1]`, projected; recent slots come first.

        One tensor a region, `[step, layer, head, d_head, row]`: the token at place step · a + b of the segment, of
        `queries`, reads the rows from queries / step - 1 - a on of step b. The second number is `queries`.
        """
        waiting = int(layout.waiting(seen))  # the only number of a segment that distances depend on
        if (layout, waiting) not in self._rows:
            length = torch.tensor([layout.segment_length])
            positions = relative_positions(
                self.config, layout, seen=seen, lengths=length, chunk=layout.segment_length, like=self.weight
            )
            self._rows[layout, waiting] = self._projected(layout, positions), positions.queries
        return self._rows[layout, waiting]

    def _projected(self, layout: SlotLayout, positions: RelativePositions) -> list[Tensor]:
        tables = []
        for recent, grid in zip((True, False), reversed(positions.grids), strict=False):
            rows = []
            for layer in self.layers_of(layout):
                attention = self.layers[layer].block.attention
                assert isinstance(attention, RelativeAttention)
                own = attention.own_compressed_position and not recent
                projection = attention.compressed_position if own else attention.position
                heads = projection(grid.rows[:, 0]).unflatten(-1, (attention.n_heads, attention.d_head))
                rows.append(heads.permute(0, 2, 1, 3))  # [step, head, row, d_head]
            tables.append(torch.stack(rows, dim=1).contiguous().transpose(3, 4))
        return tables

    def commit(self, tiers: list[TierStates], pending: Tensor, seen: Tensor) -> list[TierStates]:
        """The commit of the blocks themselves at `seen [batch]` tokens; `pending [layer, batch, segment, d_model]`."""
        training = self.model.training
        if training:
            self.model.eval()  # a compression function may drop, too
        before, nowhere = seen - self.config.segment_length, Positions(pending.new_zeros(()))
        chunks = {layout: ChunkPlan(layout, before, seen, nowhere) for layout in set(self.model.layouts)}
        committed = [
            layer.block.commit(own, states, None, chunks[layout])
            for layer, own, states, layout in zip(self.layers, tiers, pending, self.model.layouts, strict=True)
        ]
        if training:
            self.model.train()
        return committed

    @property
    def weight(self) -> Tensor:
        """A tensor of the model's dtype on its device."""
        return self.model.embedding.weight
