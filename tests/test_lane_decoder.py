"""Lanes that stand anywhere in their segments are decoded together, each as if it were alone."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive_transformer.config import ModelConfig
from compressive_transformer.errors import CompressiveError
from compressive_transformer.generate import CachedDecoder
from compressive_transformer.memory import Memory
from compressive_transformer.model import CompressiveTransformer
from small import (
    assert_close,
    assert_same_memory,
    configs,
    each_position,
    layered,
    random_tokens,
    small_config,
    small_model,
)

LAW = settings(max_examples=15, deadline=None, derandomize=True, database=None)
quiet = pytest.mark.filterwarnings("ignore::compressive_transformer.CompressiveWarning")


@torch.no_grad()
def assert_decodes(model: CompressiveTransformer, lengths: list[int], steps: int, *, seed: int = 0) -> None:
    """Lanes that have read `lengths` tokens come, step and go at random; each gives what the model gives it alone."""
    rng, decoder = random.Random(seed), CachedDecoder(model)
    lanes: list[Memory] = []  # as the model has it, in the order of places
    waiting = [
        model(random_tokens(1, max(1, length), seed=length), None, torch.tensor([length])).memory for length in lengths
    ]
    for step in range(steps):
        while waiting and (not lanes or rng.random() < 0.7):
            lanes.append(waiting.pop())
            assert decoder.join(lanes[-1]) == len(lanes) - 1
        tokens = random_tokens(1, len(lanes), seed=step)[0]
        logits = decoder.step(tokens)
        for place, token in enumerate(tokens):
            output = model(token[None, None], lanes[place])
            assert_close(logits[place], output.logits[0, 0])
            lanes[place] = output.memory
        if rng.random() < 0.3:
            place = rng.randrange(len(lanes))
            assert_same_memory(model, decoder.leave(place), lanes[place])
            waiting.append(lanes[place])
            lanes[place] = lanes[-1]
            lanes.pop()
        assert decoder.batch_size == len(lanes)
    for place, memory in enumerate(lanes):
        assert_same_memory(model, decoder.lane(place), memory)


@LAW
@quiet
@given(configs, st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 99))
def test_lanes_of_any_ages_are_decoded_as_the_model_reads_each_alone(
    config: ModelConfig, lengths: list[int], seed: int
) -> None:
    assert_decodes(small_model(config).eval(), lengths, 12, seed=seed)


@layered
@each_position
def test_decoding_together_is_the_model_where_layers_differ(
    fields: dict[str, object], position: dict[str, str]
) -> None:
    assert_decodes(small_model(**{**fields, **position}).eval(), [17, 4, 0], 12)


def test_usage_is_counted_as_the_model_counts_it() -> None:
    for fields in ({}, {"memory_length": 0}, {"memory_length": (5, 0)}, {"compressed_length": (0, 3)}):
        assert_decodes(small_model(compression="most-used", **fields).eval(), [8, 17, 3], 10)


def test_decoding_together_is_the_model_with_an_adaptive_vocabulary() -> None:
    assert_decodes(small_model(adaptive_cutoffs=(3, 6), adaptive_factor=2).eval(), [6, 1], 8)


def test_a_memory_that_was_handed_out_does_not_change() -> None:
    model = small_model().eval()
    decoder = CachedDecoder(model)
    decoder.join(model.empty_memory(1))
    for token in random_tokens(1, 7)[0]:
        decoder.step(token[None])
    kept = decoder.lane(0)
    before = {name: states.clone() for name, states in kept.state_dict().items()}
    for token in random_tokens(1, 9)[0]:
        decoder.step(token[None])
    for name, states in kept.state_dict().items():
        assert torch.equal(states, before[name])


def test_what_does_not_fit_is_refused() -> None:
    decoder = CachedDecoder(small_model().eval())
    with pytest.raises(CompressiveError, match=r"tokens must be integers \[batch = 0\], got"):
        decoder.step(torch.tensor([1]))
    with pytest.raises(CompressiveError, match=r"place \(0\) must be that of one of the 0 lanes"):
        decoder.leave(0)
    with pytest.raises(CompressiveError, match="memory does not fit"):
        decoder.join(small_model(small_config(d_model=4)).empty_memory(1))
