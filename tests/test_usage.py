"""Usage is the attention that states received, however a stream was cut; only functions that ask for it pay."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compressive_transformer.compression import COMPRESSIONS, Compression
from compressive_transformer.errors import CompressiveError
from compressive_transformer.memory import Memory, SlotLayout
from compressive_transformer.memory.usage import AttentionSums
from small import (
    assert_close,
    assert_same_memory,
    configs,
    lanes_of,
    law,
    ragged_pieces,
    random_tokens,
    read_in_pieces,
    small_config,
    small_model,
)

MOST_USED = configs.map(lambda config: small_config(**{**vars(config), "compression": "most-used"}))


def assert_usage_is_that_of_the_reference(model, memory, lanes):
    """The sums of filled slots and pending states; what unfilled slots hold is never read."""
    for layer in range(model.config.n_layers):
        layout = SlotLayout.of(model.config, layer)
        if not layout.compressed_length:
            assert memory.layers[layer].usage is None
            continue
        for b, lane in enumerate(lanes):
            _, recent = layout.slot_spans(lane.seen)
            committed = lane.seen - lane.seen % model.config.segment_length
            spans = [*recent, *(range(token, token + 1) for token in range(committed, lane.seen))]
            for place, span in enumerate(spans):
                if span:
                    expected = sum(lane.received[layer][span.start]) / model.config.n_heads
                    assert memory.layers[layer].usage[b, place, 0].item() == pytest.approx(expected, abs=1e-9)


@settings(law, max_examples=12)
@given(config=MOST_USED, ages=st.tuples(st.integers(0, 12), st.integers(0, 12)), padding=st.integers(0, 2))
@example(config=small_config(segment_length=7, memory_length=2, compression="most-used"), ages=(5, 12), padding=1)
@example(config=small_config(empty_slots="zeros", norm="post", compression="most-used"), ages=(12, 1), padding=0)
def test_what_memory_carries_is_the_summed_attention_of_the_reference(config, ages, padding):
    model, lanes, stream = small_model(config), lanes_of(small_model(config), 2), random_tokens(2, 20)
    memory = model.empty_memory(2)
    for start, lengths in ((0, ages), (12, (8, 3))):
        chunk = torch.cat([stream[:, start : start + max(1, *lengths)], random_tokens(2, padding)], dim=1)
        memory = model(chunk, memory, torch.tensor(lengths)).memory
        with torch.no_grad():
            for lane, row, length in zip(lanes, stream.tolist(), lengths, strict=True):
                if length:
                    lane.read(row[start : start + length])
        assert_usage_is_that_of_the_reference(model, memory, lanes)


class Told(Compression):
    """Writes the usage of a group's first and last state into the slot."""

    uses_usage = True
    selects = True

    def forward(self, evicted, usage):
        told = torch.stack([usage[:, :, 0], usage[:, :, -1]], dim=2)
        return torch.cat([told, evicted[:, :, 0, 2:]], dim=2)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"segment_length": 7, "memory_length": 2},
        {"memory_length": 0},
        {"compressed_position": "unit"},
        {"position": "rotary"},
        {"position": "rotary", "compressed_position": "unit"},
    ],
    ids=str,
)
def test_usage_is_the_mean_attention_from_the_token_to_its_eviction(fields, monkeypatch):
    monkeypatch.setitem(COMPRESSIONS, "told", Told)
    model, stream, ages = small_model(compression="told", n_layers=1, **fields), random_tokens(2, 36), [30, 36]
    memory, lanes = model(stream, None, torch.tensor(ages)).memory, lanes_of(model, 2)
    layout = SlotLayout.of(model.config, 0)
    with torch.no_grad():
        for b, (lane, age) in enumerate(zip(lanes, ages, strict=True)):
            # The reference cannot compress so: only usage before anything is read of compressed memory counts.
            lane.compress = lambda layer, evicted, usage, following, rate=model.config.compression_rate: [
                torch.cat([evicted[at].new_tensor([usage[at], usage[at + rate - 1]]), evicted[at][2:]])
                for at in range(0, len(evicted), rate)
            ]
            lane.read(stream[b, :age].tolist())
            for slot, span in enumerate(layout.slot_spans(age)[0]):
                assert_close(memory.layers[0].compressed[b, slot], lane.groups[0][span.start // 3], 1e-9)


@pytest.mark.parametrize("fields", [{}, {"segment_length": 7, "memory_length": 2}, {"empty_slots": "zeros"}], ids=str)
def test_usage_and_what_it_keeps_do_not_depend_on_how_a_stream_is_cut(fields):
    model, stream = small_model(compression="most-used", **fields), random_tokens(3, 60)
    logits, memory, _ = read_in_pieces(model, stream, [[60] * 3])
    for longest in (1, 3, 9):
        pieces = ragged_pieces(random.Random(longest), 3, 60, longest)
        other_logits, other, _ = read_in_pieces(model, stream, pieces, padding=longest - 1)
        assert_close(other_logits, logits)
        assert_same_memory(model, other, memory)


def test_usage_goes_with_its_lane_and_a_document_begins_without_any():
    model, stream = small_model(compression="most-used"), random_tokens(3, 60)
    memory = model(stream[:, :22], None, torch.tensor([22, 7, 18])).memory
    order = torch.tensor([2, 0, 0])
    after = model(stream[order, 22:], memory.select(order))
    assert_same_memory(model, after.memory, model(stream[:, 22:], memory).memory.select(order), 1e-12)
    for layer in memory.layers:
        layer.usage[1] = torch.nan  # a broken lane is whole again
    fresh = model(stream[:, 22:], memory.reset(torch.tensor([False, True, False]))).memory
    assert_same_memory(model, fresh.select(torch.tensor([1])), model(stream[1:2, 22:]).memory, 1e-12)


def test_usage_is_saved_and_kept_in_single_precision_at_least(tmp_path):
    model, stream = small_model(compression="most-used"), random_tokens(2, 40)
    memory = model(stream[:, :22]).memory
    save_file(memory.state_dict(), tmp_path / "memory.safetensors")
    back = Memory.from_state_dict(load_file(tmp_path / "memory.safetensors"))
    assert_same_memory(model, back, memory, 0.0)
    assert torch.equal(model(stream[:, 22:], back).logits, model(stream[:, 22:], memory).logits)
    half = model.to(torch.bfloat16)
    assert {layer.usage.dtype for m in (half.empty_memory(1), half(stream).memory) for layer in m.layers} == {
        torch.float32
    }


@pytest.mark.parametrize("compression", [name for name, kind in COMPRESSIONS.items() if not kind.uses_usage])
def test_functions_that_do_not_ask_pay_nothing(compression, monkeypatch):
    monkeypatch.setattr(AttentionSums, "__init__", lambda *arguments: pytest.fail("usage was computed"))
    memory = small_model(compression=compression)(random_tokens(2, 40)).memory
    assert not any(name.startswith("usage") for name in memory.state_dict())


def test_memory_with_usage_fits_only_functions_that_ask_for_it():
    asks, other, tokens = small_model(compression="most-used"), small_model(compression="mean"), random_tokens(2, 6)
    for model, memory in ((asks, other(tokens).memory), (other, asks(tokens).memory)):
        message = r"memory does not fit: usage of layer 0 must be .*, \[batch, slot, 1\], got .*empty_memory\(2\)"
        with pytest.raises(CompressiveError, match=message):
            model(tokens, memory)
    assert asks.empty_memory(2).layers[0].usage.shape == (2, 7, 1)
