"""An experiment is its runs and nothing else: each as by hand, however it was interrupted, and summed up honestly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compressive_transformer.apps.experiment import run_experiment, workers
from compressive_transformer.apps.experiment.plan import Run, read_plan
from compressive_transformer.apps.experiment.report import summarize
from compressive_transformer.apps.experiment.run_progress import RunProgress
from compressive_transformer.apps.experiment.running import RESULT, check_unchanged, finish, result_of, steps_done
from compressive_transformer.apps.experiment.workers import alone_in
from compressive_transformer.checkpoint import load, read_json
from compressive_transformer.cli import main
from compressive_transformer.compression import COMPRESSIONS, Compression
from compressive_transformer.config import ModelConfig, TrainConfig
from compressive_transformer.data import Corpus, prepare
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import evaluate, truncate_split
from compressive_transformer.evaluate.compare import compare_runs
from compressive_transformer.files import import_file
from compressive_transformer.model import CompressiveTransformer, with_lengths
from compressive_transformer.train import Trainer, train
from runs import MODEL, TRAINING, write_books
from runs import log_of as log_lines

pytestmark = pytest.mark.usefixtures("cpu", "no_pictures")

TRAIN = {**TRAINING, "steps": 6, "validate_every": 3, "sample_every": 0, "checkpoint_every": 4, "log_every": 2}
PLAN: dict[str, Any] = {
    "seeds": [0, 1],
    "baseline": "Transformer-XL",
    "model": MODEL,
    "train": TRAIN,
    "evaluate": {"split": "test"},
    "settings": {
        "Transformer-XL": {"model": {"memory_length": 13, "compressed_length": 0}},
        "mean, c = 3": {"model": {"compression": "mean"}},
    },
}


# A file of a user's own, in a folder where modules are not looked for.
OWN = """
import compressive_transformer as ct

class Median(ct.Compression):
    def forward(self, evicted):
        return evicted.median(dim=2).values

ct.COMPRESSIONS["median"] = Median
"""


class Broken(Compression):
    """A function that shows its fault only in training."""

    def forward(self, evicted: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn, as where matplotlib is missing: each time it takes a second."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def plan_with(**changes: Any) -> dict[str, Any]:
    return {**PLAN, **changes}


def runs_of(plan: dict[str, Any], corpus: Corpus) -> list[Run]:
    return list(read_plan(plan, corpus).runs())


def tree(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_times(result: dict[str, Any] | None) -> dict[str, Any]:
    """A result without what is never twice the same."""
    assert result is not None
    training = {name: value for name, value in result["training"].items() if name != "seconds"}
    training.pop("tokens_per_second")
    training["losses"] = [{**entry, "tokens_per_second": 0} for entry in training["losses"]]
    return {**result, "training": training, "evaluation_seconds": 0}


@pytest.fixture(scope="module")
def done(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment whose runs are all finished, in this process; only to be read."""
    out = tmp_path_factory.mktemp("experiment") / "out"
    with pytest.MonkeyPatch.context() as patch, alone_in(out):
        patch.setattr(torch.cuda, "is_available", lambda: False)
        for run in runs_of(PLAN, corpus):
            finish(run, corpus, out)
    return out


@pytest.fixture
def copied(done: Path, tmp_path: Path) -> Path:
    """The same to be changed."""
    return Path(shutil.copytree(done, tmp_path / "out"))


# --- one run ---


def test_a_run_equals_training_and_evaluation_by_hand(corpus: Corpus, done: Path, tmp_path: Path) -> None:
    config = TrainConfig(**TRAIN, seed=1)
    torch.manual_seed(1)
    model = CompressiveTransformer(ModelConfig(**{"vocab_size": 257, **MODEL, "compression": "mean"}))
    train(model, corpus, config, tmp_path / "run")
    run = runs_of(PLAN, corpus)[3]
    assert (run.setting.name, run.seed, run.path) == ("mean, c = 3", 1, Path("runs/mean-c-3/seed-1"))
    result = read_json(done / run.path / RESULT)
    assert result["score"] == json.loads(json.dumps(evaluate(load(tmp_path / "run")[0], corpus.test).to_dict()))
    assert log_lines(done / run.path) == log_lines(tmp_path / "run")
    assert result["training"]["tokens"] == log_lines(tmp_path / "run")[-2]["tokens"]


