"""Weights of a model for decoding: packed once, with the projected distances of relative attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..attention import RelativeAttention, rotated
from ..attention.positions import Positions, compressed_offsets, distance_tables
from ..config import ModelConfig
from ..errors import CompressiveError
from ..memory import LayerMemory, SlotLayout
from ..model import CompressiveTransformer
from ..model.block import Block, ChunkPlan
from ..model.checks import evaluation_mode
from ..model.embedding import TiedEmbedding
from .packed import Precision, check_precision, pack


@dataclass(frozen=True, eq=False)
class Region:
    """Distances from one token of each lane to the slots of one region."""

    rows: Tensor
    """Projected distances `[head, d_head, row]`, those of the slots in order where `index` is None."""
    index: Tensor | None
    """Row of each slot `[head, batch, slot]`, where lanes differ."""
    queries: Tensor
    """The queries of `CacheView.queries` with the bias of the region, as `[head, batch, d_head]`."""
    scores: Tensor
    """Its part of the scores, as `[head, batch, slot]`."""


@dataclass(frozen=True, eq=False)
class CacheView:
    """Slots that one token of each lane reads in one layer, and the slot that it writes; views into the cache.

    Views of uniform lanes are made once a place, since a view costs as much as a small sum. Room for queries and scores
    is shared by all layers.
    """

    slot: Tensor | None
    """Slot that each token writes `[batch]`; None where it is the last one for all lanes."""
    buffer: Tensor
    """Keys, values and, under rotary positions, turned keys, `[2 or 3, batch, head, slot, d_head]`."""
    keys: Tensor
    """`[batch · head, d_head, slot]`."""
    values: Tensor
    """`[batch · head, slot, d_head]`."""
    queries: Tensor
    """Room for scaled queries with each bias `[bias, batch, head, d_head]`."""
    content: Tensor
    """The first of them, `[batch · head, 1, d_head]`."""
    scores: Tensor
    """Room for scores `[batch · head, 1, slot]`."""
    mask: Tensor | None
    """0 or -inf for the first slots, `[batch, 1, slot]`; None where all slots may be read."""
    regions: tuple[Region, ...] = ()
    """Relative attention only."""
    angles: Tensor | None = None
    """Angles of the tokens `[1 or batch, 1, d_head]`; rotary attention only."""

    @cached_property
    def last(self) -> Tensor:
        """Last slot of all lanes `[2 or 3, batch, head, d_head]`."""
        return self.buffer[:, :, :, -1]

    def write(self, keys_values: Tensor) -> None:
        """Write `keys_values [2 or 3, batch, head, d_head]` to the slots of the tokens."""
        if self.slot is None:
            self.last.copy_(keys_values)
        else:  # indices on both sides of the heads put lanes first
            lanes = torch.arange(len(self.slot), device=self.slot.device)
            self.buffer[:, lanes, :, self.slot] = keys_values.transpose(0, 1)


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
        self.biases = attention.query.weight.new_zeros(1, 1, 1, 1)
        if isinstance(attention, RelativeAttention):  # of content, of distances, and of compressed distances if other
            biases: list[Tensor] = [attention.content_bias, attention.position_bias]
            if attention.separate_compressed_position:
                biases.append(attention.compressed_position_bias)
            self.biases = (torch.stack(biases) * scale)[:, None].detach()  # [bias, 1, head, d_head]

    def step(self, hidden: Tensor, view: CacheView) -> tuple[Tensor, Tensor, Tensor]:
        """Read one token of each lane.

        Returns:
            The next layer's input and the state that memory keeps, `[batch, d_model]` each, and the attention weights
            `[batch · head, 1, slot]`.
        """
        state = self.attention_norm(hidden) if self.block.pre_norm else hidden
        weights = torch.softmax(self._scores(self.project(state), view), dim=-1)
        mixed = torch.bmm(weights, view.values).view(hidden.shape)
        return self.finish(hidden, mixed), state, weights

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Return the next layer's input from this one's and the mixed values, `[batch, d_model]` each."""
        pre_norm = self.block.pre_norm
        attended = self.output(mixed, hidden)
        if not pre_norm:
            attended = self.attention_norm(attended)
        inner = self.feed_forward_norm(attended) if pre_norm else attended
        inner = self.widen(inner, self.widen_bias)
        inner = torch.addcmul(inner, inner, torch.erf(inner)) if self.by_erf else functional.gelu(inner)
        hidden = self.narrow(inner, attended + self.narrow_bias)
        return hidden if pre_norm else self.feed_forward_norm(hidden)

    def _scores(self, projected: Tensor, view: CacheView) -> Tensor:
        """Write keys and values of `projected [batch, 3 · d_model]`, and return the scores `[batch · head, 1, slot]`.

        Queries are scaled already. Under relative positions a score is the sum of the terms in `attention/relative.py`;
        W_r has projected all distances beforehand.
        """
        batch = len(projected)
        heads = projected.view(batch, 3, self.n_heads, self.d_head).transpose(0, 1)
        if view.angles is None:
            queries, keys_values = heads.split((1, 2))
            view.write(keys_values)
            torch.add(queries, self.biases, out=view.queries)
        else:
            heads = heads.to(view.buffer.dtype)
            turned = rotated(heads[:2].transpose(0, 1).flatten(1, 2)[:, None], view.angles)
            queries, keys = turned.view(batch, 2, self.n_heads, self.d_head).unbind(1)
            view.write(torch.stack([heads[1], heads[2], keys]))
            view.queries.copy_(queries)
        for region in view.regions:
            scores = torch.bmm(region.queries, region.rows)  # [head, batch, row]
            region.scores.copy_(scores if region.index is None else scores.gather(2, region.index))
        # Under relative positions the scores hold the term of the distances already.
        scores = view.scores.baddbmm_(view.content, view.keys, beta=1 if view.regions else 0)
        if view.mask is not None:
            scores.view(batch, self.n_heads, -1)[:, :, : view.mask.shape[2]].add_(view.mask)
        return scores


