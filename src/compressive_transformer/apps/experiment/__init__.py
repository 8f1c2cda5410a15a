"""Experiments: settings times seeds, each trained and scored, and a table of results with intervals.

`plan` reads and checks the plan, `tasks` are the ways to score a model; `running` does one run, `workers` all of them
side by side; `report` and `drawing` sum up.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...data import Corpus
from ...errors import CompressiveError
from .plan import Run, read_plan
from .report import MARKDOWN, Results, summarize
from .run_progress import RunProgress
from .running import check_unchanged, result_of
from .workers import alone_in, device_count, finish_all, log_of

__all__ = ["Results", "run_experiment"]


def run_experiment(
    plan: str | Path | Mapping[str, Any], corpus: Corpus, out: str | Path, *, processes: int | None = None
) -> Results:
    """Train and score each setting of a plan with each of its seeds, several side by side.

    What is finished in `out` is not done again, and an interrupted training resumes from its last checkpoint. Runs are
    new Python processes with one thread each, so a script must call this under `if __name__ == "__main__":`.

    Args:
        plan: A TOML file, or a mapping of the same form: `seeds`, `baseline`, the tables `model`, `train`, `evaluate`,
            and in `settings` what each setting changes.
        corpus: The corpus to train and score on.
        out: Folder for the runs, results.json, results.md and, with matplotlib, pictures. Results so far are written
            after each run.
        processes: Runs side by side; by default one for each GPU, or for each core where there is none.

    Returns:
        The finished runs, summed up with intervals.

    Raises:
        CompressiveError: The plan is wrong, or differs from that of runs in `out` (before anything runs); or runs
            failed (after all others are finished).
    """
    out, count = Path(out), device_count() if processes is None else processes
    _check_place(count)
    checked = read_plan(plan, corpus)
    with alone_in(out):
        runs = list(checked.runs())
        for run in runs:
            check_unchanged(run, corpus, out)
        failed: dict[str, str] = {}

        def results() -> Results:
            return summarize(checked, corpus, out, processes=count, failed=failed)

        _run_all(runs, corpus, out, results, failed, count)
        summed = results()
        summed.write(out, _pictures(summed, out))
    if failed:
        raise CompressiveError(
            f"{len(failed)} of {len(runs)} runs failed: {'; '.join(f'{run}: {why}' for run, why in failed.items())}; "
            f"the others are in {out / MARKDOWN}; run the same command again to retry"
        )
    return summed


def _run_all(
    runs: list[Run], corpus: Corpus, out: Path, results: Callable[[], Results], failed: dict[str, str], processes: int
) -> None:
    """Finish all runs, write results after each, and collect the reasons of failures in `failed`."""
    with RunProgress(runs, out) as progress:

        def ended(run: Run, reason: str | None) -> None:
            if reason is not None:
                failed[run.name] = f"{reason} (see {log_of(run, out)})"
            progress.ended(run, reason)
            results().write(out)

        waiting = [run for run in runs if result_of(run, out) is None]
        finish_all(waiting, corpus.path, out, processes=processes, look=progress.update, ended=ended)


def _check_place(processes: int) -> None:
    """Raise CompressiveError where this process cannot start others."""
    if processes < 1:
        raise CompressiveError(f"processes ({processes}) must be 1 or more")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CompressiveError("an experiment starts its own processes; run it without torchrun, with processes = N")
    if multiprocessing.parent_process() is not None:
        raise CompressiveError(
            "an experiment was started by one of its worker processes, which import the script; "
            'put the call of run_experiment under `if __name__ == "__main__":`'
        )


def _pictures(results: Results, out: Path) -> list[str]:
    """Draw pictures where matplotlib is installed, and return their names."""
    if find_spec("matplotlib") is None:
        print("no pictures without matplotlib: pip install 'compressive-transformer[plot]'", file=sys.stderr)
        return []
    from .drawing import draw  # takes a second, and an optional library

    return draw(results.content, out)
