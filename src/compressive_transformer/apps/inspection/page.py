"""Page of a report: one file of HTML that loads nothing.

Figures are SVG. The text and everything about single tokens is data in a script element, which the page's script
shows a part at a time; none of it becomes markup. The template escapes all values but figures and data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup
from numpy.typing import NDArray

from ...config.toml import to_dict
from . import drawing
from .attention import HeadRead, TokenAttention
from .contrast import Contrast, Reading
from .report import InspectionReport
from .result import Inspection

PIECES = 15
"""Number of pieces of text that are listed as kept most often."""
SEEN_OFTEN = 10
"""Times that a piece must have been evicted to be listed."""


def html_of(report: InspectionReport) -> str:
    """Return the whole page."""
    source = (files(__package__) / "page.html").read_text(encoding="utf-8")
    script = source.partition("<script>")[2].partition("</script>")[0]
    return (
        Environment(autoescape=True, keep_trailing_newline=True)
        .from_string(source)
        .render(
            text_name=report.text_name,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            data=Markup(as_script(data_of(report))),
            curve=Markup(_curve(report)),
            runs=[_figures(name, inspection) for name, inspection in report.runs],
            version=version("compressive-transformer"),
        )
    )


def as_script(value: Any) -> str:
    """Return a value as JSON for a script element: nothing in it can end the element or be markup."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})


def data_of(report: InspectionReport) -> dict[str, Any]:
    """Return the data of the page's script; columns of numbers, one a token, are base64 of little-endian arrays."""
    units = _utf16(report.inspection.pieces.text)
    comparison = None if report.comparison is None else _contrast(report.comparison, units)
    return {
        "text": report.inspection.pieces.text,
        "text_name": report.text_name,
        "words": None if report.against is None else _words(report.inspection.reading, report.against.reading, units),
        "runs": [
            _run(name, inspection, gain, units)
            for (name, inspection), gain in zip(report.runs, report.gains, strict=True)
        ],
        "comparison": comparison,
        "has_frequency": report.frequency is not None,
    }


def _run(name: str, inspection: Inspection, gain: Contrast | None, units: NDArray[np.int64]) -> dict[str, Any]:
    ends = np.append(inspection.pieces.starts[1:], len(inspection.pieces.text))
    without = inspection.nats_without
    return {
        "name": name,
        "summary": _summary(inspection),
        "config": [[key, str(value)] for key, value in to_dict(inspection.config).items()],
        "ends": _column(units[ends], "<u4"),
        "bits": _column(inspection.nats / math.log(2), "<f4"),
        "without": None if without is None else _column(without / math.log(2), "<f4"),
        "gain": None if gain is None else _contrast(gain, units),
        "attention": [{"buckets": layer.buckets, "heads": layer.heads} for layer in inspection.attention],
        "slot_note": inspection.slot_note,
        "tokens": [_token(token) for token in inspection.tokens],
        "kept": _kept(inspection),
        "missing": inspection.missing,
    }


def _summary(inspection: Inspection) -> list[list[str]]:
    config, pieces = inspection.config, inspection.pieces
    layers = [config.of_layer(layer) for layer in range(config.n_layers)]

    def by_layer(name: str) -> str:
        values = [str(getattr(layer, name)) for layer in layers]
        return values[0] if len(set(values)) == 1 else ", ".join(values)

    rows = [
        ["bits per byte", f"{inspection.bits_per_byte:.4f}"],
        ["text", f"{len(inspection.nats):,} tokens, {int(pieces.bytes.sum()):,} bytes, {len(pieces.words):,} words"],
        ["model", f"{config.n_layers} layers, d_model {config.d_model}, {config.n_heads} heads"],
        ["segment", f"{config.segment_length} tokens"],
        ["recent memory", f"{by_layer('memory_length')} slots a layer"],
        ["compressed memory", f"{by_layer('compressed_length')} slots a layer"],
    ]
    if any(layer.compressed_length for layer in layers):
        rows[-1][1] += f", each {by_layer('compression_rate')} tokens, by {config.compression}"
    if inspection.bits_per_byte_without is not None:
        rows.insert(1, ["bits per byte without compressed memory", f"{inspection.bits_per_byte_without:.4f}"])
    return rows


