"""Pictures of an experiment, as SVG: validation over tokens, and the settings side by side. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from ...files import atomic_file
from .tasks import TASKS

COLORS = ("#1f6f8b", "#b3661a", "#7a5195", "#3d8b4f", "#b5394e", "#8a7a2b", "#4c566a", "#2f9c95", "#c26bb0", "#6b4226")
INK, FAINT = "#222222", "#8a8a8a"
STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.axisbelow": True,
    "svg.hashsalt": "experiment",
    "svg.fonttype": "path",
}


def draw(content: Mapping[str, Any], out: Path) -> list[str]:
    """Draw the content of `Results` into the folder `out`, byte for byte the same each time; return the file names."""
    names = []
    with matplotlib.rc_context(STYLE):
        if any(run["training"]["validations"] for run in content["runs"]):
            names.append(_save(_curves(content), out / "curves.svg"))
        if content["runs"]:
            names.append(_save(_settings(content), out / "settings.svg"))
    return names


def _save(figure: Figure, path: Path) -> str:
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    return path.name


def _curves(content: Mapping[str, Any]) -> Figure:
    """Draw bits per byte at each validation over tokens, and the difference to the baseline of the same seed."""
    figure = Figure(figsize=(8.5, 7), layout="constrained")
    bits, differences = figure.subplots(2, 1, sharex=True)
    baseline = _validations(content, content["baseline"])
    for number, entry in enumerate(content["settings"]):
        runs = _validations(content, entry["setting"])
        _draw_lines(bits, number, entry["setting"], list(runs.values()))
        shared = [(run, baseline[seed]) for seed, run in runs.items() if seed in baseline]
        _draw_lines(differences, number, "", [_less(*pair) for pair in shared if pair[0].keys() == pair[1].keys()])
    bits.set_ylabel("bits per byte at validation")
    bits.legend(frameon=False)
    differences.set_ylabel(f"difference to {content['baseline']}")
    differences.set_xlabel("tokens trained; thin: each seed")
    differences.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


Curve = dict[int, tuple[int, float]]
"""Tokens and bits per byte by step of validation."""


def _validations(content: Mapping[str, Any], setting: str) -> dict[int, Curve]:
    """Return the curve of each seed; NaN where a score was not finite."""
    return {
        run["seed"]: {
            entry["step"]: (entry["tokens"], math.nan if entry["bits_per_byte"] is None else entry["bits_per_byte"])
            for entry in run["training"]["validations"]
        }
        for run in content["runs"]
        if run["setting"] == setting
    }


def _less(curve: Curve, other: Curve) -> Curve:
    return {step: (tokens, bits - other[step][1]) for step, (tokens, bits) in curve.items()}


def _draw_lines(axes: Axes, number: int, label: str, curves: Sequence[Curve]) -> None:
    """Draw a thin line for each seed, and their mean."""
    if not curves or not curves[0]:
        return
    for curve in curves:
        axes.plot(*zip(*curve.values(), strict=True), color=_color(number), linewidth=0.7, alpha=0.5)
    # Runs of one setting validate at the same steps; padding lets their tokens differ a little.
    steps = zip(*(curve.values() for curve in curves), strict=True)
    mean = [[fmean(values) for values in zip(*points, strict=True)] for points in steps]
    style = "-" if number < len(COLORS) else "--"
    axes.plot(*zip(*mean, strict=True), style, color=_color(number), linewidth=2.2, label=label)


def _settings(content: Mapping[str, Any]) -> Figure:
    """Draw the score of each setting, seed by seed, and its difference to the baseline with the 95 % interval."""
    entries, measure = content["settings"], TASKS[content["task"]].measures[0]
    figure = Figure(figsize=(10, 1.6 + 0.42 * len(entries)), layout="constrained")
    scores, differences = figure.subplots(1, 2, sharey=True)
    for number, entry in enumerate(entries):
        values = entry["measures"][measure.key]
        known = [value for value in values["values"] if value is not None]
        scores.plot(known, [number] * len(known), "o", color=_color(number), alpha=0.45, markersize=6)
        if values["mean"] is not None:
            scores.plot(values["mean"], number, "|", color=_color(number), markersize=20, markeredgewidth=2.5)
        _draw_difference(differences, number, entry["against_baseline"])
    scores.set_yticks(range(len(entries)), [entry["setting"] for entry in entries])
    scores.set_ylim(len(entries) - 0.4, -0.6)
    scores.set_xlabel(f"{measure.title}, each seed and the mean")
    scores.grid(axis="x", color="#e6e6e6")
    differences.axvline(0, color=FAINT, linewidth=1)
    differences.set_xlabel(f"difference to {content['baseline']}\n{_interval_name(entries)}")
    differences.grid(axis="x", color="#e6e6e6")
    differences.tick_params(left=False)
    for axes in (scores, differences):
        axes.locator_params(axis="x", nbins=5)
    return figure


def _draw_difference(axes: Axes, number: int, against: Mapping[str, Any] | None) -> None:
    if against is None:
        return
    value = against["difference"]
    axes.barh(number, value, height=0.55, color=_color(number), alpha=0.75)
    if (interval := _interval(against)) is not None:
        low, high = interval
        axes.errorbar(value, number, xerr=[[value - low], [high - value]], color=INK, capsize=4, linewidth=1.4)


def _interval(against: Mapping[str, Any]) -> Sequence[float] | None:
    """Return the interval over seeds if there are several, else over documents."""
    chosen: Sequence[float] | None = against["difference_over_runs"] or against["difference_over_documents"]
    return chosen


def _interval_name(entries: Sequence[Mapping[str, Any]]) -> str:
    several = any((entry["against_baseline"] or {}).get("difference_over_runs") for entry in entries)
    return "and its 95 % interval over " + ("seeds" if several else "documents")


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