def has_plain_layers(model: CompressiveTransformer) -> bool:
    """Return True if packed layers compute with their weights alone; adapters and quantized layers do not."""
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
    """Return a layer norm without the cost of calling a module."""
    assert isinstance(norm, nn.LayerNorm)
    return partial(
        torch.layer_norm, normalized_shape=norm.normalized_shape, weight=norm.weight, bias=norm.bias, eps=norm.eps
    )


class DistanceTable(NamedTuple):
    """Projected distances to one region of slots, of all layers of a layout."""

    rows: Tensor
    """`[layer, head, d_head, row]`; the slots of the region lie in order, wherever the token stands."""
    bias: int
    """Number of the packed bias that belongs to the region."""
    first: Callable[[Tensor], Tensor]
    """Row of the first slot, for places of tokens in the segment, or for offsets of compressed slots."""


class PackedModel:
    """A model for decoding: packed layers, packed read-out, and distances that are projected once.

    Raises:
        CompressiveError: A layer is not plain (see `has_plain_layers`), or the precision is not available.
    """

    def __init__(self, model: CompressiveTransformer, precision: Precision) -> None:
        check_precision(precision, model.embedding.weight.device)
        if not has_plain_layers(model):
            raise CompressiveError(
                "a layer of the model computes with more than its weights (an adapter?), which decoding would leave "
                "out: merge adapters first, or read with the model itself"
            )
        self.model = model
        self.config = model.config
        self.layers = [PackedLayer(cast(Block, block), precision) for block in model.blocks]
        # The logits of an adaptive embedding are those of the model, in full precision.
        tied = isinstance(model.embedding, TiedEmbedding)
        self.read_out = pack(model.embedding.weight, precision) if tied else None
        self._tables: dict[SlotLayout, list[DistanceTable]] = {}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[batch, vocab_size]` of `[batch, d_model]`, in the model's dtype."""
        hidden = self.model.final_norm(hidden)
        if self.read_out is None:
            logits, _ = self.model.embedding.read_out(hidden[:, None], None)
            return cast(Tensor, logits)[:, 0]
        return self.read_out(hidden).to(hidden.dtype)

    def layers_of(self, layout: SlotLayout) -> list[int]:
        """Return the layers that have this layout."""
        return [layer for layer, other in enumerate(self.model.layouts) if other == layout]

    def distance_tables(self, layout: SlotLayout) -> list[DistanceTable]:
        """Return projected distances to recent slots and segment, then to compressed slots, for layers of a layout.

        They are projected once.
        """
        if layout not in self._tables:
            recent, *compressed = distance_tables(self.config, layout, self.weight)
            last = layout.segment_length - 1
            tables = [self._table(layout, recent, lambda places: last - places, compressed=False)]
            if compressed:
                rows, first = _grouped_rows(self.config, layout)
                tables.append(self._table(layout, compressed[0][rows.to(recent.device)], first, compressed=True))
            self._tables[layout] = tables
        return self._tables[layout]

    def _table(
        self, layout: SlotLayout, sinusoids: Tensor, first: Callable[[Tensor], Tensor], *, compressed: bool
    ) -> DistanceTable:
        """Project `sinusoids [row, d_model]` in each layer of a layout."""
        rows, bias = [], 1
        for layer in self.layers_of(layout):
            attention = self.layers[layer].block.attention
            assert isinstance(attention, RelativeAttention)
            projection, _ = attention.position_parameters(compressed=compressed)
            heads = projection(sinusoids).unflatten(-1, (attention.n_heads, attention.d_head))
            rows.append(heads.permute(1, 2, 0))
            bias = 2 if compressed and attention.separate_compressed_position else 1
        return DistanceTable(torch.stack(rows).contiguous(), bias, first)

    def commit(self, layers: list[LayerMemory], seen: Tensor) -> list[LayerMemory]:
        """Return the memory after a commit at `seen [batch]` tokens; pending states are whole segments."""
        before, nowhere = seen - self.config.segment_length, Positions(self.weight.new_zeros(()))
        plans = {layout: ChunkPlan(layout, before, seen, nowhere) for layout in set(self.model.layouts)}
        with evaluation_mode(self.model):  # a compression function may drop, too
            return [
                packed.block.commit(layer, layer.pending, None, plans[layout])[0]
                for packed, layer, layout in zip(self.layers, layers, self.model.layouts, strict=True)
            ]

    @property
    def weight(self) -> Tensor:
        """A tensor of the model's dtype on its device."""
        return self.model.embedding.weight


def _grouped_rows(config: ModelConfig, layout: SlotLayout) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the order of distances to compressed slots, and the first row for `compressed_offsets`.

    Slots are `step` apart, so rows are grouped by distance modulo step; in a group the largest distance comes first.
    """
    _, step = compressed_offsets(config, layout, torch.zeros(1, dtype=torch.int64))
    group = -(-(layout.segment_length + layout.waiting_length) // step) + layout.compressed_length - 1
    rows = torch.arange(step)[:, None] + step * torch.arange(group - 1, -1, -1)
    last = group - layout.compressed_length
    return rows.flatten(), lambda offsets: offsets % step * group + last - offsets // step