def test_a_run_is_scored_with_the_tokens_and_memory_of_the_plan(corpus: Corpus, tmp_path: Path) -> None:
    settings = {"base": {}, "long": {"evaluate": {"compressed_length": 9, "memory_length": 11}}}
    plan = plan_with(settings=settings, baseline="base", seeds=[0], evaluate={"split": "validation", "tokens": 60})
    run = runs_of(plan, corpus)[1]
    finish(run, corpus, tmp_path)
    model, tokenizer = load(tmp_path / run.path)
    split = truncate_split(corpus.validation, tokenizer, 60)
    expected = evaluate(with_lengths(model, compressed_length=9, memory_length=11), split)
    result = result_of(run, tmp_path)
    assert result is not None
    assert result["score"] == json.loads(json.dumps(expected.to_dict()))
    assert (result["score"]["tokens"], result["score"]["conditions"]["model"]["compressed_length"]) == (60, 9)


@pytest.mark.parametrize("step", [1, 5])
def test_an_interrupted_run_ends_as_if_it_never_was(
    corpus: Corpus, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    original = Trainer.step

    def interrupted(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.counters.step == step:
            raise KeyboardInterrupt
        return original(trainer, *arguments)

    run = runs_of(PLAN, corpus)[1]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finish(run, corpus, tmp_path)
    assert any((tmp_path / run.path).iterdir())
    assert result_of(run, tmp_path) is None
    finish(run, corpus, tmp_path)
    assert without_times(result_of(run, tmp_path)) == without_times(result_of(run, done))
    ours, theirs = (load_file(folder / run.path / "model.safetensors") for folder in (tmp_path, done))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_that_diverged_is_a_result_that_json_can_hold(corpus: Corpus, tmp_path: Path) -> None:
    plan = plan_with(train={**TRAIN, "learning_rate": 1e30, "max_grad_norm": 1e30}, seeds=[0])
    for run in runs_of(plan, corpus):
        finish(run, corpus, tmp_path / "out")
    (tmp_path / "out" / "experiment.lock").touch()
    results = run_experiment(plan, corpus, tmp_path / "out")
    json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=pytest.fail)
    assert str(results).count("| not finite | not finite | – | – | – |") == 2


def test_steps_done_are_those_of_the_log(corpus: Corpus, done: Path, copied: Path) -> None:
    run = runs_of(PLAN, corpus)[0]
    assert steps_done(run, done) == 6
    with (copied / run.path / "log.jsonl").open("a") as log:
        log.write('{"step": 7')  # being written
    assert steps_done(run, copied) == 6
    assert steps_done(run, copied / "none") == 0


def test_progress_counts_every_segment_that_a_step_reads(corpus: Corpus, tmp_path: Path) -> None:
    settings = {"one": {}, "three": {"model": {"compression_loss": "bptt"}, "train": {"bptt_segments": 3}}}
    one, three = runs_of(plan_with(settings=settings, baseline="one", seeds=[0]), corpus)
    lane = TRAIN["steps"] * MODEL["segment_length"]
    assert RunProgress([one], tmp_path).total == lane * TRAIN["batch_size"]
    assert RunProgress([three], tmp_path).total == 3 * lane * TRAIN["batch_size"]


# --- all runs ---


def test_runs_go_seed_by_seed(corpus: Corpus) -> None:
    names = [run.name for run in runs_of(PLAN, corpus)]
    assert names == [f"{name}, seed {seed}" for seed in (0, 1) for name in PLAN["settings"]]


def test_finished_runs_are_not_repeated(corpus: Corpus, copied: Path) -> None:
    before = tree(copied / "runs")
    times = {path: path.stat().st_mtime_ns for path in (copied / "runs").rglob("*")}
    run_experiment(PLAN, corpus, copied)
    assert tree(copied / "runs") == before
    assert {path: path.stat().st_mtime_ns for path in (copied / "runs").rglob("*")} == times
    summed_up = tree(copied)
    run_experiment(PLAN, corpus, copied)
    assert tree(copied) == summed_up


def test_results_hold_means_deviations_and_the_paired_comparison(corpus: Corpus, copied: Path) -> None:
    results = run_experiment(PLAN, corpus, copied)
    table = results.to_dict()
    assert json.loads((copied / "results.json").read_text(encoding="utf-8")) == json.loads(json.dumps(table))
    runs = [read_json(copied / run.path / RESULT) for run in runs_of(PLAN, corpus)]
    assert table["runs"] == runs
    scores = {name: [run["score"] for run in runs if run["setting"] == name] for name in PLAN["settings"]}
    for entry in table["settings"]:
        bits = [score["bits_per_byte"] for score in scores[entry["setting"]]]
        measured = entry["measures"]["bits_per_byte"]
        assert measured == {"mean": statistics.mean(bits), "deviation": statistics.stdev(bits), "values": bits}
    baseline, mean = table["settings"]
    assert baseline["against_baseline"] is None
    compared = compare_runs(scores["Transformer-XL"], scores["mean, c = 3"])
    assert json.dumps(mean["against_baseline"]) == json.dumps(compared.to_dict())
    assert (baseline["attention_width"], mean["temporal_range"]) == ([21, 21], [42, 42])
    assert mean["parameters"] == sum(tensor.numel() for tensor in load(copied / "runs/mean-c-3/seed-0")[0].parameters())
    assert table["plan"] == PLAN

    row = str(results).splitlines()[3].split("|")
    assert [cell.strip() for cell in row[1:4]] == [
        "mean, c = 3",
        "2",
        "{mean:.4f} ± {deviation:.4f}".format(**mean["measures"]["bits_per_byte"]),
    ]
    assert row[5:7] == [
        f" {compared.difference:+.4f} ",
        " {:+.4f} to {:+.4f} ".format(*compared.difference_over_runs or ()),
    ]
    assert str(results) in (copied / "results.md").read_text(encoding="utf-8")


def test_unfinished_runs_are_named_and_seeds_are_paired(corpus: Corpus, copied: Path) -> None:
    shutil.rmtree(copied / "runs/mean-c-3/seed-1")
    results = summarize(read_plan(PLAN, corpus), corpus, copied, processes=1, failed={})
    assert results.to_dict()["missing"] == ["mean, c = 3, seed 1"]
    assert str(results).splitlines()[3].startswith("| mean, c = 3 | 1 of 2 | ")
    assert results.to_dict()["settings"][1]["against_baseline"]["runs"] == 1
    assert "3 of 4 runs are finished" in results.page()


@pytest.mark.slow  # two new interpreters, which import PyTorch
def test_a_failed_run_stops_no_other_run(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(COMPRESSIONS, "broken", Broken)
    monkeypatch.setitem(COMPRESSIONS, "median", Compression)  # set back at the end, as what the file registers
    (tmp_path / "own_median.py").write_text(OWN)
    import_file(tmp_path / "own_median.py")
    settings = {name: {"model": {"compression": name}} for name in ("broken", "median")}
    plan, out = plan_with(settings=settings, baseline="median", seeds=[1]), tmp_path / "out"
    log = out / "runs/broken/seed-1.log"
    with pytest.raises(CompressiveError) as failure:
        run_experiment(plan, corpus, out, processes=2)
    assert str(failure.value) == (
        f"1 of 2 runs failed: broken, seed 1: RuntimeError: no such kernel (see {log}); the others are in "
        f"{out / 'results.md'}; run the same command again to retry"
    )
    assert "Traceback" in log.read_text()
    printed = capsys.readouterr().err.splitlines()
    assert any(line.startswith("broken, seed 1: failed: RuntimeError: no such kernel; ") for line in printed)
    assert any(line.startswith("median, seed 1: finished; ") and line.endswith("; 1 of 2 runs") for line in printed)

    run = runs_of(plan, corpus)[1]
    finish(run, corpus, tmp_path / "here")
    assert without_times(result_of(run, out)) == without_times(result_of(run, tmp_path / "here"))
    content = read_json(out / "results.json")
    assert [run["setting"] for run in content["runs"]] == ["median"]
    assert content["failed"] == {"broken, seed 1": f"RuntimeError: no such kernel (see {log})"}


@pytest.mark.slow
def test_an_interrupt_ends_all_processes_and_leaves_checkpoints(corpus: Corpus, tmp_path: Path) -> None:
    path, out = tmp_path / "plan.toml", tmp_path / "out"
    settings = {"mean": {"model": {"compression": "mean"}}}
    write_toml(path, plan_with(settings=settings, baseline="mean", train={**TRAIN, "steps": 1_000_000}))
    call = [sys.executable, "-m", "compressive_transformer.cli", "experiment", path, corpus.path, out]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        [*call, "--processes", "1"], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        try:
            wait_until(lambda: any(out.glob("runs/mean/seed-0/resume/step-*")))
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            assert process.wait(timeout=300) == 1
        finally:
            process.kill()
        said = process.stderr.read().splitlines()
        assert said[-1] == "compressive: interrupted; run the same command again to resume from the last checkpoints"
        assert not any("Traceback" in line for line in said)

    def all_gone() -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(all_gone)
    assert not list(out.rglob(".*"))  # nothing half-written
    assert not list(out.rglob(RESULT))
    with alone_in(out):
        pass


def write_toml(path: Path, plan: dict[str, Any], prefix: str = "") -> None:
    """Writes a plan as TOML, tables last."""
    with path.open("a" if prefix else "w") as file:
        file.writelines(f"{name} = {json.dumps(value)}\n" for name, value in plan.items() if type(value) is not dict)
    for name, value in plan.items():
        if type(value) is dict:
            with path.open("a") as file:
                file.write(f"[{prefix}{json.dumps(name)}]\n")
            write_toml(path, value, f"{prefix}{json.dumps(name)}.")


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.1)
    pytest.fail("waited for five minutes")


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("name", ["mine", "statistics", "time"])
def test_workers_find_a_plugin_with_the_name_of_a_module(tmp_path: Path, name: str, *, imported: bool) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(OWN)
    with patch.dict(sys.modules), patch.dict(COMPRESSIONS):
        if not imported:
            sys.modules.pop(name, None)
        import_file(path)
        origin = workers.origin_of("median")
    with patch.dict(sys.modules), patch.dict(COMPRESSIONS):  # as in another process
        workers.register(origin)
        registered = COMPRESSIONS["median"]
        assert registered.forward.__code__.co_filename == str(path)
        assert registered.__module__ in sys.modules


def test_a_function_that_workers_cannot_import_is_refused_first(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hidden(Compression):
        pass

    monkeypatch.setitem(COMPRESSIONS, "hidden", Hidden)
    settings = {"base": {}, "hidden": {"model": {"compression": "hidden"}}}
    with pytest.raises(
        CompressiveError, match=r"'hidden': .*<locals>.Hidden is defined inside a function, where other"
    ):
        run_experiment(plan_with(settings=settings, baseline="base"), corpus, tmp_path / "out")
    assert not (tmp_path / "out/runs").exists()


# --- folders that are something else ---


def test_a_folder_is_of_one_experiment_at_a_time(corpus: Corpus, copied: Path) -> None:
    before = tree(copied)
    with alone_in(copied), pytest.raises(CompressiveError, match="another process runs an experiment there; wait"):
        run_experiment(PLAN, corpus, copied)
    assert tree(copied) == before


def test_a_folder_of_something_else_is_left_alone(corpus: Corpus, finished: Path) -> None:
    before = tree(finished)
    with pytest.raises(CompressiveError, match="run: exists already and is not an experiment's folder; choose another"):
        run_experiment(PLAN, corpus, finished)
    assert tree(finished) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {**TRAIN, "learning_rate": 0.5}},
            r"train\.learning_rate was 0\.01 when Transformer-XL, seed 0 ran and is 0\.5 in the plan now; set it back, "
            r"choose another folder, or remove \S+runs/Transformer-XL/seed-0 to run it again",
        ),
        ({"model": {**MODEL, "d_model": 32}}, r"model\.d_model was 16 when Transformer-XL, seed 0 ran and is 32"),
        ({"evaluate": {"split": "validation"}}, r"evaluate\.split was 'test' .* remove \S+/seed-0/result\.json to run"),
    ],
)
def test_a_run_with_other_settings_is_refused(
    corpus: Corpus, copied: Path, changes: dict[str, Any], message: str
) -> None:
    for interrupted in (False, True):
        if interrupted:
            for file in copied.rglob(RESULT):
                file.unlink()
        if interrupted and "evaluate" in changes:
            return  # the trainings are as they were
        before = tree(copied)
        with pytest.raises(CompressiveError, match=message):
            run_experiment(plan_with(**changes), corpus, copied)
        assert tree(copied) == before


