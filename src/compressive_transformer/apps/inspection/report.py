"""Report on the inspection of one run, or of two on the same text, as JSON and as a page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import CompressiveError, optional
from ...evaluate import ByFrequency
from ...files import atomic_file
from .contrast import Contrast, contrast, different_texts
from .result import Inspection


@dataclass(frozen=True, eq=False)
class InspectionReport:
    """Report on one inspection, or on two of the same text side by side.

    `print(report)` shows the main numbers; `write` makes a page, `to_dict` JSON.

    Raises:
        CompressiveError: The two inspections are not of the same text.
    """

    inspection: Inspection
    against: Inspection | None = None
    """Inspection of another model on the same text; its tokenizer may differ."""
    frequency: ByFrequency | None = None
    """Buckets of words by their occurrences in a training split."""
    name: str = "first"
    """Name of the model in the report."""
    against_name: str = "second"
    text_name: str = "text"

    def __post_init__(self) -> None:
        if self.against is not None and self.against.pieces.text != self.inspection.pieces.text:
            raise different_texts()

    @property
    def runs(self) -> tuple[tuple[str, Inspection], ...]:
        """Name and inspection of each model."""
        first = (self.name, self.inspection)
        return (first,) if self.against is None else (first, (self.against_name, self.against))

    @cached_property
    def comparison(self) -> Contrast | None:
        """Contrast of the two models; None for one model."""
        if self.against is None:
            return None
        return contrast(self.inspection.reading, self.against.reading, self.frequency)

    @cached_property
    def gains(self) -> tuple[Contrast | None, ...]:
        """Gain of compressed memory in each model."""
        return tuple(inspection.gain(self.frequency) for _, inspection in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        runs = [
            {"name": name, **inspection.to_dict(), "gain": None if gain is None else gain.to_dict()}
            for (name, inspection), gain in zip(self.runs, self.gains, strict=True)
        ]
        comparison = None if self.comparison is None else self.comparison.to_dict()
        return {"text_name": self.text_name, "runs": runs, "comparison": comparison}

    def write(self, path: str | Path) -> None:
        """Write the page, one file that loads nothing, the whole or none; an earlier one is replaced.

        Raises CompressiveError where it cannot be written, and without the extra `plot`.
        """
        require_page(path)
        from .page import html_of  # takes a second, and an optional library

        content = html_of(self)
        with atomic_file(Path(path)) as temporary:
            temporary.write_text(content, encoding="utf-8")

    def __str__(self) -> str:
        if self.comparison is None:
            return str(self.inspection)
        parts = [f"{name}: {inspection}" for name, inspection in self.runs]
        difference = self.runs[1][1].bits_per_byte - self.inspection.bits_per_byte
        return "\n".join([*parts, f"second − first                     {difference:+.4f}"])


def require_page(path: str | Path) -> None:
    """Raise CompressiveError if a page could not be drawn or written, before a long reading."""
    for library in ("matplotlib", "jinja2"):
        optional(library, extra="plot", purpose="a report")
    if Path(path).is_dir():
        raise CompressiveError(f"{path} is a folder: give the page a name, such as report.html")
    if not Path(path).absolute().parent.is_dir():
        raise CompressiveError(f"{path}: the folder {Path(path).parent} does not exist; create it first")
