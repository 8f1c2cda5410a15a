"""Drawing of docs/memory.svg: a layer's memory before and after a commit, and the tokens that its slots stand for.

    python docs/draw_memory.py [OUT.svg]

Sizes are those of the paper's Fig. 1. What is drawn comes from `SlotLayout.slot_spans`, so the picture cannot
disagree with the code. Needs matplotlib (extra `plot`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon

from compressive_transformer import ModelConfig
from compressive_transformer.memory import SlotLayout

CONFIG = ModelConfig(vocab_size=1, segment_length=3, memory_length=6, compressed_length=6, compression_rate=3)
SEEN = 30  # tokens before the segment: all slots are full, and some were discarded

COMPRESSED, RECENT, SEGMENT = ("#7a5195", "#e9dff0"), ("#1f6f8b", "#d8ecf3"), ("#b3661a", "#fae6d0")
INK, FAINT = "#222222", "#8a8a8a"
BEFORE, AFTER, TOKENS = 5.0, 2.0, 0.0  # heights of the three rows


@dataclass(frozen=True)
class Row:
    """The slots of a layer at one moment: for each, the tokens that it stands for."""

    compressed: list[range]
    recent: list[range]
    segment: list[range]

    @classmethod
    def at(cls, seen: int) -> Row:
        """Return the slots while the segment after `seen` tokens is read."""
        compressed, recent = SlotLayout.of(CONFIG, 0).slot_spans(seen)
        tokens = range(seen, seen + CONFIG.segment_length)
        return cls(compressed, recent, [range(token, token + 1) for token in tokens])


def draw(path: str | Path) -> None:
    """Write the figure as SVG, with the same bytes each time."""
    before, after = Row.at(SEEN), Row.at(SEEN + CONFIG.segment_length)
    first, last = before.compressed[0][0], after.segment[-1][-1]
    figure = Figure(figsize=(10.2, 5.7), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(first - 5.2, last + 1.2)
    axes.set_ylim(-2.15, 7.0)
    axes.axis("off")
    _draw_row(axes, before, BEFORE, segment_style="-")
    _draw_row(axes, after, AFTER, segment_style=(0, (3, 2)))
    label(axes, first - 5.0, BEFORE, "while a\nsegment\nis read", align="left")
    label(axes, first - 5.0, (BEFORE + AFTER) / 2, "commit", align="left", weight="bold")
    label(axes, first - 5.0, AFTER, "while the\nnext one\nis read", align="left")
    label(axes, first - 5.0, TOKENS, "tokens", align="left")
    _draw_titles(axes, before)
    _draw_commit(axes, before, after)
    _draw_tokens(axes, after, range(first, last + 1))
    _draw_reach(axes, after)
    save(figure, path, salt="memory")


def save(figure: Figure, path: str | Path, *, salt: str) -> None:
    """Write a figure as SVG, or as PNG by the name; `salt` makes ids reproducible."""
    form = Path(path).suffix[1:]
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "path"}):
        figure.savefig(path, format=form, metadata={"Date": None} if form == "svg" else {}, dpi=110)


def _middle(span: range) -> float:
    return (span[0] + span[-1]) / 2


def _draw_row(axes: Axes, row: Row, height: float, segment_style: object) -> None:
    tiers = (
        (row.compressed, COMPRESSED, "-"),
        (row.recent, RECENT, "-"),
        (row.segment, SEGMENT, segment_style),
    )
    for spans, colours, style in tiers:
        for span in spans:
            _draw_slot(axes, _middle(span), height, colours, style)


def _draw_slot(axes: Axes, x: float, y: float, colours: tuple[str, str], style: object = "-") -> None:
    edge, fill = colours
    box = FancyBboxPatch(
        (x - 0.33, y - 0.36),
        0.66,
        0.72,
        boxstyle="round,pad=0,rounding_size=0.12",
        facecolor=fill,
        edgecolor=edge,
        linewidth=1.6,
        linestyle=style,
        zorder=3,
    )
    axes.add_patch(box)


def _draw_titles(axes: Axes, row: Row) -> None:
    rate = CONFIG.compression_rate
    titles = (
        (
            row.compressed,
            COMPRESSED,
            f"compressed memory: n_cm = {len(row.compressed)} slots, each c = {rate} tokens",
        ),
        (row.recent, RECENT, f"recent memory:\nn_m = {len(row.recent)} slots"),
        (row.segment, SEGMENT, f"segment:\nn_s = {len(row.segment)}"),
    )
    for spans, (edge, _), title in titles:
        left, right = spans[0][0] - 0.4, spans[-1][-1] + 0.4
        axes.plot([left, right], [BEFORE + 0.68] * 2, color=edge, linewidth=2.2, solid_capstyle="butt")
        axes.text((left + right) / 2, BEFORE + 0.85, title, color=edge, ha="center", va="bottom", fontsize=12)


def _draw_commit(axes: Axes, before: Row, after: Row) -> None:
    """Draw arrows from slots to the slots that hold their states after the commit."""
    top, bottom = BEFORE - 0.45, AFTER + 0.45
    for span in before.compressed:
        if span in after.compressed:
            arrow(axes, (_middle(span), top), (_middle(span), bottom), FAINT, width=0.9)
        else:
            arrow(axes, (_middle(span), top), (_middle(span), bottom + 0.75), COMPRESSED[0])
            label(axes, _middle(span), bottom + 0.3, "forgotten", colour=COMPRESSED[0])
    for span in before.recent:
        if span in after.recent:
            arrow(axes, (_middle(span), top), (_middle(span), bottom), FAINT, width=0.9)
    for span in before.segment:
        arrow(axes, (_middle(span), top), (_middle(span), bottom), SEGMENT[0])
    evicted = [span for span in before.recent if span not in after.recent]
    middle, height = (BEFORE + AFTER) / 2, 0.4
    for new in (span for span in after.compressed if span not in before.compressed):
        for span in (span for span in evicted if span[0] in new):
            arrow(
                axes,
                (_middle(span), top),
                (_middle(new) + 0.45 * (_middle(span) - _middle(new)), middle + height),
                RECENT[0],
            )
        arrow(axes, (_middle(new), middle - height), (_middle(new), bottom), COMPRESSED[0])
        box = FancyBboxPatch(
            (_middle(new) - 0.95, middle - height),
            1.9,
            2 * height,
            boxstyle="round,pad=0,rounding_size=0.15",
            facecolor="#fff",
            edgecolor=INK,
            linewidth=1.6,
            zorder=4,
        )
        axes.add_patch(box)
        axes.text(_middle(new), middle, "$f_c$", ha="center", va="center", fontsize=16, zorder=5, color=INK)
        label(
            axes,
            _middle(new) - 1.25,
            middle,
            f"the {len(evicted)} oldest are evicted\nand become one",
            align="right",
        )
    label(axes, _middle(before.segment[-1]) + 0.45, middle, "the segment\nbecomes\nrecent", align="left")


def _draw_tokens(axes: Axes, row: Row, tokens: range) -> None:
    """Draw the stream, each token below the slot that stands for it."""
    spans = ((row.compressed, COMPRESSED), (row.recent, RECENT), (row.segment, SEGMENT))
    held = {token: colours for tier, colours in spans for span in tier for token in span}
    for tier, (edge, fill) in spans:
        for span in tier:
            x = _middle(span)
            corners = [(x - 0.33, AFTER - 0.36), (x + 0.33, AFTER - 0.36)]
            corners += [(span[-1] + 0.44, TOKENS + 0.36), (span[0] - 0.44, TOKENS + 0.36)]
            axes.add_patch(Polygon(corners, facecolor=fill, edgecolor=edge, linewidth=0.6, alpha=0.65, zorder=1))
    for token in tokens:
        edge, fill = held.get(token, (FAINT, "#f4f4f4"))
        corners = [(token - 0.44, -0.36), (token + 0.44, -0.36), (token + 0.44, 0.36), (token - 0.44, 0.36)]
        axes.add_patch(Polygon(corners, facecolor=fill, edgecolor=edge, linewidth=0.9, zorder=3))
        axes.text(token, TOKENS - 0.02, str(token), ha="center", va="center", fontsize=11, color=INK, zorder=4)
    label(axes, tokens[0] - 0.75, TOKENS, "…", align="right", colour=FAINT)


def _draw_reach(axes: Axes, row: Row) -> None:
    rate, slots = CONFIG.compression_rate, CONFIG.compressed_length
    parts = (
        (row.compressed, COMPRESSED[0], f"c · n_cm = {rate} · {slots} = {rate * slots} tokens"),
        (row.recent, RECENT[0], f"n_m = {CONFIG.memory_length}"),
        (row.segment, SEGMENT[0], f"n_s = {CONFIG.segment_length}"),
    )
    for spans, colour, text in parts:
        left, right = spans[0][0] - 0.4, spans[-1][-1] + 0.4
        ends = [TOKENS - 0.55, TOKENS - 0.75, TOKENS - 0.75, TOKENS - 0.55]
        axes.plot([left, left, right, right], ends, color=colour, linewidth=1.4)
        axes.text((left + right) / 2, TOKENS - 0.9, text, color=colour, ha="center", va="top", fontsize=11.5)
    reach = CONFIG.segment_length + CONFIG.memory_length + rate * slots
    width = CONFIG.attention_width
    text = f"{width} slots to attend to, {reach} positions within reach of one layer"
    label(axes, (row.compressed[0][0] + row.segment[-1][-1]) / 2, TOKENS - 1.8, text, weight="bold")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, *, width: float = 1.5) -> None:
    """Draw a straight arrow."""
    style = "-|>,head_length=5,head_width=2.6"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle=style, color=colour, linewidth=width, shrinkA=0, shrinkB=0, zorder=2)
    )


def label(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    align: str = "center",
    weight: str = "normal",
    colour: str = INK,
) -> None:
    """Draw text on white background, so that lines do not cross it."""
    axes.text(
        x,
        y,
        text,
        ha=align,
        va="center",
        fontsize=11.5,
        fontweight=weight,
        color=colour,
        linespacing=1.25,
        zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("memory.svg"))
