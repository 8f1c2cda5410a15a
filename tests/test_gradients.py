"""Who learns from what: exact zeros where a gradient is stopped, and the right numbers everywhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.func import functional_call

from compressive_transformer.attention import CpuRelativeAttention
from compressive_transformer.memory import SlotLayout
from compressive_transformer.model import next_token_loss
from small import (
    LAYERED,
    LEARNED,
    assert_close,
    configs,
    each_position,
    lanes_of,
    law,
    random_tokens,
    small_config,
    small_model,
)

VARIANTS = [
    {},
    {"compressed_position": "unit", "norm": "post"},
    {"empty_slots": "zeros", "segment_length": 7, "memory_length": 2},
    {"position": "rotary"},
    {"position": "rotary", "compressed_position": "unit", "segment_length": 3, "norm": "post"},
]


def gradients(loss, model):
    names, parameters = zip(*model.named_parameters(), strict=True)
    if not loss.requires_grad:
        return dict.fromkeys(names)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True), strict=True))


def assert_same_gradients(actual, expected):
    for name, gradient in expected.items():
        other = actual[name]
        if gradient is None or other is None:
            assert gradient is None or not gradient.any(), name
            assert other is None or not other.any(), name
        else:
            assert_close(other, gradient, 1e-9)


@settings(law, max_examples=8)
@given(config=configs, ages=st.tuples(st.integers(0, 9), st.integers(0, 9)), length=st.integers(1, 9))
@example(config=small_config(segment_length=3, compression_rate=2), ages=(1, 8), length=12)
@example(config=small_config(segment_length=7, memory_length=2, norm="post"), ages=(0, 4), length=14)
@example(config=small_config(memory_length=0, compressed_position="unit"), ages=(5, 3), length=9)
@example(config=small_config(**LAYERED["different rates"]), ages=(7, 12), length=9)
@example(config=small_config(position="rotary"), ages=(9, 4), length=9)
@example(config=small_config(position="rotary", compressed_position="unit", segment_length=3), ages=(0, 9), length=9)
def test_all_gradients_equal_the_reference(config, ages, length):
    model, stream = small_model(config), random_tokens(2, 12 + length)
    lanes, memory = lanes_of(model, 2), None
    with torch.no_grad():
        if any(ages):
            memory = model(stream[:, : max(ages)], None, torch.tensor(ages)).memory
        for lane, row, age in zip(lanes, stream.tolist(), ages, strict=True):
            if age:
                lane.read(row[:age])
            lane.compression_loss = torch.zeros((), dtype=torch.float64)
    output = model(stream[:, 12:], memory)
    logits = torch.stack([lane.read(row[12:]) for lane, row in zip(lanes, stream.tolist(), strict=True)])
    weight = torch.randn_like(logits)
    assert_same_gradients(gradients((output.logits * weight).sum(), model), gradients((logits * weight).sum(), model))
    expected = sum(lane.compression_loss for lane in lanes) / 2
    assert_same_gradients(gradients(output.compression_loss, model), gradients(expected, model))


@pytest.mark.parametrize("fields", VARIANTS)
def test_each_loss_reaches_its_own_parameters_and_no_others(fields):
    model = small_model(**fields)
    stream = random_tokens(2, 60)
    output = model(stream, model(stream).memory)
    task = gradients(next_token_loss(output.logits, stream), model)
    compression = gradients(output.compression_loss, model)
    for name in task:
        own, other = (compression, task) if ".compression." in name else (task, compression)
        assert own[name].abs().max() > 1e-9, name
        assert other[name] is None or not other[name].any(), name
    for layer in range(2):
        assert compression[f"blocks.{layer}.compression.weight"].ne(0).all()


@pytest.mark.parametrize("fields", VARIANTS)
def test_the_compression_loss_never_reaches_the_network(fields):
    found = []
    for weight in (0.0, 1.0, 1000.0):
        model, stream = small_model(**fields), random_tokens(2, 60)
        output = model(stream, model(stream).memory)
        (next_token_loss(output.logits, stream) + weight * output.compression_loss).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if ".compression." not in name})
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name
        assert torch.equal(gradient, found[2][name]), name


def of_parameter(model, name, loss):
    """`loss(output)` as a function of one parameter, from a memory in which every slot is filled."""
    stream = random_tokens(2, 52)
    memory = model(stream[:, :48]).memory
    call = functional_call

    def value(parameter):
        return loss(call(model, {name: parameter}, (stream[:, 48:], memory)), stream[:, 48:])

    return value, dict(model.named_parameters())[name].detach().requires_grad_()


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("layer", [0, 1])
def test_finite_differences_agree_with_the_compression_loss(layer, norm):
    model = small_model(norm=norm, d_model=4)
    name = f"blocks.{layer}.compression.weight"
    value, parameter = of_parameter(model, name, lambda output, _: output.compression_loss)
    assert torch.autograd.gradcheck(value, (parameter,))


@each_position
@pytest.mark.parametrize(
    "name",
    ["attention.key_value.weight", "attention.position_bias", "attention.position.weight", "attention_norm.weight"],
)
def test_finite_differences_agree_with_the_task_loss(name, position):
    if position["position"] == "rotary":  # it has no parameters of its own
        name = name.replace("position_bias", "query.weight").replace("position.weight", "output.weight")
    model = small_model(**position, d_model=4)
    value, parameter = of_parameter(
        model, f"blocks.0.{name}", lambda output, tokens: next_token_loss(output.logits, tokens)
    )
    assert torch.autograd.gradcheck(value, (parameter,))


@pytest.mark.parametrize("fields", VARIANTS)
def test_forward_and_backward_change_no_parameter_or_requires_grad(fields):
    model, stream = small_model(**fields), random_tokens(2, 40)
    model.blocks[0].attention.query.weight.requires_grad_(False)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    values = {name: parameter.clone() for name, parameter in model.named_parameters()}
    output = model(stream)
    (next_token_loss(output.logits, stream) + output.compression_loss).backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == wanted[name], name
        assert parameter.is_leaf, name
        assert torch.equal(parameter, values[name]), name
        assert (parameter.grad is None) != wanted[name], name


def test_segments_train_in_turn_without_a_graph_between_them():
    model, stream = small_model(), random_tokens(2, 4)
    memory, losses = model.empty_memory(2), []
    for _ in range(60):
        output = model(stream, memory)
        memory = output.memory
        assert not any(states.requires_grad for states in memory.state_dict().values())
        loss = next_token_loss(output.logits[:, :-1], stream[:, 1:])
        (loss + output.compression_loss).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad if parameter.grad is not None else 0
        model.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.filterwarnings("ignore::compressive_transformer.CompressiveWarning")
@pytest.mark.parametrize("fields", [{"compression_loss": "none"}, {"compression": "mean"}, {"compressed_length": 0}])
def test_what_nothing_trains_has_no_compression_loss(fields):
    model, stream = small_model(**fields), random_tokens(2, 40)
    output = model(stream)
    assert output.compression_loss == 0
    assert output.reconstruction_error.tolist() == [0, 0]
    next_token_loss(output.logits, stream).backward()  # and the task loss is none of f_c's business
    assert all(p.grad is None for name, p in model.named_parameters() if ".compression." in name)


# --- auto-encoding and BPTT ---

each_learned = pytest.mark.parametrize("compression", LEARNED)


def of_f_c(name):
    return ".compression." in name or ".compression_decoder." in name


@each_learned
@pytest.mark.parametrize("loss", ["attention", "auto-encoding"])
def test_the_loss_of_a_function_reaches_all_of_it_and_nothing_of_the_network(compression, loss):
    model, stream = small_model(compression=compression, compression_loss=loss), random_tokens(2, 60)
    assert any(".compression_decoder." in name for name, _ in model.named_parameters()) == (loss == "auto-encoding")
    output = model(stream, model(stream).memory)
    assert not any(states.requires_grad for states in output.memory.state_dict().values())
    task = gradients(next_token_loss(output.logits, stream), model)
    trained = gradients(output.compression_loss, model)
    for name in task:
        own, other = (trained, task) if of_f_c(name) else (task, trained)
        assert own[name].abs().max() > 1e-9, name
        assert other[name] is None, name
    assert (output.reconstruction_error > 0).all()


@each_learned
def test_under_bptt_the_task_loss_reaches_f_c_through_memory(compression):
    stream, found = random_tokens(2, 60), []
    for loss in ("bptt", "attention"):
        model = small_model(compression=compression, compression_loss=loss)
        output = model(stream[:, 40:], model(stream[:, :40]).memory.detach())
        assert all(layer.compressed.requires_grad == (loss == "bptt") for layer in output.memory.layers)
        assert not any(layer.recent.requires_grad or layer.pending.requires_grad for layer in output.memory.layers)
        found.append(gradients(next_token_loss(output.logits, stream[:, 40:]), model))
        assert (output.compression_loss > 0) == (loss == "attention")
    for name, gradient in found[0].items():
        if of_f_c(name):
            assert gradient.abs().max() > 1e-9, name
            assert found[1][name] is None, name
        else:
            assert torch.equal(gradient, found[1][name]), name


def windowed(model, stream, memory, segments):
    """The summed task loss of a window that is read a segment at a time."""
    loss, length = 0, model.config.segment_length
    for at in range(segments):
        part = stream[:, at * length : (at + 1) * length]
        output = model(part, memory)
        memory, loss = output.memory, loss + next_token_loss(output.logits, part)
    return loss, memory


@pytest.mark.parametrize("segments", [2, 3])
@each_learned
def test_bptt_through_a_window_equals_the_graph_that_the_reference_builds(compression, segments):
    model = small_model(compression=compression, compression_loss="bptt")
    stream, length = random_tokens(2, 24 + 4 * segments), 4 * segments
    with torch.no_grad():
        memory, lanes = model(stream[:, :24]).memory, lanes_of(model, 2)
        for lane, row in zip(lanes, stream.tolist(), strict=True):
            lane.read(row[:24])
    loss, _ = windowed(model, stream[:, 24:], memory, segments)
    logits = torch.stack([lane.read(row[24:]) for lane, row in zip(lanes, stream.tolist(), strict=True)])
    expected = segments * next_token_loss(logits, stream[:, 24:])
    assert length == logits.shape[1]
    assert_close(loss, expected, 1e-9)
    actual = gradients(loss, model)
    assert_same_gradients(actual, gradients(expected, model))
    assert all(actual[name].ne(0).any() for name in actual if of_f_c(name))


@each_learned
def test_finite_differences_agree_with_bptt_over_two_segments(compression):
    model = small_model(compression=compression, compression_loss="bptt", d_model=2, n_heads=1, n_layers=1)
    stream = random_tokens(2, 32)
    memory = model(stream[:, :24]).memory.detach()
    for name, parameter in model.named_parameters():
        if of_f_c(name):

            def loss(value, name=name):
                first = functional_call(model, {name: value}, (stream[:, 24:28], memory))
                second = functional_call(model, {name: value}, (stream[:, 28:], first.memory))
                return second.logits.log_softmax(-1)[..., 0].sum()

            assert torch.autograd.gradcheck(loss, (parameter.detach().requires_grad_(),))


def test_windows_train_one_after_another_without_any_graph_between_them():
    model, stream = small_model(compression_loss="bptt"), random_tokens(2, 8)
    memory, losses, sizes = model.empty_memory(2), [], set()
    for _ in range(40):
        loss, memory = windowed(model, stream, memory, 2)
        memory = memory.detach()
        assert not any(states.requires_grad for states in memory.state_dict().values())
        sizes.add(sum(states.untyped_storage().nbytes() for states in memory.state_dict().values()))
        loss.backward()  # a second time through an earlier window would be an error
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad if parameter.grad is not None else 0
        model.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert len(sizes) == 1


def test_usage_carries_no_gradient():
    model, stream = small_model(compression="most-used"), random_tokens(2, 40)
    output = model(stream)
    assert not any(states.requires_grad for states in output.memory.state_dict().values())
    plain = small_model(compression="mean")
    plain.load_state_dict(model.state_dict())
    first = gradients(model(stream[:, :4]).logits.sum(), model)  # nothing is evicted yet
    other = gradients(plain(stream[:, :4]).logits.sum(), plain)
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_the_loss_does_not_depend_on_how_lanes_are_split():
    model, stream = small_model(), random_tokens(4, 52)
    ages = torch.tensor([0, 5, 17, 30])
    memory = model(stream[:, :30], None, ages).memory
    together = model(stream[:, 30:], memory).compression_loss
    halves = [
        model(stream[lanes, 30:], memory.select(torch.tensor(lanes))).compression_loss for lanes in ([0, 1], [2, 3])
    ]
    assert_close(together, sum(halves) / 2, 1e-12)
    assert halves[0] != halves[1]


@pytest.mark.parametrize(
    ("position", "message"), [("relative", "once_differentiable"), ("rotary", "derivative .* is not implemented")]
)
def test_a_second_derivative_is_refused_rather_than_wrong(position, message):
    model, stream = small_model(position=position), random_tokens(1, 8)
    loss = next_token_loss(model(stream).logits, stream)
    weight = model.blocks[0].attention.query.weight
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        gradient.sum().backward()


@pytest.mark.parametrize("ages", [(0, 0), (9, 9), (1, 14)])
@pytest.mark.parametrize("position", ["span", "unit"])
def test_finite_differences_agree_with_headwise_attention(position, ages, monkeypatch):
    # The tensors of a real call: two grids; step 3 and rows of each lane's own where ages differ.
    model = small_model(compressed_position=position, n_layers=1, d_model=4, memory_length=2, compressed_length=2)
    stream, calls, apply = random_tokens(2, 18), [], CpuRelativeAttention.apply
    memory = model(stream[:, :15], None, torch.tensor(ages)).memory if any(ages) else None
    monkeypatch.setattr(CpuRelativeAttention, "apply", lambda *tensors: calls.append(tensors) or apply(*tensors))
    model(stream[:, 15:], memory, torch.tensor([3, 1]))
    content, keys, values, mask, slots, observe, *grids = calls[0]
    assert len(slots) == 2
    assert len(grids[0]) == (3 if position == "span" else 1)
    assert grids[1].shape[1] == grids[3].shape[1] == (2 if len(set(ages)) > 1 else 1)
    tensors = [part.detach().requires_grad_() for part in (content, keys, values, *grids)]
    assert torch.autograd.gradcheck(
        lambda content, keys, values, *grids: apply(content, keys, values, mask, slots, observe, *grids), tensors
    )


def test_memory_may_carry_a_graph_of_the_callers_own():
    model, stream = small_model(), random_tokens(1, 30)
    memory = model(stream[:, :22]).memory
    recent = [layer.recent.clone().requires_grad_() for layer in memory.layers]
    layers = tuple(replace(layer, recent=states) for layer, states in zip(memory.layers, recent, strict=True))
    model(stream[:, 22:], replace(memory, layers=layers)).logits.sum().backward()
    filled = int(SlotLayout.of(model.config, 0).filled(memory.seen)[1])
    for states in recent:
        assert states.grad[0, -filled:].ne(0).any()
