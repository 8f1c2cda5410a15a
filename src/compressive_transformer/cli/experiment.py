"""The command that runs experiments."""

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

    The folder gets results.json, results.md, pictures, and the runs with their logs. The same command again goes on
    where it stopped: what is finished is not done again.

    Args:
        plan: A TOML file with the tables [model], [train] and [evaluate], with seeds = [...], baseline = "NAME" and
            a table [settings.NAME] for each setting, which holds what it changes.
        data: A corpus that `compressive prepare` made.
        out: The experiment's folder, to be made, or to go on with.
        processes: Runs side by side, each with one thread; by default one for each GPU, or for each core.
        json: Print everything as JSON instead of the table.
    """
    try:
        results = run_experiment(plan, open_corpus(data), out, processes=processes)
    except KeyboardInterrupt:
        raise CompressiveError("interrupted; the same command again goes on from the last checkpoints") from None
    say(f"the results are in {out}")
    print(json_format.dumps(results.to_dict(), indent=1, ensure_ascii=False) if json else results)