def _contrast(contrast: Contrast, units: NDArray[np.int64]) -> dict[str, Any]:
    table = contrast.to_dict()
    for side in ("first_better", "second_better"):
        for word in table[side]:
            word["place"] = int(units[word["place"]])
    return table


def _token(token: TokenAttention) -> dict[str, Any]:
    def head(read: HeadRead) -> list[Any]:
        slots = [[slot.tier, slot.place, round(slot.weight, 7), slot.first, slot.stop] for slot in read.slots]
        return [round(read.compressed, 7), round(read.recent, 7), round(read.segment, 7), slots]

    return {
        "token": token.token,
        "layers": [[head(read) for read in (layer.mean, *layer.heads)] for layer in token.layers],
    }


def _kept(inspection: Inspection) -> dict[str, Any] | None:
    """Return the number of layers that kept each token's state, and the pieces of text that were kept most often."""
    if inspection.kept is None:
        return None
    counts = np.zeros(len(inspection.nats), np.int64)
    evicted = np.zeros_like(counts)
    rows = []
    for layer in inspection.kept:
        np.add.at(counts, layer.tokens[layer.tokens >= 0], 1)
        evicted[: max(0, layer.evicted - 1)] += 1
        rows.append([layer.layer, layer.evicted, len(layer.tokens), layer.usage, layer.usage_of_others])
    starts, text = inspection.pieces.starts, inspection.pieces.text
    ends = np.append(starts[1:], len(text))
    times, times_kept = Counter[str](), Counter[str]()
    for start, end, out, kept in zip(starts.tolist(), ends.tolist(), evicted.tolist(), counts.tolist(), strict=True):
        times[text[start:end]] += out
        times_kept[text[start:end]] += kept
    often = [piece for piece, count in times.items() if count >= SEEN_OFTEN and piece]
    often.sort(key=lambda piece: -times_kept[piece] / times[piece])
    listed = [[piece, times[piece], times_kept[piece]] for piece in often[:PIECES]]
    return {"counts": _column(counts, "<u2"), "layers": rows, "pieces": listed}


def _words(first: Reading, second: Reading, units: NDArray[np.int64]) -> dict[str, str]:
    """Return where each word begins and ends, and how many bits more the second model needs."""
    pieces = first.pieces
    return {
        "starts": _column(units[pieces.word_starts], "<u4"),
        "ends": _column(units[pieces.word_ends], "<u4"),
        "difference": _column((second.of_words() - first.of_words()) / math.log(2), "<f4"),
    }


def _utf16(text: str) -> NDArray[np.int64]:
    """Return the units of a JavaScript string before each character, and before the end."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    return np.concatenate([[0], np.cumsum(1 + (codes > 0xFFFF))]).astype(np.int64)


def _column(values: NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode()


def _curve(report: InspectionReport) -> str:
    first = report.inspection
    if report.against is not None:
        labels = "first", "second", "second − first"
        return drawing.curve([first.reading, report.against.reading], labels)
    if first.nats_without is None:
        return drawing.curve([first.reading], ["bits per byte"])
    labels = "with compressed memory", "without", "gain"
    return drawing.curve([first.reading, Reading(first.pieces, first.nats_without)], labels)


def _figures(name: str, inspection: Inspection) -> dict[str, str | None]:
    """Return the figures of one run for the template, and why one is missing."""
    missing = inspection.missing.get("reconstruction")
    return {
        "name": name,
        "ages": Markup(drawing.ages(inspection.attention)),
        "errors": None if missing else Markup(drawing.errors(inspection)),
        "missing": missing,
    }
