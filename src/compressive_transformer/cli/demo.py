"""The command `demo`."""

from __future__ import annotations

from pathlib import Path

from ..apps.demo import run_demo


def demo(out: Path = Path("demo")) -> None:
    """Train a small model on sample books that come with the package, and show what its memory does.

    Args:
        out: Folder for the corpus, the runs and the results; an interrupted demo resumes there.
    """
    run_demo(out)
