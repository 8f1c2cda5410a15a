"""The commit: states of a complete segment enter recent memory, the oldest states there leave it to be compressed."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import SlotLayout


def place_segment(layout: SlotLayout, pending: Tensor, states: Tensor, *, before: Tensor, after: Tensor) -> Tensor:
    """Return the segment so far `[batch, width, d_model]`: pending states, then each lane's new `states`.

    `before` and `after [batch]` are the tokens seen before and after `states [batch, chunk, d_model]`, which
    complete at most one segment. The segment is as wide as the furthest lane needs; the rest of a lane is padding.
    """
    begin = layout.pending(before)
    width = layout.segment_width(before=before, after=after)
    first = int(begin[0])
    if bool((begin == first).all()):
        return states[:, :width] if first == 0 else torch.cat([pending[:, :first], states[:, : width - first]], 1)
    held = pending.shape[1]
    places = torch.arange(width).expand(len(begin), -1)
    new = (held + places - begin[:, None]).clamp(max=held + states.shape[1] - 1)
    return _gather(torch.cat([pending, states], dim=1), torch.where(places < begin[:, None], places, new))


def next_pending(layout: SlotLayout, segment: Tensor, seen: Tensor) -> Tensor:
    """Return pending states `[batch, pending, d_model]` at `seen [batch]` tokens, padded with zeros."""
    filled = layout.pending(seen)
    width = int(filled.max())
    beyond = torch.arange(width) >= filled[:, None]
    return segment[:, :width].masked_fill(beyond[:, :, None].to(segment.device), 0.0)


def evicted_groups(layout: SlotLayout, states: Tensor, seen: Tensor, counts: Tensor, overlap: int = 0) -> Tensor:
    """Return the groups that a commit evicts, newest last, `[batch, group, compression_rate + overlap, d_model]`.

    `states [batch, recent + segment, d_model]` are recent memory and the complete segment, `seen [batch]`
    counts the segment too. Of a lane, only the newest `counts [batch]` groups are real; the others are zeros.
    """
    stops = states.shape[1] - layout.memory_length - layout.waiting(seen) + overlap
    count, rate = layout.groups_per_commit, layout.compression_rate
    groups = _window(states, stops, count * rate + overlap).unfold(1, rate + overlap, rate).transpose(2, 3)
    if bool((counts == count).all()):
        return groups
    padding = torch.arange(count) < count - counts[:, None]
    return groups.masked_fill(padding[:, :, None, None].to(groups.device), 0.0)


def new_groups(layout: SlotLayout, *, before: Tensor, after: Tensor) -> Tensor:
    """Return how many groups fill while `seen` grows from `before [batch]` to `after [batch]`, at most one commit."""
    return layout.compressed_groups(after) - layout.compressed_groups(before)


def append_compressed(compressed: Tensor, new: Tensor, counts: Tensor) -> Tensor:
    """Return compressed memory `[batch, slot, d_model]` with the newest `counts [batch]` states of `new` added."""
    length, added = compressed.shape[1], new.shape[1]
    joined = torch.cat([compressed, new], dim=1)
    if bool((counts == added).all()):
        return joined[:, added:].clone()
    age = length - 1 - torch.arange(length)  # 0 is the newest slot
    kept = age - counts[:, None]
    places = torch.where(kept < 0, length + added - 1 - age, length - 1 - kept)
    return _gather(joined, places)


def next_recent(layout: SlotLayout, states: Tensor, complete: Tensor) -> Tensor:
    """Return recent memory after a commit of the lanes in `complete [batch]`; `states` as in `evicted_groups`."""
    stops = layout.recent_length + layout.segment_length * complete.long()
    return _window(states, stops, layout.recent_length).clone()


def _window(states: Tensor, stops: Tensor, length: int) -> Tensor:
    """Return the `length` states before place `stops [batch]` of each lane, the first one repeated if need be."""
    first = int(stops[0]) - length
    if first >= 0 and bool((stops == stops[0]).all()):
        return states.narrow(1, first, length)
    return _gather(states, (stops[:, None] - length + torch.arange(length)).clamp(min=0))


def _gather(states: Tensor, places: Tensor) -> Tensor:
    lanes = torch.arange(states.shape[0], device=states.device)[:, None]
    return states[lanes, places.to(states.device)]
