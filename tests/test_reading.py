"""The loop that reads splits: memory, gradient, and the mode of the model, however it ends."""

from __future__ import annotations

import contextlib

import pytest
import torch

from compressive_transformer.data import Corpus, lanes
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import read_segments, read_split, text_segments
from compressive_transformer.model import CompressiveTransformer
from runs import tiny_model


@pytest.fixture
def model() -> CompressiveTransformer:
    return tiny_model(dropout=0.5).train()


def test_segments_are_read_with_the_memory_of_those_before(model: CompressiveTransformer, corpus: Corpus) -> None:
    memory = None
    for segment, before, output in read_split(model, corpus.test, batch_size=2):
        assert not model.training
        memory = model.empty_memory(2) if memory is None else memory.reset(segment.starts)
        assert before.seen.tolist() == memory.seen.tolist()
        with torch.no_grad():
            expected = model(segment.tokens, memory, segment.lengths)
        torch.testing.assert_close(output.logits, expected.logits)
        assert output.nats is None
        memory = expected.memory
    assert model.training


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_restored_after_a_break_and_an_error(
    model: CompressiveTransformer, corpus: Corpus, training: bool
) -> None:
    model.train(training)
    for _ in read_split(model, corpus.test, batch_size=1):
        assert not model.training
        break
    assert model.training == training
    try:
        for _ in read_split(model, corpus.test, batch_size=1):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert model.training == training
    with contextlib.closing(read_split(model, corpus.test, batch_size=1)) as reading:
        next(reading)
        assert not model.training
    assert model.training == training


def test_gradient_is_recorded_only_if_asked_for_and_never_leaks(model: CompressiveTransformer, corpus: Corpus) -> None:
    for gradient in (False, True):
        segments = lanes(corpus.test, batch_size=1, length=model.config.segment_length)
        for (_, before, output), _ in zip(
            read_segments(model, segments, with_targets=True, gradient=gradient), range(3), strict=False
        ):
            assert torch.is_grad_enabled()
            assert output.nats.requires_grad == gradient
            assert not any(layer.compressed.requires_grad or layer.recent.requires_grad for layer in before.layers)


def test_other_tokens_and_too_few_lanes_are_refused_at_the_call(corpus: Corpus) -> None:
    with pytest.raises(CompressiveError, match="the corpus has 257 token ids, the model 300"):
        read_split(tiny_model(vocab_size=300), corpus.test, batch_size=1)
    with pytest.raises(CompressiveError, match=r"batch_size \(0\) must be at least the number of processes \(1\)"):
        read_split(tiny_model(), corpus.test, batch_size=0)


def test_a_text_in_memory_is_read_as_its_document(model: CompressiveTransformer, corpus: Corpus) -> None:
    ids = torch.from_numpy(corpus.test.read(0))
    inputs, length = torch.cat([torch.tensor([corpus.tokenizer.start]), ids[:-1]]), model.config.segment_length
    ours = text_segments(inputs[None], ids[None], lengths=torch.tensor([len(ids)]), segment_length=length)
    for found, expected in zip(ours, lanes(corpus.test, batch_size=1, length=length), strict=False):
        width = int(expected.lengths)  # segments on disk are padded
        assert torch.equal(found.tokens, expected.tokens[:, :width])
        assert torch.equal(found.targets, expected.targets[:, :width])
        assert (found.starts, found.lengths, found.documents) == (expected.starts, expected.lengths, expected.documents)
        assert found.total_targets == expected.total_targets
