"""A run is a function of its data and settings alone: however it is cut in time, in parts or over processes."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compressive_transformer.checkpoint import load
from compressive_transformer.config import TrainConfig
from compressive_transformer.data import Corpus
from compressive_transformer.data.lanes import lanes
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import evaluate, truncate_split
from compressive_transformer.model import CompressiveTransformer, next_token_loss
from compressive_transformer.train import Trainer, train
from compressive_transformer.train.distributed import Processes
from compressive_transformer.train.log import Log
from compressive_transformer.train.optimizer import Optimizer
from compressive_transformer.train.resume import Resume
from compressive_transformer.train.signals import StopSignals
from runs import (
    SLOW,
    TRAINING,
    assert_close_parameters,
    assert_same_run,
    assert_same_tensors,
    log_of,
    tiny_model,
    tiny_run,
)

pytestmark = pytest.mark.usefixtures("cpu")

STEPS = TRAINING["steps"]


# --- what does not change the result ---


@pytest.mark.usefixtures("double")
def test_micro_batches_do_not_change_a_step(corpus: Corpus, tmp_path: Path) -> None:
    whole = tiny_run(corpus, tmp_path / "whole", **SLOW)
    parts = tiny_run(corpus, tmp_path / "parts", micro_batches=2, **SLOW)
    assert_close_parameters(parts, whole)


def test_what_was_drawn_before_does_not_change_a_run(corpus: Corpus, finished: Path, tmp_path: Path) -> None:
    model = tiny_model(dropout=0.1)
    torch.rand(17)
    train(model, corpus, TrainConfig(**TRAINING), tmp_path / "run")
    assert_same_run(tmp_path / "run", finished)


# --- the two losses ---


def trained_by_hand(corpus: Corpus, weight: float, updates: int, **training: Any) -> CompressiveTransformer:
    """Each update from three segments, enough to attend to what was compressed on the way."""
    model = tiny_model()
    optimizer = Optimizer(model, TrainConfig(**{**TRAINING, **training}))
    memory = model.empty_memory(2)
    segments = lanes(corpus.train, batch_size=2, length=8)
    for step in range(1, updates + 1):
        for _ in range(5):
            segment = next(segments)
            output = model(segment.tokens, memory.reset(segment.starts), segment.lengths)
            loss = next_token_loss(output.logits, segment.targets) + weight * output.compression_loss
            loss.backward()
            memory = output.memory
        optimizer.step(step)
    return model


@pytest.mark.parametrize(
    ("updates", "training"),
    [(1, {}), (4, {"compression_learning_rate": 0.0})],
    ids=["learning f_c", "fixed f_c"],
)
def test_a_weight_on_the_compression_loss_never_changes_the_network(
    corpus: Corpus, updates: int, training: dict[str, Any]
) -> None:
    """To the bit; with f_c learning only as long as what it has learnt is not read."""
    start = dict(tiny_model().named_parameters())
    models = [dict(trained_by_hand(corpus, w, updates, **training).named_parameters()) for w in (0.0, 1.0, 1e3)]
    for name, first in start.items():
        if ".compression." not in name:
            assert not torch.equal(models[0][name], first), name
            assert torch.equal(models[0][name], models[1][name]), name
            assert torch.equal(models[0][name], models[2][name]), name
        else:
            assert torch.equal(models[0][name], first), name
            assert torch.equal(models[1][name], first) == bool(training), name
            assert torch.equal(models[2][name], first) == bool(training), name


@pytest.mark.parametrize("fields", [{}, {"compressed_position": "unit", "norm": "post"}, {"position": "rotary"}])
def test_every_parameter_learns(corpus: Corpus, tmp_path: Path, fields: dict[str, Any]) -> None:
    start = dict(tiny_model(**fields).named_parameters())
    model = tiny_run(corpus, tmp_path / "run", model=fields)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.ne(start[name]).any(), name
        assert parameter.isfinite().all(), name


def test_a_frozen_parameter_stays_frozen(corpus: Corpus, tmp_path: Path) -> None:
    model, start = tiny_model(), tiny_model()
    model.embedding.weight.requires_grad_(False)
    train(model, corpus, TrainConfig(**TRAINING), tmp_path / "run")
    assert torch.equal(model.embedding.weight, start.embedding.weight)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["embedding.weight"]


def test_training_learns(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", steps=60, late_update_step=0, validate_every=0, sample_every=0)
    losses = [line["loss"] for line in log_of(tmp_path / "run")]
    assert losses[0] == pytest.approx(math.log(257) + 0.5, abs=0.2)  # logits of variance 1 that know nothing
    assert sum(losses[-10:]) / 10 < 3.6


def test_bf16_keeps_parameters_and_memory_in_fp32(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", precision="bf16", stop_at=4)
    point = tmp_path / "run/resume/step-000000004"
    for file in ("training", "process-0"):
        tensors = load_file(point / f"{file}.safetensors")
        assert {value.dtype for value in tensors.values()} <= {torch.float32, torch.int64, torch.uint8}
    first = log_of(tmp_path / "run")[0]
    assert first["loss"] == pytest.approx(math.log(257) + 0.5, abs=0.2)


@pytest.mark.slow
def test_bf16_stays_finite_over_hundreds_of_segments(corpus: Corpus, tmp_path: Path) -> None:
    options = {"steps": 500, "batch_size": 2, "late_update_step": 0, "validate_every": 0, "sample_every": 0}
    tiny_run(corpus, tmp_path / "run", precision="bf16", checkpoint_every=500, log_every=25, **options)
    entries = log_of(tmp_path / "run")
    assert not any("skipped" in entry for entry in entries)
    losses = [entry["loss"] for entry in entries]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 1.5
    point = tmp_path / "run/resume/step-000000500"
    for file in ("training", "process-0"):
        assert all(value.isfinite().all() for value in load_file(point / f"{file}.safetensors").values())


# --- what a run leaves ---


def test_the_model_that_is_kept_is_the_best_at_validation(corpus: Corpus, tmp_path: Path) -> None:
    # A rate that rises until it destroys what was learnt.
    tiny_run(
        corpus, tmp_path / "run", steps=12, warmup_steps=12, learning_rate=1.0, late_update_step=0, validate_every=2
    )
    scores = [line["validation"]["bits_per_byte"] for line in log_of(tmp_path / "run") if "validation" in line]
    assert len(scores) == 6
    assert min(scores) < scores[-1]
    model, tokenizer = load(tmp_path / "run")
    split = truncate_split(corpus.validation, tokenizer, TRAINING["validation_tokens"])
    kept = evaluate(model, split).total.bits_per_byte
    assert kept == pytest.approx(min(scores), rel=1e-6)
    assert kept != pytest.approx(scores[-1], rel=1e-3)
    state = json.loads(next((tmp_path / "run/resume").iterdir()).joinpath("state.json").read_text())
    assert state["counters"]["best"] == min(scores)


def test_validation_reads_whole_documents_where_training_reads_pieces(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", max_document_length=8, validate_every=10, validation_tokens=0)
    model, _ = load(tmp_path / "run")
    (score,) = (line["validation"] for line in log_of(tmp_path / "run") if "validation" in line)
    assert score == pytest.approx(evaluate(model, corpus.validation).total.to_dict(), rel=1e-6)


def test_without_validation_the_last_model_is_kept(corpus: Corpus, tmp_path: Path) -> None:
    trained = tiny_run(corpus, tmp_path / "run", validate_every=0)
    assert_same_tensors(dict(load(tmp_path / "run")[0].state_dict()), dict(trained.state_dict()))
    assert not any("validation" in line for line in log_of(tmp_path / "run"))


# --- mistakes ---


@pytest.mark.parametrize(
    ("model", "training", "options", "message"),
    [
        ({"vocab_size": 300}, {}, {}, r"vocab_size \(300\) must be 257, the number of ids of "),
        ({}, {"max_document_length": 30}, {}, r"max_document_length \(30\) must be a multiple .* the nearest is 32"),
        ({}, {}, {"resume": "latest"}, "new/run: nothing to resume, no checkpoint was written there"),
        ({}, {}, {"resume": True}, r"resume \(True\) must be .latest., .if-any., a step or None"),
        ({}, {}, {"stop_at": 0}, r"stop_at \(0\) must be 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    corpus: Corpus,
    tmp_path: Path,
    model: dict[str, Any],
    training: dict[str, Any],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(CompressiveError, match=message):
        tiny_run(corpus, tmp_path / "new/run", model=model, **options, **training)
    assert not list(tmp_path.iterdir())


# --- what is not finite, and what stops a run ---


def made(corpus: Corpus, out: Path, *, resume: Resume = None, **fields: Any) -> Trainer:
    config = TrainConfig(**{**TRAINING, **fields})
    trainer = Trainer(tiny_model(), corpus, config, out, Processes(0, 1, torch.device("cpu")))
    trainer.begin(resume)
    return trainer


def spoil(trainer: Trainer, lane: int) -> None:
    """Put a number that is none into the memory of a lane."""
    memory = trainer.memories[0]
    memory.layers[1].recent[lane, -1, 3] = math.nan


def captured(trainer: Trainer) -> tuple[Log, list[dict[str, Any]]]:
    """A log that keeps its entries in a list."""
    entries: list[dict[str, Any]] = []
    log = Log(trainer.model, trainer.processes, trainer.out, last=STEPS)
    log.write = entries.append  # type: ignore[method-assign]
    return log, entries


def test_a_non_finite_update_is_skipped_and_its_lane_is_reset(corpus: Corpus, tmp_path: Path) -> None:
    trainer = made(corpus, tmp_path / "run")
    log, entries = captured(trainer)
    trainer.run(2, log, StopSignals())
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    moments = {name: value.clone() for name, value in trainer.optimizer.state().items()}
    spoil(trainer, 2)
    trainer.run(3, log, StopSignals())
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert all(torch.equal(value, moments[name]) for name, value in trainer.optimizer.state().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    skipped = next(entry["skipped"] for entry in entries if "skipped" in entry)
    titles = {document.title for document in corpus.train.documents}
    assert list(skipped["lanes"]) == ["2"]
    assert skipped["lanes"]["2"] in titles
    assert (skipped["gradient_norm"], skipped["count"]) == ("nan", 1)
    memory = trainer.memories[0]
    assert memory.seen[2] == 0
    assert (memory.seen[[0, 1, 3]] > 0).all()
    assert all(states.isfinite().all() for states in memory.state_dict().values())
    trainer.run(6, log, StopSignals())
    assert not all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.counters.skipped == 1
    assert trainer.counters.skipped_in_a_row == 0
    assert all(math.isfinite(entry["loss"]) for entry in entries if "loss" in entry)


def test_too_many_skipped_updates_stop_the_run(corpus: Corpus, tmp_path: Path) -> None:
    trainer = made(corpus, tmp_path / "run", max_skipped_updates=2, late_update_step=0)
    log, entries = captured(trainer)
    trainer.run(3, log, StopSignals())
    kept = {path.name for path in (tmp_path / "run" / "resume").iterdir()}
    hook = trainer.model.embedding.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(
        CompressiveError,
        match=r"3 updates in a row were skipped, .* \(2\); the last: update skipped: gradients",
    ):
        trainer.run(10, log, StopSignals())
    hook.remove()
    assert [entry["step"] for entry in entries if "skipped" in entry] == [4, 5, 6]
    assert {path.name for path in (tmp_path / "run" / "resume").iterdir()} == kept
    resumed = made(corpus, tmp_path / "run", resume="latest", max_skipped_updates=2, late_update_step=0)
    resumed.run(10, captured(resumed)[0], StopSignals())
    assert resumed.counters.skipped == 0


@pytest.fixture
def default_signals() -> Iterator[None]:
    """As in a program that somebody started in a terminal; background jobs of some shells ignore Ctrl-C."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_after_its_step_without_changing_it(
    corpus: Corpus, tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    model, config = tiny_model(), TrainConfig(**{**TRAINING, "checkpoint_every": 100})

    def kill(entry: dict[str, Any], _: CompressiveTransformer) -> None:
        if entry["step"] == 4 and "loss" in entry:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt, match="stopped after step 4, with a checkpoint to resume from"):
        train(model, corpus, config, tmp_path / "run", callbacks=[kill])
    assert "stopping after this step, with a checkpoint; a second signal stops" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train(tiny_model(), corpus, config, tmp_path / "run", resume="latest")
    train(tiny_model(), corpus, config, tmp_path / "whole")
    points = [load_file(tmp_path / name / "resume/step-000000010/training.safetensors") for name in ("run", "whole")]
    assert all(torch.equal(points[0][name], value) for name, value in points[1].items())


@pytest.mark.usefixtures("default_signals")
def test_a_second_signal_interrupts_immediately() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_signals_that_are_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.received is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
