"""The command `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, UseAppendAction

from ..checkpoint import read_json
from ..evaluate.compare import compare_runs
from ._common import print_result


def compare(
    first: Annotated[Positional[Path], tyro.conf.arg(metavar="FIRST")],
    second: Annotated[Positional[Path], tyro.conf.arg(metavar="SECOND")],
    /,
    pair: Annotated[UseAppendAction[list[tuple[Path, Path]]], tyro.conf.arg(metavar="FIRST SECOND")],
    resamples: int = 10_000,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Compare two models on the same documents: the difference of their scores and its 95 % confidence intervals.

    Differences are second - first in bits per byte: below zero, the second model is better.

    Args:
        first: Output of `compressive evaluate --json` for the first model.
        second: Output of `compressive evaluate --json` for the second model.
        pair: Another pair of outputs, of another training seed of the same two models.
        resamples: Number of bootstrap resamples of the documents.
        seed: Random seed of the resamples.
        json: Print everything as JSON.
    """
    pairs = [(read_json(one), read_json(other)) for one, other in [(first, second), *pair]]
    result = compare_runs(*zip(*pairs, strict=True), resamples=resamples, seed=seed)
    print_result(result, as_json=json)
