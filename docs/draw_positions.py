"""Drawing of docs/positions.svg: distances from a token to the slots that it attends to, in each numbering.

    python docs/draw_positions.py [OUT.svg]

Distances are read back from the sinusoids and angles that `chunk_positions` gives to attention, so the picture cannot
disagree with the code. Needs matplotlib (extra `plot`).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor

from compressive_transformer import ModelConfig
from compressive_transformer.attention.positions import RelativePositions, chunk_positions
from compressive_transformer.memory import SlotLayout
from draw_memory import COMPRESSED, FAINT, INK, RECENT, SEGMENT, label, save

CONFIG = ModelConfig(
    vocab_size=1,
    d_model=16,
    n_layers=1,
    n_heads=1,
    segment_length=3,
    memory_length=6,
    compressed_length=5,
    compression_rate=3,
)
SEEN = 30  # tokens before the segment that is drawn; enough to fill every slot
ROWS = (
    ("span", "relative", '"span", the default:\nmean of their tokens'),
    ("unit", "relative", '"unit", relative:\nin steps of one, with\nseparate weights'),
    ("unit", "rotary", '"unit", rotary:\nin steps of one,\nbehind recent memory'),
)


def distances(config: ModelConfig, query: int) -> tuple[list[float], list[float]]:
    """Return distances from token `query` to the compressed slots, and to all others that it sees, oldest first."""
    layout, like = SlotLayout.of(config, 0), torch.zeros((), dtype=torch.float64)
    segment = torch.tensor([config.segment_length])
    positions = chunk_positions(
        config, layout, seen=torch.tensor([SEEN]), lengths=segment, chunk=config.segment_length, like=like
    )
    if isinstance(positions, RelativePositions):
        found = []
        for grid in positions.grids:
            step = len(grid.rows)
            newest, remainder = divmod(query, step)
            first = positions.queries // step - 1 - newest
            found.append(_number(grid.rows[remainder, 0, first : first + grid.slots]))
        of_slots = torch.cat(found)
    else:
        of_slots = _number(positions.queries[0, query]) - _number(positions.slots[0])  # type: ignore[attr-defined]
    read = positions.mask[0, query] == 0
    count = layout.compressed_length
    return of_slots[:count][read[:count]].tolist(), of_slots[count:][read[count:]].tolist()


def _number(sinusoids: Tensor) -> Tensor:
    """Return the positions that rows [sines, cosines] encode, from their slowest frequency."""
    sines, cosines = sinusoids.chunk(2, dim=-1)
    width = sinusoids.shape[-1]
    return torch.atan2(sines[..., -1], cosines[..., -1]) * 10_000 ** ((width - 2) / width)


def draw(path: str | Path) -> None:
    """Write the figure as SVG, with the same bytes each time."""
    query = CONFIG.segment_length - 1
    furthest = max(distances(CONFIG, query)[0])
    figure = Figure(figsize=(10.2, 4.6), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-furthest - 10.5, 1.6)
    axes.set_ylim(-1.3, 6.6)
    axes.axis("off")
    for height, (numbering, form, text) in zip((4.5, 2.1, 0.1), ROWS, strict=True):
        config = replace(CONFIG, compressed_position=numbering, position=form)  # type: ignore[arg-type]
        _draw_row(axes, *distances(config, query), height=height)
        label(axes, -furthest - 10.2, height + 0.45, text, align="left")
    tiers = (
        (-furthest - 1.4, "compressed memory", COMPRESSED),
        (-8.4, "recent memory", RECENT),
        (-2.4, "segment", SEGMENT),
    )
    for x, text, (edge, _) in tiers:
        axes.text(x, 5.9, text, color=edge, fontsize=12, ha="left", va="center")
    label(
        axes,
        -furthest / 2,
        -1.05,
        "numbers: how many tokens back a slot stands, seen from the last token of the segment",
    )
    save(figure, path, salt="positions")


def _draw_row(axes: Axes, compressed: list[float], others: list[float], *, height: float) -> None:
    shared = bool(set(compressed) & set(others))
    axes.plot([-max(compressed) - 1.4, 0.6], [height - 0.62] * 2, color=FAINT, linewidth=0.8, zorder=1)
    for distance in compressed:
        _draw_slot(axes, distance, height + (1.0 if shared else 0.0), COMPRESSED)
    if CONFIG.compression_rate > 1 and max(compressed) - min(compressed) > len(compressed):
        half = CONFIG.compression_rate / 2 - 0.1
        for distance in compressed:  # the tokens that the slot replaces
            axes.plot([-distance - half, -distance + half], [height + 0.55] * 2, color=COMPRESSED[0], linewidth=2.0)
    for distance in others:
        _draw_slot(axes, distance, height, RECENT if distance >= CONFIG.segment_length else SEGMENT)


def _draw_slot(axes: Axes, distance: float, height: float, colours: tuple[str, str]) -> None:
    edge, fill = colours
    shape = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch(
            (-distance - 0.42, height - 0.4), 0.84, 0.8, boxstyle=shape, facecolor=fill, edgecolor=edge, linewidth=1.5
        )
    )
    axes.text(-distance, height - 0.02, f"{distance:g}", ha="center", va="center", fontsize=11, color=INK, zorder=4)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("positions.svg"))
