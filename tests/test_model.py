"""The model as a whole: what its logits, memory and losses are, and what they do not depend on."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compressive_transformer.compression import COMPRESSIONS, Compression, match_rms
from compressive_transformer.errors import CompressiveError
from compressive_transformer.memory import SlotLayout
from compressive_transformer.model import CompressiveTransformer, next_token_loss, with_lengths
from compressive_transformer.model import model as model_module
from small import (
    LAYERED,
    LEARNED,
    POSITIONS,
    assert_close,
    assert_same_memory,
    configs,
    each_position,
    each_position_in_turn,
    lanes_of,
    law,
    layered,
    ragged_pieces,
    random_tokens,
    read_in_pieces,
    small_config,
    small_model,
)

SAME_IN_BOTH_LAYERS = {"memory_length": (5, 5), "compressed_length": (3, 3), "compression_rate": (3, 3)}

# --- equal to the reference ---


def assert_memory_is_that_of_the_reference(model, memory, lanes):
    for b, lane in enumerate(lanes):
        assert memory.seen[b] == lane.seen
        committed = lane.seen - lane.seen % model.config.segment_length
        for layer in range(model.config.n_layers):
            compressed, recent = SlotLayout.of(model.config, layer).slot_spans(lane.seen)
            rate = model.config.of_layer(layer).compression_rate
            for slot, span in enumerate(compressed):
                expected = lane.groups[layer][span.start // rate] if span else torch.zeros(8).double()
                assert_close(memory.layers[layer].compressed[b, slot], expected, 1e-9)
            for slot, span in enumerate(recent):
                if span:
                    assert_close(memory.layers[layer].recent[b, slot], lane.inputs[layer][span.start], 1e-9)
            for place, state in enumerate(lane.inputs[layer][committed:]):
                assert_close(memory.layers[layer].pending[b, place], state, 1e-9)


@settings(law, max_examples=20)
@given(config=configs, ages=st.tuples(st.integers(0, 12), st.integers(0, 12)), length=st.integers(1, 12))
@example(config=small_config(segment_length=7, memory_length=2), ages=(0, 8), length=14)
@example(config=small_config(segment_length=5, memory_length=0, compression_rate=4), ages=(3, 12), length=10)
@example(config=small_config(segment_length=1, memory_length=3, compressed_position="unit"), ages=(6, 9), length=1)
@example(config=small_config(position="rotary", compressed_position="unit"), ages=(12, 5), length=12)
@example(config=small_config(position="rotary", empty_slots="zeros"), ages=(0, 11), length=12)
@example(config=small_config(position="rotary", compressed_position="unit", segment_length=3), ages=(9, 2), length=9)
def test_logits_memory_and_compression_loss_equal_the_reference(config, ages, length):
    check_against_the_reference(config, ages, length)


@layered
@each_position_in_turn
def test_layers_of_different_sizes_equal_the_reference_too(fields, position):
    check_against_the_reference(small_config(**fields, **position), (12, 5), 26)


@pytest.mark.parametrize("segment_length", [3, 4])  # a multiple of the compression rate, and none
@pytest.mark.parametrize("compression", sorted(COMPRESSIONS))
def test_every_compression_function_equals_the_reference(compression, segment_length):
    config = small_config(compression=compression, segment_length=segment_length, memory_length=2)
    check_against_the_reference(config, (12, 5), 16)


def check_against_the_reference(config, ages, length):
    model = small_model(config)
    lanes, stream = lanes_of(model, 2), random_tokens(2, 12 + length)
    memory = None
    with torch.no_grad():
        if any(ages):
            memory = model(stream[:, : max(ages)], None, torch.tensor(ages)).memory
        for b, age in enumerate(ages):
            if age:
                lanes[b].read(stream[b, :age].tolist())
            lanes[b].compression_loss = torch.zeros(())
        expected = torch.stack([lane.read(stream[b, 12:].tolist()) for b, lane in enumerate(lanes)])
    output = model(stream[:, 12:], memory)
    assert_close(output.logits, expected, 1e-9)
    assert_memory_is_that_of_the_reference(model, output.memory, lanes)
    if config.compression in LEARNED and config.compression_loss != "bptt":
        assert_close(output.compression_loss, sum(lane.compression_loss for lane in lanes).double() / 2, 1e-9)
    else:
        assert output.compression_loss == 0


@pytest.mark.parametrize("position", ["relative", "rotary"])
@pytest.mark.parametrize(("memory_length", "segment_length"), [(0, 3), (2, 5), (5, 5), (7, 3)])
def test_without_compressed_memory_the_model_is_a_transformer_xl(memory_length, segment_length, position):
    sizes = {"memory_length": memory_length, "segment_length": segment_length, "compressed_length": 0}
    sizes["position"] = position
    model, tokens = small_model(**sizes), random_tokens(1, 14)
    with torch.no_grad():
        expected = lanes_of(model, 1)[0].read(tokens[0].tolist())[None]
    assert_close(model(tokens).logits, expected, 1e-9)
    # Nothing that belongs to compressed memory has any effect, and none of its parameters exists.
    other = small_model(**sizes, compression="max", compression_rate=2, compressed_position="unit")
    assert other.state_dict().keys() == model.state_dict().keys()
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens).logits, other(tokens).logits)


def test_without_any_memory_each_segment_stands_alone():
    model, tokens = small_model(memory_length=0, compressed_length=0), random_tokens(2, 12)
    together = model(tokens)
    assert_close(together.logits, torch.cat([model(part).logits for part in tokens.split(4, dim=1)], dim=1), 1e-12)
    assert together.memory.layers[0].recent.shape == together.memory.layers[0].compressed.shape == (2, 0, 8)


def test_figure_1_each_step_turns_three_evicted_states_into_one():
    sizes = {"segment_length": 3, "memory_length": 6, "compressed_length": 6, "compression_rate": 3}
    model, tokens = small_model(n_layers=3, **sizes), random_tokens(1, 30)
    lane, memory = lanes_of(model, 1)[0], None
    for step in range(10):
        before, memory = memory, model(tokens[:, 3 * step : 3 * step + 3], memory).memory
        with torch.no_grad():
            lane.read(tokens[0, 3 * step : 3 * step + 3].tolist())
        assert [len(groups) for groups in lane.groups] == [max(0, step - 1)] * 3
        assert_memory_is_that_of_the_reference(model, memory, [lane])
        if step > 2:
            for layer, block in enumerate(model.blocks):
                oldest = before.layers[layer].recent[:, None, :3]
                assert_close(
                    memory.layers[layer].compressed[:, 5:], match_rms(block.compression(oldest), oldest), 1e-12
                )
                assert torch.equal(memory.layers[layer].compressed[:, :5], before.layers[layer].compressed[:, 1:])
                assert torch.equal(memory.layers[layer].recent[:, :3], before.layers[layer].recent[:, 3:])


# --- however a stream is cut ---


@pytest.mark.parametrize("segment_length", [3, 4])  # a multiple of the compression rate, and none
@each_position_in_turn
@pytest.mark.parametrize("compression", sorted(COMPRESSIONS))
def test_one_token_at_a_time_equals_chunks_equals_whole_segments(compression, position, segment_length):
    rng = random.Random(0)
    model = small_model(compression=compression, **position, segment_length=segment_length)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("compression" in name)  # else nobody computes a compression loss
    length = 12 * segment_length
    stream = random_tokens(2, length)
    whole = read_in_pieces(model, stream, [[segment_length] * 2] * 12)
    cuts = sorted(rng.sample(range(1, length), 12))
    chunks = [[stop - start] * 2 for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
    ways = {
        "one at a time": read_in_pieces(model, stream, [[1, 1]] * length),
        "random chunks": read_in_pieces(model, stream, chunks),
        "ragged chunks": read_in_pieces(model, stream, ragged_pieces(rng, 2, length, 9), padding=2),
        "one call": read_in_pieces(model, stream, [[length] * 2]),
    }
    assert (whole[2] > 0) == (compression in LEARNED)
    for logits, memory, loss in ways.values():
        assert_close(logits, whole[0])
        assert_same_memory(model, memory, whole[1])
        assert_close(loss, whole[2])


@layered
@each_position_in_turn
def test_layers_of_different_sizes_may_be_read_in_any_chunks_too(fields, position):
    rng, model, stream = random.Random(0), small_model(**fields, **position), random_tokens(2, 50)
    together = model(stream)
    for pieces in ([[1, 1]] * 50, ragged_pieces(rng, 2, 50, 9)):
        logits, memory, loss = read_in_pieces(model, stream, pieces, padding=rng.randint(0, 2))
        assert_close(logits, together.logits)
        assert_same_memory(model, memory, together.memory)
        assert_close(loss, together.compression_loss)
    assert together.compression_loss > 0


def test_one_number_for_all_layers_is_the_same_number_for_each_to_the_bit():
    tokens, one, each = random_tokens(2, 40), small_model(), small_model(**SAME_IN_BOTH_LAYERS)
    assert torch.equal(one(tokens).logits, each(tokens).logits)
    assert_same_memory(one, one(tokens).memory, each(tokens).memory, 0.0)


@pytest.mark.parametrize(
    ("fields", "layouts"),
    [
        ({"n_layers": 5}, 1),
        (SAME_IN_BOTH_LAYERS, 1),
        ({"n_layers": 5, "memory_length": (5, 5, 2, 5, 2)}, 2),
        (LAYERED["different rates"], 3),
        ({"n_layers": 5, "position": "rotary"}, 1),
    ],
)
def test_places_are_computed_once_for_all_layers_of_one_layout(fields, layouts, monkeypatch):
    model, computed, compute = small_model(**fields), [], model_module.chunk_positions

    def counted(config, layout, **chunk):
        computed.append(layout)
        return compute(config, layout, **chunk)

    monkeypatch.setattr(model_module, "chunk_positions", counted)
    model(random_tokens(1, 4))
    assert len(computed) == len(set(computed)) == layouts


@settings(law, max_examples=16)
@given(config=configs, seed=st.integers(0, 99))
def test_random_ragged_chunks_equal_one_call(config, seed):
    rng, model, stream = random.Random(seed), small_model(config), random_tokens(3, 24)
    pieces = ragged_pieces(rng, 3, 24, rng.choice([2, 5, 11]))
    logits, memory, loss = read_in_pieces(model, stream, pieces, padding=rng.choice([0, 0, 1, 4]))
    together = model(stream)
    assert_close(logits, together.logits)
    assert_same_memory(model, memory, together.memory)
    assert_close(loss, together.compression_loss)


@each_position
@pytest.mark.parametrize("length", [0, 1, 3])
def test_what_padding_holds_and_how_wide_it_is_changes_nothing_now_or_later(length, position):
    model, stream = small_model(**position), random_tokens(2, 60)
    start, lengths = model(stream[:, :22]).memory, torch.tensor([2, length])
    for width in (3, 40):
        seen = []
        for fill in (0, 7):
            chunk = torch.full((2, width), fill)
            chunk[0, :2], chunk[1, :length] = stream[0, 22:24], stream[1, 22 : 22 + length]
            output = model(chunk, start, lengths)
            assert output.logits.shape == (2, width, 11)
            later = model(stream[:, 30:50], output.memory)
            seen.append([output.logits[0, :2], output.logits[1, :length], output.compression_loss, later])
        assert all(torch.equal(one, other) for one, other in zip(seen[0][:3], seen[1][:3], strict=True))
        assert torch.equal(seen[0][3].logits, seen[1][3].logits)
        assert_same_memory(model, seen[0][3].memory, seen[1][3].memory, 0.0)
        for lane in range(2):
            alone = model(stream[lane : lane + 1, :22]).memory
            if lengths[lane]:
                alone = model(stream[lane : lane + 1, 22 : 22 + lengths[lane]], alone).memory
            after = model(stream[lane : lane + 1, 30:50], alone)
            assert_close(seen[0][3].logits[lane : lane + 1], after.logits, 1e-12)


@pytest.mark.parametrize("read", [0, 6, 24])
def test_a_call_in_which_no_lane_reads_leaves_memory_and_gradients_alone(read):
    model, stream = small_model(), random_tokens(2, 30)
    memory = model(stream[:, :read]).memory if read else model.empty_memory(2)
    output = model(stream[:, 24:], memory, torch.tensor([0, 0]))
    assert_same_memory(model, output.memory, memory, 0.0)
    assert output.compression_loss == 0
    next_token_loss(output.logits, torch.full((2, 6), -100)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


# --- what a prediction depends on ---


@settings(law, max_examples=15)
@given(config=configs, changed=st.integers(0, 17))
@example(config=small_config(**LAYERED["in the last layers only"]), changed=2)
@example(config=small_config(**LAYERED["no rate divides"]), changed=5)
def test_a_token_changes_no_logit_before_it_and_its_own(config, changed):
    model, tokens = small_model(config), random_tokens(1, 18)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 11
    difference = (model(tokens).logits - model(other).logits).abs().amax(-1)[0]
    assert not difference[:changed].any()
    assert difference[changed] > 1e-6
    until = changed - changed % config.segment_length + config.segment_length  # all later ones of its segment
    assert (difference[changed:until] > 1e-12).all()


@each_position
@pytest.mark.parametrize(
    "fields",
    [
        {"compression_rate": 2, "memory_length": 3},
        {"compression_rate": 3, "memory_length": 3},
        {"compression_rate": (3, 2), "memory_length": (0, 7), "compressed_length": (4, 2)},
        {"compression_rate": (2, 3), "memory_length": (4, 0), "compressed_length": (5, 0)},
    ],
    ids=str,
)
def test_a_token_reaches_as_far_as_the_temporal_range_and_no_further(fields, position):
    model = small_model(**position, **fields)
    config, tokens = model.config, random_tokens(1, 80)
    now = 76  # the first token of the last segment
    reach = config.temporal_range
    limit = reach + sum(layout.waiting_length + layout.segment_length for layout in model.layouts)
    logits = model(tokens).logits[0, now]
    for back, reaches in ((reach, True), (limit, False)):
        other = tokens.clone()
        other[0, now - back] = (other[0, now - back] + 1) % 11
        assert bool((model(other).logits[0, now] != logits).any()) == reaches


@each_position
def test_the_same_tokens_later_in_a_stream_give_the_same_logits(position):
    # Segments and groups must begin at the same tokens, and all that is older must be forgotten.
    model, tokens = small_model(**position), random_tokens(1, 72)
    shifted = torch.cat([random_tokens(1, 12, seed=1), tokens], dim=1)
    assert_close(model(tokens).logits[:, -12:], model(shifted).logits[:, -12:], 1e-12)


def test_rotary_slots_of_one_token_stand_at_that_token_in_either_numbering():
    # With rate 1 and c = identity nothing is compressed: one long recent memory.
    fields = {"position": "rotary", "compression_rate": 1, "compression": "mean", "compressed_scale": "free"}
    span, unit = (small_model(**fields, compressed_position=numbering) for numbering in ("span", "unit"))
    tokens = random_tokens(2, 60)
    longer = small_model(position="rotary", memory_length=8, compressed_length=0)
    assert torch.equal(span(tokens).logits, unit(tokens).logits)
    assert_close(span(tokens).logits, longer(tokens).logits, 1e-12)


@settings(law, max_examples=10)
@given(config=configs)
@example(config=small_config(**LAYERED["short and long"]))
@example(config=small_config(**LAYERED["different rates"]))
@example(config=small_config(**LAYERED["zero here and there"], compressed_position="unit"))
def test_a_lane_does_not_depend_on_the_other_lanes(config):
    model, stream = small_model(config), random_tokens(3, 30)
    ages = torch.tensor([3, 0, 11])
    together = model(stream[:, 11:], model(stream[:, :11], None, ages).memory)
    for lane, age in enumerate(ages.tolist()):
        row = stream[lane : lane + 1]
        alone = model(row[:, 11:], model(row[:, :age]).memory if age else None)
        assert_close(together.logits[lane : lane + 1], alone.logits, 1e-12)
        assert_same_memory(model, together.memory.select(torch.tensor([lane])), alone.memory, 1e-12)


def with_garbage(model, memory):
    """The memory with numbers in the slots that nothing has filled yet."""
    layers = []
    for layout, layer in zip(model.layouts, memory.layers, strict=True):
        tiers = {}
        for tier, counts in zip(("compressed", "recent"), layout.filled(memory.seen), strict=True):
            states = getattr(layer, tier)
            length = states.shape[1]
            unfilled = length - 1 - torch.arange(length) >= counts[:, None]
            tiers[tier] = torch.where(unfilled[:, :, None], 100 * torch.randn_like(states), states)
        layers.append(replace(layer, **tiers))
    return replace(memory, layers=tuple(layers))


@pytest.mark.parametrize("fields", [*POSITIONS, *LAYERED.values()], ids=str)
@pytest.mark.parametrize("ages", [(0, 0), (0, 14), (3, 22)])
def test_an_empty_slot_gives_exactly_what_a_masked_one_gives(ages, fields):
    model, stream = small_model(**fields), random_tokens(2, 70)
    memory = model(stream[:, :22], None, torch.tensor(ages)).memory
    output, other = model(stream[:, 22:], memory), model(stream[:, 22:], with_garbage(model, memory))
    assert torch.equal(output.logits, other.logits)
    assert torch.equal(output.compression_loss, other.compression_loss)
    assert_same_memory(model, output.memory, other.memory, 0.0)  # all slots are filled by now


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("position", ["relative", "rotary"])
def test_a_large_memory_that_is_still_empty_is_like_none_at_all(position, dtype):
    # Whole blocks of slots are masked then, which fused kernels have to take.
    fields, tokens = {"position": position, "segment_length": 16}, random_tokens(2, 16)
    model = small_model(memory_length=1100, compressed_length=1100, **fields).to(dtype)
    found, parameters = [], list(model.blocks[0].attention.parameters())
    for each in (model, with_lengths(model, memory_length=0, compressed_length=0)):
        loss = next_token_loss(each(tokens).logits, tokens)
        found.append([loss, *torch.autograd.grad(loss, parameters)])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, 1e-12 if dtype == torch.float64 else 1e-5)


@settings(law, max_examples=20)
@given(config=configs, age=st.integers(0, 30))
def test_each_filled_slot_is_read_and_no_other(config, age):
    model, stream = small_model(replace(config, segment_length=4, empty_slots="masked")), random_tokens(1, 31)
    memory = model(stream[:, :age]).memory if age else model.empty_memory(1)
    memory = memory._map(lambda states: states.detach().requires_grad_())
    logits = model(stream[:, age : age + 1], memory).logits
    for layer, layout in enumerate(model.layouts):
        compressed, recent = ([bool(span) for span in spans] for spans in layout.slot_spans(age))
        filled = {"compressed": compressed, "recent": recent, "pending": [True] * (age % 4)}
        for tier, expected in filled.items():
            states = getattr(memory.layers[layer], tier)
            if states.numel():
                (gradient,) = torch.autograd.grad((logits * torch.randn_like(logits)).sum(), states, retain_graph=True)
                assert gradient[0].ne(0).any(dim=1).tolist() == expected, tier


# --- other lengths, copies, devices and precisions ---


@pytest.mark.parametrize("lengths", [{"memory_length": 7, "compressed_length": 5}, {"memory_length": (0, 7)}], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"compressed_position": "unit"},
        {"compression": "mean", "norm": "post"},
        {"compression_rate": (2, 3), "compressed_length": (1, 4)},
        {"position": "rotary"},
    ],
    ids=str,
)
def test_with_lengths_shares_all_parameters_and_equals_a_model_built_so(fields, lengths):
    model, tokens = small_model(**fields).eval(), random_tokens(2, 40)
    lengths = {"segment_length": 3, **lengths}
    changed = with_lengths(model, **lengths)
    built = small_model(seed=1, **{**fields, **lengths})
    built.load_state_dict(model.state_dict())
    assert torch.equal(changed(tokens).logits, built(tokens).logits)
    assert changed.config == built.config
    assert not changed.training
    originals = dict(model.named_parameters())
    assert {name for name, _ in changed.named_parameters()} == originals.keys()
    for name, parameter in changed.named_parameters():
        assert parameter is originals[name]


def test_with_lengths_can_leave_compressed_memory_out_but_not_invent_it():
    model = small_model()
    plain = with_lengths(model, compressed_length=0)
    assert not any("compression" in name for name in plain.state_dict())
    with pytest.raises(CompressiveError, match=r"compressed_length \(4\) .*blocks.0.compression.weight; keep"):
        with_lengths(plain, compressed_length=4)
    half = with_lengths(model, compressed_length=[0, 5])
    assert [block.compression is None for block in half.blocks] == [True, False]
    assert with_lengths(half, compressed_length=(0, 2)).config.compressed_length == (0, 2)
    with pytest.raises(
        CompressiveError, match=r"compressed_length \(2\) .*blocks.0.compression.weight; keep .* that lay"
    ):
        with_lengths(half, compressed_length=2)
    with pytest.raises(CompressiveError, match=r"memory_length \(-1\) must be 0 or more"):
        with_lengths(model, memory_length=-1)
    with pytest.raises(
        CompressiveError, match=r"memory_length \(\[1, 2, 3\]\) must be .* n_layers \(2\) layers, not 3"
    ):
        with_lengths(model, memory_length=[1, 2, 3])
    with pytest.raises(CompressiveError, match=r"'d_model' is not a length; .*segment_length"):
        with_lengths(model, d_model=16)


def test_two_calls_are_the_same_to_the_bit_and_a_copy_is_independent():
    model, tokens = small_model(), random_tokens(2, 30)
    first = model(tokens)
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        duplicate.embedding.weight.zero_()
    second = model(tokens)
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.compression_loss, second.compression_loss)
    assert_same_memory(model, first.memory, second.memory, 0.0)
    assert not duplicate(tokens).logits.any()


def test_nothing_that_depends_on_data_is_kept_in_the_module():
    model = small_model()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    model(random_tokens(2, 30))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not list(model.buffers())


@pytest.mark.parametrize(
    "fields", [{"compression": name} for name in sorted(COMPRESSIONS)] + [{"position": "rotary"}], ids=str
)
def test_a_model_built_on_the_meta_device_works_once_weights_are_assigned(fields):
    model, tokens = small_model(**fields), random_tokens(2, 30)
    with torch.device("meta"):
        empty = CompressiveTransformer(model.config)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(empty(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("position", ["relative", "rotary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_has_the_dtype_of_the_parameters(dtype, position):
    model = small_model(position=position).to(dtype)
    output = model(random_tokens(2, 30))
    assert output.logits.dtype == dtype
    assert {states.dtype for name, states in output.memory.state_dict().items() if name != "seen"} == {dtype}


@pytest.mark.parametrize(
    "fields",
    [{}, {"norm": "post", "compressed_position": "unit"}, {"compression": "mean"}, {"position": "rotary"}],
)
def test_bf16_autocast_is_close_to_fp32_and_finite_and_keeps_memory_in_fp32(fields):
    model, tokens = small_model(**fields).float(), random_tokens(2, 44)
    exact = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        memory, logits, losses = None, [], []
        for segment in tokens.split(4, dim=1):
            output = model(segment, memory)
            memory = output.memory
            logits.append(output.logits)
            losses.append(output.compression_loss)
            loss = next_token_loss(output.logits[:, :-1], segment[:, 1:]) + output.compression_loss
            loss.backward()
    assert {states.dtype for layer in memory.layers for states in (layer.compressed, layer.recent)} == {torch.float32}
    torch.testing.assert_close(torch.cat(logits, 1).float(), exact.logits, rtol=0.1, atol=0.3)
    torch.testing.assert_close(sum(losses).float(), exact.compression_loss, rtol=0.1, atol=0.01)
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


# Widths that no other test uses: nothing is cached yet.
@pytest.mark.parametrize(
    "fields",
    [
        {"d_model": 6},
        {"d_model": 12, "position": "rotary"},
        {"d_model": 20, "position": "rotary", "compressed_length": 0},
    ],
)
def test_inference_mode_leaves_nothing_behind_that_training_could_not_use(fields):
    model, tokens = small_model(**fields), random_tokens(2, 30)
    with torch.inference_mode():
        logits = model(tokens).logits
    output = model(tokens)
    next_token_loss(output.logits, tokens).backward()
    assert torch.equal(output.logits, logits)


def test_dropout_acts_in_training_only():
    model, tokens = small_model(dropout=0.5), random_tokens(1, 8)
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_tokens_may_be_32_bit():
    model, tokens = small_model(), random_tokens(2, 30)
    assert torch.equal(model(tokens.int()).logits, model(tokens).logits)


def test_reconstruction_error_is_relative_to_the_target():
    model, tokens = small_model(), random_tokens(2, 60)
    memory = model(tokens[:, :20]).memory
    halved = copy.deepcopy(model)
    for block in halved.blocks:
        torch.nn.init.zeros_(block.compression.weight)
    error = halved(tokens[:, 20:], memory).reconstruction_error
    assert_close(error, torch.ones(2).double())  # a slot of zeros reconstructs nothing at all
    assert model(tokens[:, :4]).reconstruction_error.tolist() == [0.0, 0.0]
    with torch.no_grad():
        output = model(tokens)
    assert output.compression_loss == 0


# --- a compression function of one's own ---


class MedianPool(Compression):
    def forward(self, evicted):
        return evicted.median(dim=2).values


def test_a_users_own_compression_function_works_end_to_end(monkeypatch):
    monkeypatch.setitem(COMPRESSIONS, "median", MedianPool)
    model, tokens = small_model(compression="median", compressed_scale="free", n_layers=1), random_tokens(2, 40)
    memory = model(tokens).memory
    states = model.blocks[0].attention_norm(model.embedding(tokens))  # what the only layer reads
    compressed, _ = model.layouts[0].slot_spans(40)
    for slot, span in enumerate(compressed):
        assert_close(memory.layers[0].compressed[:, slot], states[:, span.start : span.stop].median(dim=1).values)
    logits, _, _ = read_in_pieces(model, tokens, [[1, 1]] * 40)
    assert_close(logits, model(tokens).logits)
    next_token_loss(model(tokens).logits, tokens).backward()


class PreciseMean(Compression):
    def forward(self, evicted):
        return evicted.double().mean(dim=2)


def test_memory_keeps_the_dtype_of_the_parameters(monkeypatch):
    monkeypatch.setitem(COMPRESSIONS, "precise", PreciseMean)
    memory = small_model(compression="precise").float()(random_tokens(2, 40)).memory
    assert {layer.compressed.dtype for layer in memory.layers} == {torch.float32}


# --- losses and errors ---


def test_next_token_loss_is_the_mean_over_the_targets_that_count():
    logits, targets = torch.randn(2, 3, 11).double(), torch.tensor([[1, -100, 3], [4, 5, -100]])
    chosen = [(0, 0, 1), (0, 2, 3), (1, 0, 4), (1, 1, 5)]
    expected = -sum(logits.log_softmax(-1)[place] for place in chosen) / 4
    assert_close(next_token_loss(logits, targets), expected)
    assert next_token_loss(logits, torch.full((2, 3), -100)) == 0


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(2, 3),
        torch.zeros(3).long(),
        torch.zeros(2, 0).long(),
        torch.zeros(0, 3).long(),
        torch.tensor(3),
    ],
    ids=["float", "one axis", "no token", "no lane", "no axis"],
)
def test_tokens_that_are_no_batch_of_integers_are_refused(tokens):
    with pytest.raises(CompressiveError, match=r"tokens must be integers \[batch, chunk\].* got torch\.\w+ \["):
        small_model()(tokens)


@pytest.mark.parametrize("lengths", [[3, 5], [-1, 4]])
def test_lengths_out_of_range_are_refused(lengths):
    with pytest.raises(CompressiveError, match=r"lengths must lie in 0 \.\. 4, the chunk's length, got \["):
        small_model()(random_tokens(2, 4), None, torch.tensor(lengths))


@pytest.mark.parametrize("lengths", [torch.tensor([4]), torch.tensor([4.0, 4.0]), torch.tensor(4)])
def test_lengths_that_are_no_integer_a_lane_are_refused(lengths):
    with pytest.raises(CompressiveError, match=r"lengths must be int64 \[batch = 2\], got torch\."):
        small_model()(random_tokens(2, 4), None, lengths)


@pytest.mark.parametrize(
    "other",
    [
        {"memory_length": 9},
        {"compressed_length": 2},
        {"memory_length": (5, 9)},  # as it should be in the first layer
        {"compressed_length": (3, 0)},
        {"n_layers": 1},
        {"d_model": 4},
        {"segment_length": 7},  # the same slots, but 4 pending states where 8 are needed
    ],
    ids=str,
)
def test_the_memory_of_another_model_is_refused(other):
    memory = small_model(**other)(random_tokens(2, 18)).memory
    model = small_model(segment_length=10 if "segment_length" in other else 4)
    with pytest.raises(CompressiveError, match=r"memory does not fit: .*start from model.empty_memory\(2\)"):
        model(random_tokens(2, 4), memory)


def test_the_error_names_the_layer_whose_memory_does_not_fit():
    model, other = small_model(memory_length=(5, 2)), small_model()
    with pytest.raises(
        CompressiveError, match=r"layer 1 must be \[\(2, 3, 8\), \(2, 4, 8\).* got \[\(2, 3, 8\), \(2, 7, 8\)"
    ):
        model(random_tokens(2, 4), other.empty_memory(2))
    with pytest.raises(CompressiveError, match=r"must have 2 layers, got 3; start from"):
        model(random_tokens(2, 4), small_model(n_layers=3).empty_memory(2))


@pytest.mark.parametrize(
    "fields",
    [
        *({"compression": name} for name in ("conv", "attention", "most-used")),
        *({"compression_loss": name} for name in ("auto-encoding", "bptt")),
        {"position": "rotary"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::compressive_transformer.CompressiveWarning")
def test_a_training_step_asks_the_device_for_no_number(fields):
    # Tensors on the meta device have none: each wait for a GPU would be an error here. (An adaptive vocabulary asks how
    # many targets each cluster has.)
    model = small_model(**fields).to("meta")
    memory, lengths, loss = model.empty_memory(3), torch.tensor([4, 9, 1]), torch.zeros((), device="meta")
    for _ in range(2):
        tokens = torch.zeros(3, 9, dtype=torch.int64, device="meta")
        output = model(tokens, memory, lengths, targets=tokens)
        memory, loss = output.memory, loss + output.nats.sum() + output.compression_loss
    loss.backward()
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize("change", [torch.Tensor.float, torch.Tensor.long, lambda states: states.to("meta")])
def test_memory_of_another_precision_or_device_is_refused(change):
    model = small_model()  # in double precision
    memory = model.empty_memory(2)
    higher = replace(memory, layers=tuple(replace(layer, recent=change(layer.recent)) for layer in memory.layers))
    if change is torch.Tensor.float:  # lower precision is read as it is; double in a model of single is not
        model(random_tokens(2, 4), higher)
        model, higher = model.float(), memory
    with pytest.raises(CompressiveError, match=r"memory does not fit: the model is torch.float.* on cpu, states are"):
        model(random_tokens(2, 4), higher)


@pytest.mark.parametrize("id", [-1, 11, 2**40])
def test_ids_outside_of_the_vocabulary_are_refused(id):
    model, tokens = small_model(), random_tokens(2, 4)
    wrong = tokens.clone()
    wrong[1, 2] = id
    message = rf"must be ids of 0 .. 10, got .*{id}.*; encode text with the tokenizer"
    with pytest.raises(CompressiveError, match=message):
        model(wrong)
    with pytest.raises(CompressiveError, match=message):
        model(tokens, targets=wrong)


def test_the_memory_of_another_batch_is_refused():
    model = small_model()
    with pytest.raises(CompressiveError, match=r"memory does not fit: seen must be int64 \[batch = 3\].*\[2\]; start"):
        model(random_tokens(3, 4), model.empty_memory(2))
    with pytest.raises(CompressiveError, match=r"batch_size \(0\) must be 1 or more"):
        model.empty_memory(0)
