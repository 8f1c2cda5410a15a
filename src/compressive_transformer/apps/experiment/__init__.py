"""Experiments: settings times seeds, each trained and scored, and a table of what came out.

`plan` says what is to be run, `tasks` how it is scored; `running` does one run, `workers` all of them side by side;
`report` and `drawing` sum up.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...data import Corpus
from ...errors import CompressiveError
from .plan import Run, read_plan
from .report import MARKDOWN, Results, summarise
from .running import check_same, result_of
from .watching import Watch
from .workers import alone_in, default_processes, finish_all, log_of

__all__ = ["Results", "run_experiment"]


def run_experiment(
    plan: str | Path | Mapping[str, Any], corpus: Corpus, out: str | Path, *, processes: int | None = None
) -> Results:
    """Train and score each setting of a plan with each of its seeds, several side by side, and sum up.

    `plan` is a TOML file, or a mapping of the same form. The folder `out` gets the runs, results.json, results.md
    and, with matplotlib, pictures; results so far are there after each run. What is finished in `out` is not done
    again, and what was interrupted goes on from its last checkpoint. `processes` run side by side, one thread each:
    without it one on each GPU, or on each core where there is none. They are new Python processes, so a script must
    call this under `if __name__ == "__main__":`.

    Raises CompressiveError, before anything is run, where the plan is wrong or another than that of runs in `out`;
    and at the end, where runs failed.
    """
    out, count = Path(out), default_processes() if processes is None else processes
    _check_place(count)
    checked = read_plan(plan, corpus)
    with alone_in(out):
        runs = list(checked.runs())
        for run in runs:
            check_same(run, corpus, out)
        failed: dict[str, str] = {}

        def results() -> Results:
            return summarise(checked, corpus, out, processes=count, failed=failed)

        with Watch(runs, out) as watch:

            def ended(run: Run, reason: str | None) -> None:
                if reason is not None:
                    failed[run.name] = f"{reason} (see {log_of(run, out)})"
                watch.ended(run, reason)
                results().write(out)

            waiting = [run for run in runs if result_of(run, out) is None]
            finish_all(waiting, corpus.path, out, processes=count, look=watch.look, ended=ended)
        summed = results()
        summed.write(out, _pictures(summed, out))
    if failed:
        raise CompressiveError(
            f"{len(failed)} of {len(runs)} runs failed: {'; '.join(f'{run}: {why}' for run, why in failed.items())}; "
            f"the others are in {out / MARKDOWN}; the same command again tries what failed"
        )
    return summed


def _check_place(processes: int) -> None:
    """Raise CompressiveError where this process cannot start others."""
    if processes < 1:
        raise CompressiveError(f"processes ({processes}) must be 1 or more")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CompressiveError("an experiment starts its own processes; run it without torchrun, with processes = N")
    if multiprocessing.parent_process() is not None:
        raise CompressiveError(
            "an experiment was begun by one of its own processes, which read the script anew; "
            'put the call of run_experiment under `if __name__ == "__main__":`'
        )


def _pictures(results: Results, out: Path) -> list[str]:
    """The names of the pictures that were drawn."""
    if find_spec("matplotlib") is None:
        print("no pictures: matplotlib is missing; pip install 'compressive-transformer[plot]'", file=sys.stderr)
        return []
    from .drawing import draw  # takes a second, and an optional library

    return draw(results.content, out)
