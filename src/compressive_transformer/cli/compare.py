"""Commands on results: whether one model is better than another."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, UseAppendAction

from ..checkpoint import read_json
from ..evaluate.compare import compare_runs


def compare(
    first: Annotated[Positional[Path], tyro.conf.arg(metavar="FIRST")],
    second: Annotated[Positional[Path], tyro.conf.arg(metavar="SECOND")],
    /,
    pair: Annotated[UseAppendAction[list[tuple[Path, Path]]], tyro.conf.arg(metavar="FIRST SECOND")],
    resamples: int = 10_000,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Compare two results on the same documents: the difference, and 95 % intervals of it.

    Differences are second - first in bits per byte, so less than zero means that the second is better.

    Args:
        first: What `compressive evaluate --json` printed for the one model.
        second: The same for the other.
        pair: One more pair of results, of another seed of the same two models; may be repeated.
        resamples: Times that the documents are drawn anew.
        seed: The same seed gives the same intervals.
        json: Print everything as JSON.
    """
    pairs = [(read_json(one), read_json(other)) for one, other in [(first, second), *pair]]
    result = compare_runs(*zip(*pairs, strict=True), resamples=resamples, seed=seed)
    print(json_format.dumps(result.to_dict(), indent=1) if json else result)
