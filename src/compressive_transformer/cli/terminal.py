"""What the commands share: where progress goes, and which device is used."""

from __future__ import annotations

import sys

import torch


def default_device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def say(text: str) -> None:
    """Print a line of progress; results alone go to stdout."""
    print(text, file=sys.stderr, flush=True)


def say_over(text: str) -> None:
    """Print progress over the line before it, where someone is watching."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
