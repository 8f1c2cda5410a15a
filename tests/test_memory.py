"""Bookkeeping: no state is lost, each slot stands for the tokens that it says, and lanes are independent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compressive_transformer.config import ModelConfig
from compressive_transformer.errors import CompressiveError
from compressive_transformer.memory import Memory, SlotLayout
from compressive_transformer.model import CompressiveTransformer
from small import (
    LAYERED,
    assert_close,
    assert_same_memory,
    configs,
    law,
    layered,
    lengths,
    random_tokens,
    read_in_pieces,
    small_config,
    small_model,
)

TIERS = ("compressed", "recent", "pending")

# --- which tokens slots stand for ---

layouts = st.builds(SlotLayout, **lengths)


def layout_at_paper_size(segment_length, memory_length, compressed_length, compression_rate):
    return SlotLayout(segment_length, memory_length, compressed_length, compression_rate)


@settings(law, max_examples=60)
@given(layout=layouts, seen=st.integers(0, 80))
@example(layout=layout_at_paper_size(512, 512, 512, 3), seen=70 * 512 + 17)  # groups across commits
@example(layout=layout_at_paper_size(768, 768, 1152, 3), seen=20 * 768)
@example(layout=layout_at_paper_size(768, 500, 200, 4), seen=768 * 9)  # segments longer than memory
@example(layout=layout_at_paper_size(512, 64, 64, 8), seen=512 * 3 + 1)
def test_each_token_is_in_one_slot_or_pending_or_forgotten_in_order(layout, seen):
    compressed, recent = layout.slot_spans(seen)
    assert len(compressed) == layout.compressed_length
    assert len(recent) == layout.recent_length
    age, rate = torch.tensor(seen), layout.compression_rate
    committed = seen - seen % layout.segment_length
    remembered = [token for span in compressed + recent for token in span]
    # Without a gap up to the newest committed token: each evicted one is in one group or waits.
    assert remembered == list(range(committed - len(remembered), committed))
    assert all(len(span) in (0, rate) and span.start % rate == 0 for span in compressed)
    filled = [sum(map(bool, spans)) for spans in (compressed, recent)]
    assert [int(count) for count in layout.filled(age)] == filled
    # Unfilled slots are the oldest ones.
    assert all(compressed[layout.compressed_length - filled[0] :])
    assert all(recent[layout.recent_length - filled[1] :])
    waiting = int(layout.waiting(age))
    assert 0 <= waiting <= layout.waiting_length < max(2, rate)
    assert filled[1] == min(committed, layout.memory_length + waiting)
    # Forgotten are only tokens older than a full compressed memory.
    if layout.compressed_length and len(remembered) < committed:
        assert filled[0] == layout.compressed_length


@settings(law, max_examples=60)
@given(layout=layouts)
@example(layout=layout_at_paper_size(512, 512, 512, 3))
@example(layout=layout_at_paper_size(768, 500, 200, 4))
def test_bounds_of_waiting_states_and_groups_are_reached_never_exceeded(layout):
    commits = torch.arange(3 * layout.compression_rate + layout.memory_length // layout.segment_length + 2)
    seen = commits * layout.segment_length
    assert int(layout.waiting(seen).max()) == layout.waiting_length
    assert int(layout.compressed_groups(seen).diff().max()) == layout.groups_per_commit


def test_the_sizes_of_the_paper_need_what_is_expected():
    assert layout_at_paper_size(512, 512, 512, 2).waiting_length == 0
    assert layout_at_paper_size(512, 512, 512, 2).groups_per_commit == 256
    assert layout_at_paper_size(512, 512, 512, 3).waiting_length == 2
    assert layout_at_paper_size(512, 512, 512, 3).groups_per_commit == 171
    assert layout_at_paper_size(768, 768, 1152, 3).recent_length == 768
    assert layout_at_paper_size(512, 512, 0, 3).recent_length == 512
    assert layout_at_paper_size(512, 512, 0, 3).groups_per_commit == 0


# --- what slots hold ---


def counting_model(config):
    """A model whose only layer reads states that are the number of their token, counted from 1."""
    model = CompressiveTransformer(config).double()
    with torch.no_grad():
        model.embedding.weight.copy_(torch.arange(config.vocab_size)[:, None].expand(-1, config.d_model))
    return model


@settings(law, max_examples=30)
@given(config=configs, cuts=st.lists(st.integers(1, 15), min_size=1, max_size=5))
@example(config=small_config(segment_length=7, memory_length=3, compression_rate=4), cuts=[7, 7, 7, 7, 7])
@example(config=small_config(segment_length=2, memory_length=0, compression_rate=4), cuts=[1, 3, 9])
def test_memory_holds_the_states_of_the_tokens_that_its_slots_stand_for(config, cuts):
    fields = {"norm": "post", "compression": "mean", "compressed_scale": "free", "n_layers": 1, "vocab_size": 76}
    config = ModelConfig(**{**vars(config), **config.of_layer(0)._asdict(), **fields})
    model, layout = counting_model(config), SlotLayout.of(config, 0)
    numbers = torch.arange(1, sum(cuts) + 1)[None]
    memory = model.empty_memory(1)
    with torch.no_grad():
        for chunk in numbers.split(cuts, dim=1):
            memory = model(chunk, memory).memory
            seen = int(memory.seen)
            compressed, recent = layout.slot_spans(seen)
            held = [getattr(memory.layers[0], tier)[0] for tier in TIERS]
            assert [len(states) for states in held] == [
                config.compressed_length,
                layout.recent_length,
                seen % config.segment_length,
            ]
            means = [sum(span) / len(span) + 1 if span else 0 for span in compressed]
            assert_close(held[0], torch.tensor(means).double()[:, None].expand(-1, 8))
            for state, span in zip(held[1], recent, strict=True):
                assert not span or state.tolist() == [span.start + 1] * 8
            pending = range(seen - seen % config.segment_length, seen)
            assert held[2][:, 0].tolist() == [token + 1 for token in pending]


@pytest.mark.parametrize("fields", [{}, LAYERED["no rate divides"]], ids=str)
def test_memory_never_grows_however_much_is_read(fields):
    model, memory = small_model(**fields), None
    sizes = set()
    with torch.no_grad():
        for _ in range(30):
            memory = model(random_tokens(1, 2 * model.config.segment_length), memory).memory
            sizes.add(tuple(states.untyped_storage().nbytes() for states in memory.state_dict().values()))
    assert len(sizes) == 1  # and no state keeps a larger tensor alive


def test_no_padding_is_kept_among_the_pending_states():
    model, chunk = small_model(), random_tokens(3, 3)
    for states in (layer.pending for layer in model(chunk, None, torch.tensor([1, 3, 0])).memory.layers):
        assert states.ne(0).any(2).tolist() == [[True, False, False], [True] * 3, [False] * 3]


@pytest.mark.parametrize("fields", [{}, {"memory_length": 0}, {"compressed_length": 0}])
def test_reading_changes_no_memory_in_place(fields):
    model = small_model(**fields)
    memory = model(random_tokens(2, 30)).memory
    before = {name: states.clone() for name, states in memory.state_dict().items()}
    model(random_tokens(2, 13), memory)
    memory.reset(torch.tensor([True, False]))
    assert all(torch.equal(states, before[name]) for name, states in memory.state_dict().items())


# --- lanes ---


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"empty_slots": "zeros"},
        {"memory_length": 0, "compressed_position": "unit"},
        {**LAYERED["different rates"], "empty_slots": "zeros"},
        LAYERED["zero here and there"],
        {"position": "rotary"},
        {"position": "rotary", "compressed_position": "unit", "segment_length": 3},
    ],
)
@pytest.mark.parametrize("read", [22, 24])  # in the middle of a segment, and at its end
def test_a_lane_that_is_reset_is_a_fresh_lane_and_the_others_do_not_notice(read, fields):
    model, stream = small_model(**fields), random_tokens(3, 60)
    memory = model(stream[:, :read]).memory
    for states in memory.state_dict().values():
        if states.is_floating_point():
            states[1] = torch.nan  # a broken lane is whole again
    output = model(stream[:, 30:], memory.reset(torch.tensor([False, True, False])))
    fresh = model(stream[1:2, 30:])
    assert_close(output.logits[1:2], fresh.logits, 1e-12)
    assert_same_memory(model, output.memory.select(torch.tensor([1])), fresh.memory, 1e-12)
    others = torch.tensor([0, 2])
    undisturbed = model(stream[others, 30:], model(stream[others, :read]).memory)
    assert_close(output.logits[others], undisturbed.logits, 1e-12)
    assert_same_memory(model, output.memory.select(others), undisturbed.memory, 1e-12)


def test_a_reset_of_no_lane_or_of_all_is_what_it_says():
    model = small_model()
    memory = model(random_tokens(2, 30)).memory
    assert memory.reset(torch.tensor([False, False])) is memory
    assert not any(states.any() for states in memory.reset(torch.tensor([True, True])).state_dict().values())


@pytest.mark.parametrize("order", [[2, 0, 1], [1], [0, 0, 2, 2]], ids=str)
def test_selecting_lanes_commutes_with_reading(order):
    model, stream, indices = small_model(), random_tokens(3, 50), torch.tensor(order)
    memory = model(stream[:, :22], None, torch.tensor([3, 14, 22])).memory
    before = model(stream[:, 22:], memory).memory.select(indices)
    after = model(stream[indices, 22:], memory.select(indices))
    assert_same_memory(model, after.memory, before, 1e-12)
    assert_close(after.logits, model(stream[:, 22:], memory).logits[indices], 1e-12)
    assert memory.select(indices).batch_size == len(order)


# --- copies ---


@pytest.mark.parametrize("fields", [{}, {"memory_length": 0}, {"compressed_length": 0}, *LAYERED.values()], ids=str)
@pytest.mark.parametrize("read", [0, 6, 24])
def test_a_memory_comes_back_from_a_safetensors_file(tmp_path, read, fields):
    model, stream = small_model(**fields), random_tokens(2, 40)
    memory = model(stream[:, :read]).memory if read else model.empty_memory(2)
    save_file(memory.state_dict(), tmp_path / "memory.safetensors")
    back = Memory.from_state_dict(load_file(tmp_path / "memory.safetensors"))
    assert_same_memory(model, back, memory, 0.0)
    assert torch.equal(model(stream[:, 24:], back).logits, model(stream[:, 24:], memory).logits)


def test_detach_and_to_change_the_states_and_nothing_else():
    model = small_model()
    memory = model(random_tokens(2, 30)).memory
    halved = memory.to(torch.float32)
    for name, states in memory.state_dict().items():
        if name != "seen":
            assert halved.state_dict()[name].dtype == torch.float32
            assert torch.equal(states.float(), halved.state_dict()[name])
    assert halved.seen.dtype == torch.int64
    graph = memory._map(lambda states: states.clone().requires_grad_())
    assert not any(states.requires_grad for states in graph.detach().state_dict().values())
    assert_same_memory(model, graph.detach(), memory, 0.0)


def test_an_empty_memory_is_zeros_in_the_models_dtype():
    memory = small_model().float().empty_memory(3)
    assert memory.batch_size == 3
    assert memory.seen.tolist() == [0, 0, 0]
    assert [tuple(getattr(memory.layers[0], tier).shape) for tier in TIERS] == [(3, 3, 8), (3, 7, 8), (3, 0, 8)]
    assert {layer.recent.dtype for layer in memory.layers} == {torch.float32}


@layered
def test_each_layer_has_as_many_slots_as_its_own_layout(fields):
    model = small_model(**fields)
    for memory in (model.empty_memory(2), model(random_tokens(2, 50)).memory):
        for layer in range(3):
            layout = SlotLayout.of(model.config, layer)
            assert memory.layers[layer].compressed.shape == (2, layout.compressed_length, 8)
            assert memory.layers[layer].recent.shape == (2, layout.recent_length, 8)


@pytest.mark.parametrize("layer", [-1, 2])
def test_the_layout_of_a_layer_that_does_not_exist_is_refused(layer):
    with pytest.raises(CompressiveError, match=rf"^layer \({layer}\) must lie in 0 \.\. 1$"):
        SlotLayout.of(small_config(), layer)


def test_feeding_padding_alone_leaves_every_lane_where_it_was():
    model, stream = small_model(), random_tokens(2, 22)
    logits, memory, _ = read_in_pieces(model, stream, [[5, 0], [0, 7], [0, 0], [17, 15]], padding=3)
    assert_close(logits, model(stream).logits)
    assert_same_memory(model, memory, model(stream).memory)


# --- errors ---


@pytest.mark.parametrize("starts", [torch.tensor([True]), torch.tensor([1, 0]), torch.tensor(True)], ids=str)
def test_starts_that_are_no_yes_or_no_a_lane_are_refused(starts):
    with pytest.raises(CompressiveError, match=r"starts must be bool \[batch = 2\], got torch\.\w+ \["):
        small_model().empty_memory(2).reset(starts)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.tensor(1), r"indices must be int64 \[lanes\], got torch.int64 \[\]"),
        (torch.tensor([1.0]), r"indices must be int64 \[lanes\], got torch.float32 \[1\]"),
        (torch.tensor([True, False]), r"indices must be int64 \[lanes\], got torch.bool \[2\]"),
        (torch.tensor([0, 2]), r"indices must lie in 0 \.\. 1, got \[0, 2\]"),
        (torch.tensor([-1]), r"indices must lie in 0 \.\. 1, got \[-1\]"),
    ],
    ids=str,
)
def test_indices_that_are_no_lanes_are_refused(indices, message):
    with pytest.raises(CompressiveError, match=message):
        small_model().empty_memory(2).select(indices)


@pytest.mark.parametrize("missing", ["seen", "recent.0", "recent.1", "pending.0", "compressed.1"])
def test_a_state_without_all_tensors_is_refused(missing):
    state = small_model().empty_memory(2).state_dict()
    del state[missing]
    with pytest.raises(CompressiveError, match=r"not the state of a memory: expected tensors \['compressed.0', .*"):
        Memory.from_state_dict(state)


def test_a_state_without_any_layer_or_with_something_else_is_refused():
    state = small_model().empty_memory(2).state_dict()
    for wrong in ({}, {"seen": state["seen"]}, {**state, "usage.2": state["recent.0"]}):
        with pytest.raises(CompressiveError, match="not the state of a memory"):
            Memory.from_state_dict(wrong)
