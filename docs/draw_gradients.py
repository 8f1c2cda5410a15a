"""Drawing of docs/gradients.svg: which loss trains what, and where gradients end.

    python docs/draw_gradients.py [OUT.svg]

Which arrows there are is measured on a small model, so the picture cannot disagree with the code. Needs matplotlib
(extra `plot`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from compressive_transformer import CompressiveTransformer, ModelConfig, next_token_loss
from draw_memory import COMPRESSED, FAINT, INK, RECENT, SEGMENT, arrow, label, save

TASK, OWN = "#b3361a", "#2e7d32"  # gradients of the task loss and of the compression loss
PLAIN = (INK, "#f4f4f4")


def measured(loss: Literal["attention", "bptt"]) -> dict[str, bool]:
    """Return if the gradient of each loss reaches the network, f_c, and the states in memory."""
    torch.manual_seed(0)
    sizes = {"segment_length": 4, "memory_length": 4, "compressed_length": 4, "compression_rate": 2}
    config = ModelConfig(vocab_size=257, d_model=16, n_layers=2, n_heads=2, **sizes, compression_loss=loss)
    model = CompressiveTransformer(config)
    tokens = torch.randint(0, 256, (1, 17))
    read = model(tokens[:, :12])  # enough for a commit that evicts
    output = model(tokens[:, 12:16], read.memory)
    layers = read.memory.layers
    found = {
        "memory keeps recent states in the graph": any(layer.recent.requires_grad for layer in layers),
        "memory keeps compressed states in the graph": any(
            layer.compressed.requires_grad for layer in read.memory.layers
        ),
    }
    losses = {"task": next_token_loss(output.logits, tokens[:, 13:]), "compression": read.compression_loss}
    for name, value in losses.items():
        model.zero_grad()
        if value.requires_grad:
            value.backward(retain_graph=True)
        reached = {key for key, parameter in model.named_parameters() if (g := parameter.grad) is not None and g.any()}
        found[f"{name} -> f_c"] = any(".compression." in key for key in reached)
        found[f"{name} -> network"] = any(".compression." not in key for key in reached)
    return found


def draw(path: str | Path) -> None:
    """Write the figure as SVG, with the same bytes each time."""
    found, bptt = measured("attention"), measured("bptt")
    figure = Figure(figsize=(10.2, 5.6), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-0.3, 12.9)
    axes.set_ylim(-0.75, 6.5)
    axes.axis("off")
    _box(axes, (0.0, 4.6), (8.8, 0.9), "network: embedding, projections, feed-forward", PLAIN)
    _box(axes, (0.0, 2.5), (2.7, 0.9), "compressed memory", COMPRESSED)
    _box(axes, (3.0, 2.5), (2.7, 0.9), "recent memory", RECENT)
    _box(axes, (6.0, 2.5), (2.8, 0.9), "segment", SEGMENT)
    _box(axes, (3.0, 0.5), (2.7, 0.9), "evicted states", RECENT)
    _box(axes, (0.5, 0.5), (1.7, 0.9), "$f_c$", PLAIN)
    _box(axes, (10.5, 4.6), (2.1, 0.9), "task loss", (TASK, "#ffffff"))
    _box(axes, (10.5, 0.5), (2.1, 0.9), "compression\nloss", (OWN, "#ffffff"))
    for x in (1.2, 4.2, 7.2):  # what attention reads
        arrow(axes, (x, 3.45), (x, 4.55), FAINT, width=1.2)
    arrow(axes, (8.85, 5.25), (10.45, 5.25), FAINT, width=1.2)
    arrow(axes, (4.2, 2.45), (4.2, 1.45), FAINT, width=1.2)
    arrow(axes, (2.95, 1.1), (2.25, 1.1), FAINT, width=1.2)
    arrow(axes, (1.2, 1.45), (1.2, 2.45), FAINT, width=1.2)
    arrow(axes, (5.75, 1.1), (10.45, 1.1), FAINT, width=1.2)
    axes.plot([8.2, 8.2, 9.6], [2.45, 1.75, 1.75], color=FAINT, linewidth=1.2)
    arrow(axes, (9.6, 1.75), (10.6, 1.45), FAINT, width=1.2)
    _gradients(axes, found)
    _words(axes, bptt)
    save(figure, path, salt="gradients")


def _gradients(axes: Axes, found: dict[str, bool]) -> None:
    """Draw colored arrows where a gradient flows and bars where it ends."""
    if found["task -> network"]:
        arrow(axes, (10.45, 4.9), (8.85, 4.9), TASK, width=2.4)
        arrow(axes, (7.7, 4.55), (7.7, 3.45), TASK, width=2.4)
    for x, key in ((1.7, "compressed"), (4.7, "recent")):
        if found[f"memory keeps {key} states in the graph"]:
            arrow(axes, (x, 4.55), (x, 3.45), TASK, width=2.4)
        else:
            _ends(axes, (x, 4.55), (x, 4.05), TASK)
    if found["task -> f_c"]:
        arrow(axes, (1.7, 2.45), (1.7, 1.45), TASK, width=2.4)
    if found["compression -> f_c"]:
        axes.plot([11.5, 11.5, 1.3], [0.45, -0.1, -0.1], color=OWN, linewidth=2.4)
        arrow(axes, (1.3, -0.125), (1.3, 0.45), OWN, width=2.4)
    if found["compression -> network"]:
        arrow(axes, (11.5, 1.45), (8.6, 4.55), OWN, width=2.4)
    else:
        _ends(axes, (11.5, 1.45), (11.5, 2.1), OWN)
    _ends(axes, (10.45, 0.8), (9.8, 0.8), OWN)


def _words(axes: Axes, bptt: dict[str, bool]) -> None:
    label(axes, 3.05, 3.98, "states in memory\nare constants", colour=TASK)
    label(axes, 7.95, 3.98, "states of the segment learn", align="left", colour=TASK)
    label(axes, 11.0, 2.55, "queries, projections and evicted\nstates are constants", colour=OWN)
    label(axes, 6.4, -0.1, "compares attention over evicted and over compressed states; trains $f_c$ alone", colour=OWN)
    label(axes, 6.4, -0.55, "grey: what is read; coloured: gradients; a bar: where a gradient ends", colour=INK)
    if bptt["task -> f_c"] and not bptt["compression -> f_c"]:
        label(
            axes,
            1.4,
            1.95,
            'under "bptt" the task loss\ngoes on, by way of com-\npressed memory, to $f_c$',
            align="left",
        )
    label(axes, 4.4, 6.1, "two losses, two sets of parameters: their sum needs no weight", weight="bold")


def _ends(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """Draw a gradient that ends at `end`."""
    axes.plot([start[0], end[0]], [start[1], end[1]], color=colour, linewidth=2.4, solid_capstyle="butt")
    across = (0.0, 0.16) if start[1] == end[1] else (0.22, 0.0)
    axes.plot(
        [end[0] - across[0], end[0] + across[0]],
        [end[1] - across[1], end[1] + across[1]],
        color=colour,
        linewidth=3.2,
        solid_capstyle="butt",
    )


def _box(
    axes: Axes, corner: tuple[float, float], size: tuple[float, float], text: str, colours: tuple[str, str]
) -> None:
    edge, fill = colours
    shape = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch(corner, *size, boxstyle=shape, facecolor=fill, edgecolor=edge, linewidth=1.6, zorder=3)
    )
    x, y = corner[0] + size[0] / 2, corner[1] + size[1] / 2
    axes.text(x, y, text, ha="center", va="center", fontsize=12, color=INK, zorder=4)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("gradients.svg"))