def test_a_run_of_an_earlier_version_counts_with_new_fields_at_defaults(corpus: Corpus, copied: Path) -> None:
    runs = runs_of(PLAN, corpus)
    files = [file for run in runs for file in (copied / run.path / RESULT, *(copied / run.path).rglob("state.json"))]
    assert len(files) == 8
    for file in files:
        table = json.loads(file.read_text(encoding="utf-8"))
        del table["train"]["optimizer"], table["model"]["compression_heads"]
        file.write_text(json.dumps(table), encoding="utf-8")
        file.with_name("SHA256SUMS").unlink(missing_ok=True)  # they wrote none
    for interrupted in (False, True):
        for run in runs:
            if interrupted:
                (copied / run.path / RESULT).unlink()
            check_unchanged(run, corpus, copied)
    changed = runs_of(plan_with(train={**TRAIN, "optimizer": "muon"}), corpus)
    with pytest.raises(CompressiveError, match=r"train\.optimizer was 'adamw' when"):
        check_unchanged(changed[0], corpus, copied)


def test_a_run_on_another_corpus_is_refused(copied: Path, tmp_path: Path) -> None:
    books = write_books(tmp_path / "books")
    (books / "train/11.txt").write_text("Another text", encoding="utf-8")
    other = prepare(books, tmp_path / "data")
    with pytest.raises(CompressiveError, match=r"seed-0: Transformer-XL, seed 0 ran on another corpus than \S+; use"):
        run_experiment(PLAN, other, copied)


