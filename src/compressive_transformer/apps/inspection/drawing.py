"""Figures of a report as SVG inside a page, with the colors of the page. Needs matplotlib."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from .attention import AGES, LayerAttention, Tier
from .contrast import Reading
from .result import Inspection

# Each stands for a color that the page names, one for light and one for dark.
COLORS = {
    "#222222": "currentColor",
    "#8a8a8a": "var(--faint)",
    "#7a5195": "var(--compressed)",
    "#1f6f8b": "var(--recent)",
    "#b3661a": "var(--segment)",
    "#e6e6e6": "var(--line)",
}
INK, FAINT, COMPRESSED, RECENT, SEGMENT, GRID = COLORS
TIERS: tuple[tuple[Tier, str, str], ...] = (
    ("compressed", COMPRESSED, "compressed memory"),
    ("recent", RECENT, "recent memory"),
    ("segment", SEGMENT, "segment"),
)
STYLE: Any = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": GRID,
    "svg.hashsalt": "inspection",
    "svg.fonttype": "none",
    "text.parse_math": False,
}
# Above the axes, where it covers nothing.
LEGEND: Any = {"frameon": False, "ncols": 2, "loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
BINS = 120
"""Largest number of points of a curve."""


def curve(readings: Sequence[Reading], labels: Sequence[str]) -> str:
    """Draw bits per byte over the place in the text, of one reading, or of two and their difference.

    There is a label for each reading, and one for the difference.
    """
    with matplotlib.rc_context(STYLE):
        figure, (axes, *below) = _axes(2.8 * len(readings) ** 0.7, rows=len(readings))
        lines = [bits_over_bytes(reading) for reading in readings]
        for (middles, bits), label, color, style in zip(lines, labels, (COMPRESSED, RECENT), ("-", "--"), strict=False):
            axes.plot(middles, bits, style, color=color, linewidth=1.4, label=label)
        axes.set_ylabel("bits per byte")
        axes.set_ylim(bottom=0)
        for difference in below:
            middles = lines[0][0]
            # The tokens of two tokenizers end at different bytes, so that a stretch of one may be empty.
            values = np.interp(middles, *lines[1]) - lines[0][1]
            difference.axhline(0, color=FAINT, linewidth=1)
            difference.bar(
                middles, values, width=0.8 * float(readings[0].pieces.bytes.sum()) / len(middles), color=SEGMENT
            )
            difference.set_ylabel(f"{labels[2]}\n(bits per byte)")
            axes.legend(**LEGEND)
        for row in (axes, *below):
            row.grid(axis="y")
        last = (axes, *below)[-1]
        last.set_xlabel("place in the text (bytes)")
        last.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        return _svg(figure, f"Bits per byte over the place in the text: {', '.join(labels)}")


def bits_over_bytes(reading: Reading) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the middles of at most 120 equal stretches of the text, in bytes, and the bits per byte of each."""
    sizes = reading.pieces.bytes
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    count = min(BINS, max(1, total // 16))
    places = np.minimum((ends - sizes) * count // total, count - 1)
    bits = np.bincount(places, weights=reading.nats, minlength=count) / math.log(2)
    held = np.bincount(places, weights=sizes, minlength=count)
    real = held > 0
    middles = (np.arange(count) + 0.5) * total / count
    return middles[real], bits[real] / held[real]


def ages(layers: Sequence[LayerAttention]) -> str:
    """Draw attention by age: bars for the mean over layers and heads, a dot for each layer."""
    shares = np.stack([ages_of(layer) for layer in layers]) * 100  # [layer, 3 * AGES]
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = _axes(3.4)
        middles = []
        for number, (_, color, _) in enumerate(TIERS):
            buckets = slice(number * AGES, (number + 1) * AGES)
            places = np.arange(buckets.start, buckets.stop) + number * 0.6
            axes.bar(places, shares.mean(0)[buckets], width=0.85, color=color, alpha=0.75)
            for layer in shares if len(shares) > 1 else []:
                axes.plot(places, layer[buckets], "o", color=INK, markersize=2.5, alpha=0.45)
            middles.append(places.mean())
        axes.set_xticks(middles, [name for *_, name in TIERS])
        for tick, (_, color, _) in zip(axes.get_xticklabels(), TIERS, strict=True):
            tick.set_color(color)
        axes.tick_params(bottom=False)
        axes.set_xlabel("six buckets of slots of each tier, the oldest on the left")
        axes.set_ylabel("share of attention (%)")
        axes.grid(axis="y")
        return _svg(figure, "Attention by age, mean over layers and heads; the table below has the numbers")


def ages_of(layer: LayerAttention) -> NDArray[np.float64]:
    """Return the mean over heads of each of 18 buckets, six a tier; 0 in a tier without slots.

    The buckets of a tier with fewer than six slots stand at their share of it, so that all still add up to 1.
    """
    by_tier = np.zeros((len(TIERS), AGES))
    means = np.mean(layer.heads, axis=0)
    for row, (tier, *_) in zip(by_tier, TIERS, strict=True):
        shares = [share for bucket, share in zip(layer.buckets, means, strict=True) if bucket.tier == tier]
        for place, share in enumerate(shares):
            row[place * AGES // len(shares)] += share
    return by_tier.ravel()


def errors(inspection: Inspection) -> str:
    """Draw the reconstruction error of each layer beside that of mean pooling."""
    measured = inspection.reconstruction
    assert measured is not None
    layers = [n for n in range(inspection.config.n_layers) if inspection.config.of_layer(n).compressed_length]
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = _axes(3.4)
        places, width = np.arange(len(layers)), 0.38
        error, mean = ([values[n] for n in layers] for values in (measured.error, measured.mean_pooling))
        name = f"f_c ({inspection.config.compression})"
        axes.bar(places - width / 2, error, width, color=COMPRESSED, label=name)
        axes.bar(places + width / 2, mean, width, color=FAINT, label="mean pooling", hatch="//", edgecolor=GRID)
        axes.set_xticks(places, [str(n) for n in layers])
        axes.set_xlim(-0.75, max(len(layers), 3) - 0.25)  # so that a single layer has no bars like walls
        axes.set_xlabel("layer (from 0)")
        axes.set_ylabel("squared error / squared target")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.legend(**LEGEND)
        return _svg(figure, f"Reconstruction error by layer: {name} and mean pooling")


def _axes(height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(6.2, height), layout="constrained")
    figure.patch.set_alpha(0)
    rows_of_axes = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    for axes in rows_of_axes:
        axes.patch.set_alpha(0)
    return figure, rows_of_axes


def _svg(figure: Figure, label: str) -> str:
    """Return the figure as an element of a page, with the colors of the page."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = target.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    for written, named in COLORS.items():
        svg = svg.replace(written, named)
    svg = re.sub(r'<g id="[\w.]+_\d+"', "<g", svg)  # the same in each figure, and nothing refers to them
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)
