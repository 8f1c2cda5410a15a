"""The command `experiment`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from ..apps.experiment import run_experiment
from ..data import open_corpus
from ..errors import CompressiveError
from ._common import say


def experiment(
    plan: Annotated[Positional[Path], tyro.conf.arg(metavar="PLAN")],
    data: Annotated[Positional[Path], tyro.conf.arg(metavar="DATA")],
    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")],
    /,
    processes: int | None = None,
    json: bool = False,
) -> None:
    """Train and score several settings with several seeds each, and print a table with confidence intervals.

    The folder gets results.json, results.md, pictures, and the runs with their logs. The same command resumes an
    interrupted experiment: finished runs are not repeated.

    Args:
        plan: TOML file with the tables [model], [train] and [evaluate], with seeds = [...], baseline = "NAME" and
            a table [settings.NAME] for each setting, which holds what it changes.
        data: Corpus that `compressive prepare` made.
        out: Folder of the experiment; it is created, or resumed.
        processes: Runs side by side, each with one thread; by default one for each GPU, or for each core.
        json: Print everything as JSON instead of the table.
    """
    try:
        results = run_experiment(plan, open_corpus(data), out, processes=processes)
    except KeyboardInterrupt:
        raise CompressiveError("interrupted; run the same command again to resume from the last checkpoints") from None
    say(f"the results are in {out}")
    print(json_format.dumps(results.to_dict(), indent=1, ensure_ascii=False) if json else results)