# --- plans ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "the plan: unknown table or field 'seed'; expected seeds, baseline, model, train, evaluate, set"),
        ({"model": 3}, "the plan, model: expected a table, got 3"),
        ({"settings": {}}, r"no settings; give at least one table \[settings.NAME\]"),
        ({"settings": {"a": 3}}, "the plan, setting 'a': expected a table, got 3"),
        (
            {"settings": {"a": {"modle": {}}}},
            "setting 'a': unknown table or field 'modle'; expected model, train, eval",
        ),
        (
            {"settings": {"a": {"model": {"d_modle": 8}}}},
            "setting 'a', model: unknown field 'd_modle'; did you mean d_",
        ),
        ({"settings": {"a": {"train": {"steps": 0}}}}, r"setting 'a', train: steps \(0\) must be 1 or more"),
        ({"settings": {"a": {"model": {"compression": "best"}}}}, "setting 'a': compression .'best'. is not a regist"),
        ({"settings": {"a": {"model": {"vocab_size": 9}}}}, r"setting 'a': vocab_size \(9\) must be 257, .* leave it"),
        ({"settings": {"a": {"evaluate": {"split": "test"}}}}, r"evaluate.split must be the same for all settings, .*"),
        ({"evaluate": {"split": "dev"}}, r"evaluate: split \('dev'\) must be 'train' or 'validation' or 'test'"),
        ({"evaluate": {"batch_size": 0}}, r"evaluate: batch_size \(0\) must be 1 or more"),
        ({"evaluate": {"task": "chess"}}, r"evaluate: task \('chess'\) must be "),
        ({"evaluate": {"compressed_length": 5}}, r"'Transformer-XL': compressed_length \(5\) needs parameters"),
        ({"evaluate": {"memory_length": "x"}}, r"'Transformer-XL': memory_length \('x'\) must be of type int"),
        ({"train": {**TRAIN, "seed": 3}}, r"'Transformer-XL': train.seed is set by seeds = \[...\]; leave it out"),
        ({"baseline": "XL"}, r"baseline \('XL'\) must be one of the settings: Transformer-XL, mean, c = 3"),
        ({"baseline": ["XL"]}, r"baseline \(\['XL'\]\) must be one of the settings"),
        ({"seeds": []}, r"seeds \(\[\]\) must be a list of at least one number, as in \[0, 1, 2\]"),
        ({"seeds": 3}, r"seeds \(3\) must be a list"),
        ({"seeds": [0, 1, 0]}, r"seeds \(\[0, 1, 0\]\) must differ from one another"),
        ({"seeds": [0, -1]}, r"the plan, seeds: seed \(-1\) must be 0 or more"),
        ({"seeds": [True]}, r"the plan, seeds: seed \(True\) must be of type int"),
        (
            {"settings": {"a": {}, "b": {"model": dict(MODEL)}}, "baseline": "a"},
            "settings 'a' and 'b' are the same; ch",
        ),
        (
            {"settings": {"A b": {}, "a/b": {}}, "baseline": "a/b"},
            "'A b' and 'a/b' would share the folder runs/a-b; re",
        ),
        ({"settings": {"...": {}}, "baseline": "..."}, "setting '...' needs a name with letters or digits"),
    ],
)
def test_a_wrong_plan_is_refused_before_anything_runs(
    corpus: Corpus, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CompressiveError, match=message):
        run_experiment(plan_with(**changes), corpus, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_plan_is_refused_where_the_corpus_lacks_a_split(tmp_path: Path) -> None:
    corpus = prepare(write_books(tmp_path / "books") / "train", tmp_path / "data", holdout=0)
    with pytest.raises(CompressiveError, match="has no test split"):
        run_experiment(PLAN, corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_experiment_needs_processes_and_no_torchrun(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompressiveError, match=r"processes \(0\) must be 1 or more"):
        run_experiment(PLAN, corpus, tmp_path / "out", processes=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CompressiveError, match="run it without torchrun"):
        run_experiment(PLAN, corpus, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# --- what is shown ---


def test_pictures_are_deterministic_and_name_every_setting(
    corpus: Corpus, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # of what this file does to all its tests
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    run_experiment(PLAN, corpus, copied)
    pictures = {path.name: path.read_text(encoding="utf-8") for path in copied.glob("*.svg")}
    assert set(pictures) == {"curves.svg", "settings.svg"}
    for name, picture in pictures.items():
        assert f"![{name[:-4]}]({name})" in (copied / "results.md").read_text(encoding="utf-8")
        for setting in PLAN["settings"]:
            assert f"<!-- {setting} -->" in picture  # Matplotlib writes each label as a comment
    run_experiment(PLAN, corpus, copied)
    assert {path.name: path.read_text(encoding="utf-8") for path in copied.glob("*.svg")} == pictures


def test_without_matplotlib_all_else_is_there(corpus: Corpus, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_experiment(PLAN, corpus, copied)
    assert "pip install 'compressive-transformer[plot]'" in capsys.readouterr().err
    assert {path.name for path in copied.iterdir()} == {"experiment.lock", "results.json", "results.md", "runs"}
    assert "svg" not in (copied / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_command_reads_a_file_and_prints_the_table(
    corpus: Corpus,
    copied: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    path = tmp_path / "plan.toml"
    write_toml(path, PLAN)
    arguments = ["compressive", "experiment", str(path), str(corpus.path), str(copied)]
    monkeypatch.setattr(sys, "argv", [*arguments, *options])
    main()
    printed = capsys.readouterr()
    results = run_experiment(path, corpus, copied)
    assert printed.out.rstrip("\n") == (json.dumps(results.to_dict(), indent=1) if options else str(results))
    assert results.to_dict()["command"].split() == arguments
