"""Results of an experiment: a table over seeds, in Markdown, and as JSON with all that is needed to repeat it."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint import FORMAT, write_json
from ...data import Corpus
from ...files import atomic_file
from .plan import Plan, Run, Setting
from .running import result_of
from .tasks import TASKS, Task

JSON, MARKDOWN = "results.json", "results.md"
COMMAND = ("compressive", "experiment")
NOTHING = "–"
NOTES = """\
Mean ± standard deviation over seeds. Differences are the setting's {measure} − the baseline's, paired by seed; the
interval over seeds (Student's t) is for other seeds, that over documents (bootstrap) for other documents and the same
weights. Width: states that a token attends to. Range: tokens that can reach a prediction; both of
training → of evaluation where that has other lengths of memory. Speed: the median of each training, mean over seeds,
with {processes} trainings side by side, one thread each."""


@dataclass(frozen=True)
class Results:
    """Finished runs of an experiment, summed up over seeds.

    `print(results)` shows the table in Markdown.
    """

    content: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON: settings, runs with scores and curves, and how to repeat it."""
        return dict(self.content)

    def __str__(self) -> str:
        """Return the table, in Markdown."""
        content = self.content
        task, count = TASKS[content["task"]], len(content["seeds"])
        titles = ["setting", "seeds", *(measure.title for measure in task.measures)]
        titles += [f"− {_escaped(content['baseline'])}", "95 % over seeds", "95 % over documents"]
        titles += ["tokens trained", "width", "range", "parameters", "tokens/s"]
        rows = [_cells(entry, task, count) for entry in content["settings"]]
        lines = [titles, [":--", *["--:"] * (len(titles) - 1)], *rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def page(self, pictures: Sequence[str] = ()) -> str:
        """Return the table with notes and the command that repeats it, in Markdown."""
        content = self.content
        measure = TASKS[content["task"]].measures[0].title
        done, total = len(content["runs"]), len(content["runs"]) + len(content["missing"])
        evaluated = content["settings"][0]["evaluate"]
        limit = f", about {evaluated['tokens']:,} tokens of it" if evaluated["tokens"] else ""
        parts = [
            f"# {content['plan_file'] or 'Experiment'}",
            f"{done} of {total} runs are finished, seeds {', '.join(map(str, content['seeds']))}. "
            f"Scored on the {evaluated['split']} split{limit}. Baseline: {content['baseline']}.",
            str(self),
            NOTES.format(measure=measure, processes=content["processes"]),
            *(f"Failed: {run}: {reason}" for run, reason in content["failed"].items()),
            *(f"![{Path(picture).stem}]({picture})" for picture in pictures),
            *([f"```bash\n{content['command']}\n```"] if content["command"] else []),
            f"Commit: {', '.join(content['commits']) or 'unknown'}. Corpus: {content['corpus']}.",
        ]
        return "\n\n".join(parts) + "\n"

    def write(self, out: Path, pictures: Sequence[str] = ()) -> None:
        """Write results.json and results.md, each atomically."""
        write_json(out / JSON, self.to_dict())
        with atomic_file(out / MARKDOWN) as temporary:
            temporary.write_text(self.page(pictures), encoding="utf-8")


def summarize(plan: Plan, corpus: Corpus, out: Path, *, processes: int, failed: Mapping[str, str]) -> Results:
    """Return the results of the finished runs in `out`; `failed` holds the reason for each failed run."""
    runs = {run.path: result for run in plan.runs() if (result := result_of(run, out))}

    def by_seed(setting: Setting) -> dict[int, dict[str, Any]]:
        """Return the finished runs of a setting."""
        paths = {seed: Run(setting, seed).path for seed in plan.seeds}
        return {seed: runs[path] for seed, path in paths.items() if path in runs}

    kind = plan.settings[0].evaluate.task
    named = {setting.name: by_seed(setting) for setting in plan.settings}
    return Results(
        {
            "format": FORMAT,
            "command": shlex.join([*COMMAND, plan.file, str(corpus.path), str(out)]) if plan.file else None,
            "plan_file": plan.file,
            "plan": dict(plan.tables),
            "task": kind,
            "seeds": list(plan.seeds),
            "baseline": plan.baseline,
            "corpus": corpus.fingerprint,
            "commits": sorted({run["commit"] for run in runs.values() if run["commit"]}),
            "processes": processes,
            "settings": [
                _summary(setting, named[setting.name], named[plan.baseline], TASKS[kind]) for setting in plan.settings
            ],
            "runs": list(runs.values()),
            "missing": [run.name for run in plan.runs() if run.path not in runs],
            "failed": dict(failed),
        }
    )


def _summary(
    setting: Setting, runs: Mapping[int, Mapping[str, Any]], baseline: Mapping[int, Mapping[str, Any]], task: Task
) -> dict[str, Any]:
    """Sum up one setting over its finished seeds."""
    identity = Run(setting, 0).tables()
    identity["train"].pop("seed")
    configs = setting.model, setting.evaluated
    trainings = [run["training"] for run in runs.values()]
    return {
        "setting": setting.name,
        **identity,
        "parameters": setting.parameters,
        "attention_width": [config.attention_width for config in configs],
        "temporal_range": [config.temporal_range for config in configs],
        "seeds": list(runs),
        "tokens": round(statistics.fmean(training["tokens"] for training in trainings)) if runs else None,
        "tokens_per_second": _over_seeds([training["tokens_per_second"] for training in trainings])["mean"],
        "measures": {
            measure.key: _over_seeds([run["score"][measure.key] for run in runs.values()]) for measure in task.measures
        },
        "against_baseline": _against(runs, baseline, task),
    }


def _over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """Return mean and standard deviation (n − 1) over seeds; None where they do not exist."""
    known = [value for value in values if value is not None]
    exists = bool(known) and len(known) == len(values)
    return {
        "mean": statistics.fmean(known) if exists else None,
        "deviation": statistics.stdev(known) if exists and len(known) > 1 else None,
        "values": list(values),
    }


def _against(
    runs: Mapping[int, Mapping[str, Any]], baseline: Mapping[int, Mapping[str, Any]], task: Task
) -> dict[str, Any] | None:
    """Compare with the baseline over the seeds that both have; None if there are none."""
    shared = [seed for seed in runs if seed in baseline]
    sides = [[side[seed]["score"] for seed in shared] for side in (baseline, runs)]
    known = all(score[task.measures[0].key] is not None for side in sides for score in side)
    return task.compare(*sides) if shared and known and runs is not baseline else None


def _cells(entry: Mapping[str, Any], task: Task, seeds: int) -> list[str]:
    against = entry["against_baseline"] or {}
    decimals = task.measures[0].decimals
    difference = against.get("difference")
    intervals = [against.get("difference_over_runs"), against.get("difference_over_documents")]
    done = len(entry["seeds"])
    return [
        _escaped(entry["setting"]),
        f"{done}" if done == seeds else f"{done} of {seeds}",
        *(_mean(entry["measures"][measure.key], measure.decimals) for measure in task.measures),
        NOTHING if difference is None else f"{difference:+.{decimals}f}",
        *(NOTHING if pair is None else f"{pair[0]:+.{decimals}f} to {pair[1]:+.{decimals}f}" for pair in intervals),
        NOTHING if entry["tokens"] is None else f"{entry['tokens']:,}",
        *(_trained_evaluated(*entry[name]) for name in ("attention_width", "temporal_range")),
        f"{entry['parameters']:,}",
        NOTHING if entry["tokens_per_second"] is None else f"{entry['tokens_per_second']:,.0f}",
    ]


def _mean(over_seeds: Mapping[str, Any], decimals: int) -> str:
    if over_seeds["mean"] is None:
        return "not finite" if over_seeds["values"] else NOTHING
    deviation = over_seeds["deviation"]
    return f"{over_seeds['mean']:,.{decimals}f}" + ("" if deviation is None else f" ± {deviation:,.{decimals}f}")


def _trained_evaluated(trained: float, evaluated: float) -> str:
    return f"{trained:,}" if trained == evaluated else f"{trained:,} → {evaluated:,}"


def _escaped(name: str) -> str:
    return name.replace("|", "\\|")
