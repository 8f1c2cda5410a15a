"""An inspection of one run, or of two on the same text, as JSON and as a page."""

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
    """What is shown of one inspection, or of two of the same text side by side.

    Raises CompressiveError where the two are not of the same text.
    """

    inspection: Inspection
    against: Inspection | None = None
    """Of another model on the same text; its tokenizer may differ."""
    frequency: ByFrequency | None = None
    """Divides words by how often they occur in a training split."""
    name: str = "first"
    """Of the model; as `against_name` and `text_name` only shown."""
    against_name: str = "second"
    text_name: str = "text"

    def __post_init__(self) -> None:
        if self.against is not None and self.against.pieces.text != self.inspection.pieces.text:
            raise different_texts()

    @property
    def runs(self) -> tuple[tuple[str, Inspection], ...]:
        """Name and inspection of each model."""
        own = (self.name, self.inspection)
        return (own,) if self.against is None else (own, (self.against_name, self.against))

    @cached_property
    def comparison(self) -> Contrast | None:
        """Where the first model is better, and where the other is; None for one model."""
        if self.against is None:
            return None
        return contrast(self.inspection.reading, self.against.reading, self.frequency)

    @cached_property
    def gains(self) -> tuple[Contrast | None, ...]:
        """Of each model, where its compressed memory helps."""
        return tuple(inspection.gain(self.frequency) for _, inspection in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        runs = [
            {"name": name, **inspection.to_dict(), "gain": None if gain is None else gain.to_dict()}
            for (name, inspection), gain in zip(self.runs, self.gains, strict=True)
        ]
        comparison = None if self.comparison is None else self.comparison.to_dict()
        return {"text_name": self.text_name, "runs": runs, "comparison": comparison}

    def write(self, path: str | Path) -> None:
        """Write the page, one file that loads nothing, the whole or none; an earlier one is replaced.

        Raises CompressiveError where it cannot be written, and without matplotlib (extra `plot`).
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
    """Raise CompressiveError where a page could not be drawn, or has no folder to be in; before a long reading."""
    optional("matplotlib", extra="plot", purpose="a report")
    if Path(path).is_dir():
        raise CompressiveError(f"{path} is a folder: give the page a name, such as report.html")
    if not Path(path).absolute().parent.is_dir():
        raise CompressiveError(f"{path}: the folder {Path(path).parent} does not exist; make it first")
