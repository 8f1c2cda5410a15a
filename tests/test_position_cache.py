"""Projected distances that are kept from call to call change no number and are never of other weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive_transformer import CompressiveError
from compressive_transformer.attention.positions import PositionCache
from compressive_transformer.config import ModelConfig
from compressive_transformer.model import with_lengths
from small import assert_close, assert_same_memory, configs, layered, random_tokens, small_model

LAW = settings(max_examples=25, deadline=None, derandomize=True, database=None)
quiet = pytest.mark.filterwarnings("ignore::compressive_transformer.CompressiveWarning")


@LAW
@quiet
@given(configs, st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_reading_with_kept_distances_is_reading_without(config: ModelConfig, calls: list[list[int]]) -> None:
    model, distances = small_model(config).eval(), PositionCache()
    plain = kept = model.empty_memory(3)
    with torch.no_grad():
        for number, lengths in enumerate(calls):
            tokens = random_tokens(3, max(1, *lengths), seed=number)
            wanted = model(tokens, plain, torch.tensor(lengths))
            found = model(tokens, kept, torch.tensor(lengths), position_cache=distances)
            for lane, length in enumerate(lengths):
                assert_close(found.logits[lane, :length], wanted.logits[lane, :length])
            assert_same_memory(model, found.memory, wanted.memory)
            plain, kept = wanted.memory, found.memory


@layered
def test_layers_and_models_of_other_lengths_share_them(fields: dict[str, object]) -> None:
    model, distances = small_model(**fields).eval(), PositionCache()
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        for changed in (model, with_lengths(model, memory_length=9), with_lengths(model, memory_length=2)):
            assert_close(changed(tokens, position_cache=distances).logits, changed(tokens).logits)


def test_each_projection_is_computed_once() -> None:
    model, distances, projected = small_model().eval(), PositionCache(), []
    for block in model.blocks:
        block.attention.position.register_forward_hook(lambda *_: projected.append(1))
    memory = model.empty_memory(2)
    with torch.no_grad():
        for number in range(9):
            memory = model(random_tokens(2, 1 + number), memory, position_cache=distances).memory
    assert len(projected) == 2 * len(model.blocks)  # to compressed slots, and to all others


@quiet
def test_under_autocast_they_are_others() -> None:
    model, distances = small_model().float().eval(), PositionCache()
    tokens = random_tokens(2, 30)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(tokens, position_cache=distances).logits
        assert torch.equal(model(tokens, position_cache=distances).logits, model(tokens).logits)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(tokens, position_cache=distances).logits, rounded)


def test_with_gradient_they_are_refused() -> None:
    with pytest.raises(CompressiveError, match=r"a position cache is for reading without gradient: call in"):
        small_model()(random_tokens(2, 4), position_cache=PositionCache())


def test_without_them_all_layers_project_one_tensor() -> None:
    model, read = small_model(), []
    for block in model.blocks:
        block.attention.position.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    model(random_tokens(2, 4))
    compressed, recent = read[:2]  # in training each would be kept for the backward pass
    assert all(rows is first for rows, first in zip(read, [compressed, recent] * len(model.blocks), strict=True))
