"""Compression functions do what their names say; their loss is that of Algorithm 2."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from compressive_transformer.compression import (
    COMPRESSIONS,
    Compression,
    Convolution,
    Decoder,
    MaxPool,
    MeanPool,
    OverlappingConvolution,
    attention_reconstruction,
    auto_encoding,
    build_compression,
    match_rms,
    mean_and_relative,
)
from compressive_transformer.errors import CompressiveError, CompressiveWarning
from compressive_transformer.model import CompressiveTransformer
from small import LEARNED, assert_close, small_config, small_model


def random_groups(rate, *, batch_size=2, groups=5, d_model=6):
    return torch.randn(batch_size, groups, rate, d_model, generator=torch.Generator().manual_seed(0)).double()


def sizes(rate, **fields):
    return small_config(d_model=6, n_heads=2, compression_rate=rate, **fields)


def built(name, rate, *, heads=1):
    return build_compression(sizes(rate, compression=name, compression_heads=heads), 0).double()


def altered(name, rate, *, heads=1):
    """A function whose parameters are far from their first values."""
    torch.manual_seed(0)
    compression = built(name, rate, heads=heads)
    with torch.no_grad():
        for parameter in compression.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return compression


@pytest.mark.parametrize("rate", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["mean", "max", "conv", "attention"])
def test_each_group_becomes_one_state_and_depends_on_no_other_group(name, rate):
    compression, evicted = altered(name, rate), random_groups(rate)
    compressed = compression(evicted)
    assert compressed.shape == (2, 5, 6)
    assert_close(compressed, torch.stack([compression(group[:, None])[:, 0] for group in evicted.unbind(1)], 1))


@pytest.mark.parametrize("rate", [1, 2, 3, 5])
def test_pooling_is_that_of_torch_with_kernel_and_stride_c(rate):
    evicted = random_groups(rate)
    channels_first = evicted.flatten(1, 2).transpose(1, 2)
    for kind, pool in ((MeanPool, functional.avg_pool1d), (MaxPool, functional.max_pool1d)):
        assert_close(kind(sizes(rate), rate)(evicted), pool(channels_first, rate, rate).transpose(1, 2))


@pytest.mark.parametrize("rate", [1, 2, 3, 5])
def test_a_convolution_is_that_of_torch_with_kernel_and_stride_c(rate):
    compression, evicted = Convolution(sizes(rate), rate).double(), random_groups(rate)
    torch.nn.init.normal_(compression.weight)
    kernel = compression.weight.unflatten(1, (rate, 6)).transpose(1, 2)  # [out, in, place in the group]
    expected = functional.conv1d(evicted.flatten(1, 2).transpose(1, 2), kernel, stride=rate)
    assert_close(compression(evicted), expected.transpose(1, 2))


@pytest.mark.parametrize("rate", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_function_starts_as_the_mean_and_all_of_it_can_learn(name, rate):
    compression = built(name, rate)
    evicted = random_groups(rate + compression.overlap)
    compressed = compression(evicted)
    assert_close(compressed, evicted.mean(2), 1e-7)  # 1 / 3 in float32
    compressed.square().sum().backward()
    for parameter in compression.parameters():
        assert parameter.grad.any(dim=1).all() or (name, rate) == ("attention", 1)  # one state alone weighs 1


@pytest.mark.parametrize("rate", [1, 2, 3, 5])
def test_an_overlapping_convolution_is_torchs_with_kernel_c_plus_1(rate):
    compression, states = (
        OverlappingConvolution(sizes(rate), rate).double(),
        random_groups(1, groups=5 * rate + 1)[:, :, 0],
    )
    torch.nn.init.normal_(compression.weight)
    kernel = compression.weight.unflatten(1, (rate + 1, 6)).transpose(1, 2)  # [out, in, place in the group]
    expected = functional.conv1d(states.transpose(1, 2), kernel, stride=rate)
    groups = torch.stack([states[:, first : first + rate + 1] for first in range(0, 5 * rate, rate)], dim=1)
    assert_close(compression(groups), expected.transpose(1, 2))


def test_groups_that_reach_beyond_memory_are_refused():
    message = r"memory_length \(0\) must be at least 1 with compression = 'conv-overlap', whose groups hold states that"
    with pytest.raises(CompressiveError, match=message):
        small_model(compression="conv-overlap", memory_length=(3, 0))
    small_model(compression="conv-overlap", memory_length=(3, 0), compressed_length=(3, 0))


# --- dilated convolutions ---


@pytest.mark.parametrize("rate", [1, 2, 3, 5])
def test_dilated_convolutions_are_torchs_after_seven_zeros(rate):
    compression, evicted = altered("dilated", rate), random_groups(rate)
    states = functional.pad(evicted.flatten(1, 2).transpose(1, 2), (7, 0))
    for dilation, weight in zip((1, 2, 4), compression.dilated, strict=True):
        kernel = weight.unflatten(1, (2, -1)).transpose(1, 2)  # [out, in, earlier or own]
        states = functional.conv1d(states, kernel, dilation=dilation).relu()
    assert states.shape[2] == 5 * rate
    kernel = compression.weight.unflatten(1, (rate, -1)).transpose(1, 2)
    assert_close(compression(evicted), functional.conv1d(states, kernel, stride=rate).transpose(1, 2))


def test_dilated_convolutions_look_back_seven_states_within_a_commit():
    compression, evicted = altered("dilated", 2), random_groups(2, batch_size=1, groups=6).requires_grad_()
    (gradient,) = torch.autograd.grad(compression(evicted)[0, 5].sum(), evicted)
    # States 10 and 11 and seven before the first of them.
    assert gradient[0].flatten(0, 1).any(1).tolist() == [False] * 3 + [True] * 9


@pytest.mark.parametrize("name", ["conv", "dilated", "most-used", "attention"])
def test_groups_of_zeros_before_a_lanes_own_change_nothing(name):
    compression, evicted, usage = altered(name, 3), random_groups(3), random_usage(3)
    padded = torch.cat([torch.zeros(2, 4, 3, 6).double(), evicted], dim=1)
    unknown = torch.cat([torch.full((2, 4, 3), -torch.inf).double(), usage], dim=1)
    told, told_padded = ([usage], [unknown]) if compression.uses_usage else ([], [])
    assert_close(compression(padded, *told_padded)[:, 4:], compression(evicted, *told), 1e-15)


# --- most-used ---


def random_usage(rate, *, batch_size=2, groups=5):
    return torch.rand(batch_size, groups, rate, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("rate", [1, 2, 3, 5])
def test_most_used_keeps_the_most_used_states_in_order_of_time(rate):
    evicted, usage, real = random_groups(rate), random_usage(rate), (5, 3)
    usage[1, :2] = -torch.inf
    kept = built("most-used", rate)(evicted, usage)
    for lane, count in enumerate(real):
        states, own = evicted[lane].flatten(0, 1), usage[lane].flatten()
        places = sorted(sorted(range(5 * rate), key=lambda at, own=own: -own[at])[:count])
        assert torch.equal(kept[lane, 5 - count :], states[places])


def test_of_equally_used_states_the_earlier_are_kept():
    evicted = random_groups(3)
    assert torch.equal(built("most-used", 3)(evicted, torch.ones(2, 5, 3)), evicted.flatten(1, 2)[:, :5])


def test_most_used_of_lanes_without_any_real_group_is_finite():
    kept = built("most-used", 3)(random_groups(3), torch.full((2, 5, 3), -torch.inf))
    assert kept.isfinite().all()


# --- attention pooling ---


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_attention_pooling_is_torchs_attention_over_each_group(heads):
    compression, evicted = altered("attention", 3, heads=heads), random_groups(3)
    states = evicted.flatten(0, 1)
    slices = states.unflatten(-1, (heads, -1)).transpose(1, 2)  # [group, head, state, d_model / heads]
    queries = compression.queries[:, None].expand(len(states), -1, -1, -1)
    pooled = functional.scaled_dot_product_attention(queries, states[:, None].expand(-1, heads, -1, -1), slices)
    assert_close(compression(evicted), pooled.flatten(1).view(2, 5, 6))


def test_match_rms_keeps_the_direction_and_takes_the_size():
    evicted = random_groups(3)
    compressed = 0.01 * altered("conv", 3)(evicted)
    changed = match_rms(compressed, evicted)
    for state, before, group in zip(
        changed.flatten(0, 1), compressed.flatten(0, 1), evicted.flatten(0, 1), strict=True
    ):
        assert functional.cosine_similarity(state, before, dim=0).item() == pytest.approx(1, abs=1e-9)
        assert state.square().mean().item() == pytest.approx(group.square().mean().item(), rel=1e-6)


def test_match_rms_has_finite_gradients_at_zero_in_half_precision():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        evicted = 300 * random_groups(3).to(dtype)  # squares of this size are infinite in float16
        evicted[:, :2] = 0
        compressed = evicted.mean(2).requires_grad_()
        changed = match_rms(compressed, evicted)
        changed.float().sum().backward()
        assert changed.dtype == dtype
        assert not changed[:, :2].any()
        assert changed.isfinite().all()
        assert compressed.grad.isfinite().all()


def test_models_match_unless_the_config_or_the_function_says_otherwise():
    assert all(block.matches_rms for block in small_model().blocks)
    assert not any(block.matches_rms for block in small_model(compressed_scale="free").blocks)
    assert not any(block.matches_rms for block in small_model(compression="most-used").blocks)
    assert not any(block.matches_rms for block in small_model(compressed_length=0).blocks)


def test_heads_that_cannot_be_are_refused():
    with pytest.raises(CompressiveError, match=r"compression_heads \(4\) must divide d_model \(6\)"):
        built("attention", 3, heads=4)
    message = r"compression_heads \(2\) must be 1 with compression = 'conv'; heads are for attention"
    with pytest.raises(CompressiveError, match=message):
        built("conv", 3, heads=2)


# --- the table ---


def test_an_unknown_function_is_refused_with_the_ways_to_register_it():
    functions = ", ".join(COMPRESSIONS)
    known = rf"compression \('sum'\) is not .*known: {functions}. Register your own"
    with pytest.raises(CompressiveError, match=rf'{known} with COMPRESSIONS\["sum"\] = .*--plugin FILE.py COMMAND'):
        built("sum", 3)


def test_a_subclass_without_forward_says_so():
    class Empty(Compression):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty must define forward\(evicted\)"):
        Empty(sizes(3), 3)(random_groups(3))


# --- attention reconstruction ---


def random_problem(rate=3, groups=4):
    """Queries, evicted groups, their mean, and a projection to two heads of keys and values."""
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(3, 2, 5, 3, generator=generator).double()
    evicted = random_groups(rate, batch_size=3, groups=groups)
    weight = torch.randn(12, 6, generator=generator).double()

    def project(states):
        both = (states @ weight.T).unflatten(-1, (2, 2, 3))  # [batch, state, key or value, head, d_head]
        return tuple(both.permute(2, 0, 3, 1, 4))

    return queries, evicted, evicted.mean(2).requires_grad_(), project


def naive_squares(queries, evicted, compressed, project):
    """Mean square between attention over what was evicted and over what replaces it, one lane."""
    results = []
    for states in (evicted.flatten(0, 1), compressed):
        keys, values = project(states[None])
        results.append(torch.softmax(queries @ keys[0].transpose(1, 2), dim=-1) @ values[0])
    return (results[0] - results[1]).square().mean(), results[0].square().mean()


def naive_auto_encoding(evicted, compressed, decode):
    """Mean square between what was evicted and what is decoded, one lane."""
    return (decode(compressed) - evicted).square().mean(), evicted.square().mean()


each_loss = pytest.mark.parametrize("loss", ["attention", "auto-encoding"])


def measured(loss, counts):
    """The squares that a loss gives, those of each lane alone, and the compressed states."""
    queries, evicted, compressed, project = random_problem()
    counts = torch.tensor(counts)
    decoder = Decoder(6, 3).double()
    torch.nn.init.normal_(decoder.weight, generator=torch.Generator().manual_seed(3))
    if loss == "attention":
        squares = attention_reconstruction(queries, project(evicted.flatten(1, 2)), project(compressed), counts=counts)
    else:
        squares = auto_encoding(evicted, compressed, counts=counts, decode=decoder)
    lanes = []
    for b, count in enumerate(counts.tolist()):
        old, new = evicted[b, 4 - count :], compressed[b, 4 - count :]
        naive = (queries[b], old, new, project) if loss == "attention" else (old, new, decoder)
        compare = naive_squares if loss == "attention" else naive_auto_encoding
        lanes.append(compare(*naive) if count else (torch.zeros(()).double(),) * 2)
    return squares, lanes, compressed


@each_loss
@pytest.mark.parametrize("counts", [(4, 4, 4), (0, 2, 4), (0, 0, 1)])
def test_the_loss_is_the_mean_over_lanes_of_what_each_lane_lost(loss, counts):
    (squares, sizes), lanes, _ = measured(loss, counts)
    assert_close(squares, torch.stack([lost for lost, _ in lanes]))
    assert_close(sizes, torch.stack([size for _, size in lanes]))
    mean, error = mean_and_relative(squares, sizes)
    assert_close(mean, squares.sum() / 3)
    assert_close(error, (squares.sum() / sizes.sum()).detach())
    assert not error.requires_grad


@each_loss
def test_a_lane_that_evicted_nothing_adds_nothing_and_no_nan(loss):
    squares, _, compressed = measured(loss, (0, 0, 0))
    mean, error = mean_and_relative(*squares)
    assert (mean, error) == (0, 0)
    (gradient,) = torch.autograd.grad(mean, compressed)
    assert torch.equal(gradient, torch.zeros_like(compressed))


@each_loss
def test_only_the_real_groups_take_gradient(loss):
    (squares, _), _, compressed = measured(loss, (0, 1, 3))
    (gradient,) = torch.autograd.grad(squares.sum(), compressed)
    # One state alone has weight 1 whatever its key, so its value carries the gradient.
    assert gradient.ne(0).any(2).tolist() == [[False] * 4, [False] * 3 + [True], [False] + [True] * 3]


def test_what_is_lost_is_nothing_at_a_rate_of_one():
    queries, evicted, compressed, project = random_problem(rate=1)
    counts = torch.tensor([1, 2, 4])
    attended = attention_reconstruction(queries, project(evicted.flatten(1, 2)), project(compressed), counts=counts)
    decoded = auto_encoding(evicted, compressed, counts=counts, decode=Decoder(6, 1).double())
    assert max(attended[0].max(), decoded[0].max()) < 1e-30


@pytest.mark.parametrize("rate", [1, 2, 3])
def test_a_decoder_is_torchs_transposed_convolution_and_starts_by_repeating(rate):
    decoder, compressed = Decoder(6, rate).double(), random_groups(1)[:, :, 0]
    assert torch.equal(decoder(compressed), compressed[:, :, None].expand(-1, -1, rate, -1))
    torch.nn.init.normal_(decoder.weight)
    kernel = decoder.weight.unflatten(0, (rate, 6)).permute(2, 1, 0)  # [in, out, place in the group]
    expected = functional.conv_transpose1d(compressed.transpose(1, 2), kernel, stride=rate)
    assert_close(decoder(compressed).flatten(1, 2), expected.transpose(1, 2))


# --- a function that nothing trains ---


@pytest.mark.parametrize("compression", LEARNED)
def test_a_learned_function_without_a_loss_warns(compression):
    message = f"compression_loss = \"none\": nothing trains the compression function '{compression}', it stays as"
    with pytest.warns(CompressiveWarning, match=message):
        small_model(compression=compression, compression_loss="none")


@pytest.mark.parametrize(
    "fields",
    [
        {"compression": "mean"},
        {"compression": "most-used"},
        {"compressed_length": 0},
        {"compression_loss": "bptt"},
        {"compression_loss": "auto-encoding"},
    ],
    ids=str,
)
def test_no_warning_where_nothing_can_learn_or_something_does(fields):
    small_model(**{"compression_loss": "none", **fields})


class Trained(Compression):
    """A user's function with layers of its own."""

    def __init__(self, config, compression_rate):
        super().__init__(config, compression_rate)
        self.layer = torch.nn.Linear(config.d_model, config.d_model)
        torch.nn.init.eye_(self.layer.weight)
        torch.nn.init.ones_(self.layer.bias)

    def forward(self, evicted):
        return self.layer(evicted.mean(2))


def test_a_function_starts_as_its_own_class_says(monkeypatch):
    monkeypatch.setitem(COMPRESSIONS, "trained", Trained)
    model = CompressiveTransformer(small_config(compression="trained"))
    for block in model.blocks:
        assert torch.equal(block.compression.layer.weight, torch.eye(8))
        assert torch.equal(block.compression.layer.bias, torch.ones(8))
