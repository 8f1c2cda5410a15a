"""A training step reads one segment of each lane, or a window of them, and learns from all its targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compressive_transformer.config import TrainConfig
from compressive_transformer.data import Corpus
from compressive_transformer.data.lanes import Lanes
from compressive_transformer.model import CompressiveTransformer
from compressive_transformer.model.embedding import token_nats
from compressive_transformer.train.optimizer import Optimizer
from compressive_transformer.train.step import SegmentWindow, split_micro_batches
from runs import TRAINING, log_of, tiny_model, tiny_run

pytestmark = pytest.mark.usefixtures("cpu")

BPTT = {"compression_loss": "bptt"}
SETTINGS = {**TRAINING, "late_update_step": 0, "learning_rate": 1e-3, "compression_learning_rate": 1e-3}


def endless(corpus: Corpus, batch_size: int = 4) -> Lanes:
    return Lanes(corpus.train, batch_size=batch_size, length=8, seed=0, endless=True)


def trained_by_hand(corpus: Corpus, segments: int, steps: int) -> tuple[CompressiveTransformer, list[int], set[str]]:
    """The model, targets learned from after each step, and the parameters that ever got a gradient."""
    model, stream, config = tiny_model(**BPTT), endless(corpus), TrainConfig(**SETTINGS)
    optimizer, memory = Optimizer(model, config), model.empty_memory(4)
    learned, reached = [], set()
    for step in range(1, steps + 1):
        nats, targets = torch.zeros(()), 0
        for _ in range(segments):
            segment = next(stream)
            output = model(segment.tokens, memory.reset(segment.starts), segment.lengths)
            nats = nats + token_nats(output.logits, segment.targets).sum()
            memory, targets = output.memory, targets + segment.total_targets
        (nats / targets).backward()
        reached |= {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        optimizer.step(step)
        memory = memory.detach()
        learned.append((learned[-1] if learned else 0) + targets)
    return model, learned, reached


@pytest.mark.parametrize("segments", [2, 3])
def test_a_step_under_bptt_is_one_update_from_all_targets_of_its_segments(
    corpus: Corpus, tmp_path: Path, segments: int
) -> None:
    model = tiny_run(corpus, tmp_path / "run", model=BPTT, bptt_segments=segments, stop_at=6, **SETTINGS)
    by_hand, tokens, reached = trained_by_hand(corpus, segments, 6)
    for (name, one), other in zip(model.named_parameters(), by_hand.named_parameters(), strict=True):
        torch.testing.assert_close(one, other[1], rtol=0, atol=1e-6, msg=name)
    assert [line["tokens"] for line in log_of(tmp_path / "run") if "loss" in line] == tokens
    assert {name for name in reached if ".compression." in name} == {
        f"blocks.{layer}.compression.weight" for layer in range(2)
    }
    assert all(line["compression_loss"] == 0 for line in log_of(tmp_path / "run") if "loss" in line)


@pytest.mark.usefixtures("double")
def test_micro_batches_do_not_change_a_window(corpus: Corpus, tmp_path: Path) -> None:
    whole = tiny_run(corpus, tmp_path / "whole", model=BPTT, **SETTINGS)
    parts = tiny_run(corpus, tmp_path / "parts", model=BPTT, micro_batches=2, **SETTINGS)
    for (name, one), other in zip(parts.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("loss", ["attention", "auto-encoding", "none"])
def test_other_losses_read_one_segment_a_step(
    corpus: Corpus, tmp_path: Path, loss: str, recwarn: pytest.WarningsRecorder
) -> None:
    # Of a function without parameters, so that no loss has anything to train.
    fields = {"compression": "mean", "compression_loss": loss}
    tiny_run(corpus, tmp_path / "run", model=fields, bptt_segments=3, stop_at=3)
    stream = endless(corpus)
    expected = sum(next(stream).total_targets for _ in range(3))
    assert [line["tokens"] for line in log_of(tmp_path / "run")][-1] == expected
    assert not recwarn


def test_a_document_that_begins_inside_a_window_cuts_the_gradient(corpus: Corpus) -> None:
    window = SegmentWindow(tiny_model(**BPTT), "fp32")
    stream = endless(corpus, batch_size=1)
    memory = window.model.empty_memory(1)
    with torch.no_grad():
        for _ in range(4):
            memory = window([next(stream)], memory).memory
    segments = [next(stream), next(stream)]
    for begins in (False, True):
        second = segments[1]._replace(starts=torch.tensor([begins]))
        window.zero_grad()
        read = window([segments[0], second], memory)
        assert not any(states.requires_grad for states in read.memory.state_dict().values())
        read.nats.backward()
        gradient = window.model.blocks[0].compression.weight.grad
        assert bool(gradient is not None and gradient.any()) != begins


def test_micro_batches_hold_all_lanes_once_and_the_targets_of_all(corpus: Corpus) -> None:
    stream = endless(corpus)
    segments = [next(stream) for _ in range(2)]
    parts = split_micro_batches(segments, 2)
    assert [len(part) for part in parts] == [2, 2]
    for at, segment in enumerate(segments):
        for field, whole in segment._asdict().items():
            if isinstance(whole, torch.Tensor):
                assert torch.equal(torch.cat([getattr(part[at], field) for part in parts]), whole)
            else:
                assert [getattr(part[at], field) for part in parts] == [whole] * 2
