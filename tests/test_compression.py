"""Compression functions do what their names say; their loss is that of Algorithm 2."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from compressive_transformer.compression import (
    COMPRESSIONS,
    Compression,
    Convolution,
    MaxPool,
    MeanPool,
    attention_reconstruction,
    build_compression,
)
from compressive_transformer.errors import CompressiveError
from small import assert_close


def random_groups(rate, *, batch=2, groups=5, d_model=6):
    return torch.randn(batch, groups, rate, d_model, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("rate", [1, 2, 3, 5])
@pytest.mark.parametrize("name", sorted(COMPRESSIONS))
def test_each_group_becomes_one_state_and_depends_on_no_other_group(name, rate):
    compression, evicted = build_compression(name, 6, rate).double(), random_groups(rate)
    compressed = compression(evicted)
    assert compressed.shape == (2, 5, 6)
    assert_close(compressed, torch.stack([compression(group[:, None])[:, 0] for group in evicted.unbind(1)], 1))


@pytest.mark.parametrize("rate", [1, 2, 3, 5])
def test_pooling_is_that_of_torch_with_kernel_and_stride_c(rate):
    evicted = random_groups(rate)
    channels_first = evicted.flatten(1, 2).transpose(1, 2)
    for kind, pool in ((MeanPool, functional.avg_pool1d), (MaxPool, functional.max_pool1d)):
        assert_close(kind(6, rate)(evicted), pool(channels_first, rate, rate).transpose(1, 2))


@pytest.mark.parametrize("rate", [1, 2, 3, 5])
def test_a_convolution_is_that_of_torch_with_kernel_and_stride_c(rate):
    compression, evicted = Convolution(6, rate).double(), random_groups(rate)
    torch.nn.init.normal_(compression.weight)
    kernel = compression.weight.unflatten(1, (rate, 6)).transpose(1, 2)  # [out, in, place in the group]
    expected = functional.conv1d(evicted.flatten(1, 2).transpose(1, 2), kernel, stride=rate)
    assert_close(compression(evicted), expected.transpose(1, 2))


@pytest.mark.parametrize("rate", [1, 2, 3, 4])
def test_a_convolution_starts_as_the_mean(rate):
    evicted = random_groups(rate)
    assert_close(Convolution(6, rate).double()(evicted), MeanPool(6, rate)(evicted), 1e-7)  # 1 / 3 in float32


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(CompressiveError, match=r"compression \('sum'\) is not .*known: mean, max, conv. Register"):
        build_compression("sum", 6, 3)


def test_a_subclass_without_forward_says_so():
    class Empty(Compression):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty must define forward\(evicted\)"):
        Empty(6, 3)(random_groups(3))


# --- attention reconstruction ---


def random_problem(rate=3, groups=4):
    """Queries, evicted groups, their mean, and a projection to two heads of keys and values."""
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(3, 2, 5, 3, generator=generator).double()
    evicted = random_groups(rate, batch=3, groups=groups)
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


@pytest.mark.parametrize("counts", [(4, 4, 4), (0, 2, 4), (0, 0, 1)])
def test_the_loss_is_the_mean_over_lanes_of_what_each_lane_lost(counts):
    queries, evicted, compressed, project = random_problem()
    loss, error = attention_reconstruction(queries, evicted, compressed, counts=torch.tensor(counts), project=project)
    lanes = [
        naive_squares(queries[b], evicted[b, -count:], compressed[b, -count:], project)
        for b, count in enumerate(counts)
        if count
    ]
    assert_close(loss, sum(squares for squares, _ in lanes) / 3)
    assert_close(error, (sum(squares for squares, _ in lanes) / sum(size for _, size in lanes)).detach())
    assert not error.requires_grad


def test_a_lane_that_evicted_nothing_adds_nothing_and_no_nan():
    queries, evicted, compressed, project = random_problem()
    loss, error = attention_reconstruction(
        queries, evicted, compressed, counts=torch.tensor([0, 0, 0]), project=project
    )
    assert (loss, error) == (0, 0)
    (gradient,) = torch.autograd.grad(loss, compressed)
    assert torch.equal(gradient, torch.zeros_like(compressed))


def test_only_the_real_groups_take_gradient():
    queries, evicted, compressed, project = random_problem()
    counts = torch.tensor([0, 1, 3])
    loss, _ = attention_reconstruction(queries, evicted, compressed, counts=counts, project=project)
    (gradient,) = torch.autograd.grad(loss, compressed)
    # One state alone has weight 1 whatever its key, so its value carries the gradient.
    assert gradient.ne(0).any(2).tolist() == [[False] * 4, [False] * 3 + [True], [False] + [True] * 3]


def test_what_is_lost_is_nothing_at_a_rate_of_one():
    queries, evicted, compressed, project = random_problem(rate=1)
    loss, error = attention_reconstruction(
        queries, evicted, compressed, counts=torch.tensor([1, 2, 4]), project=project
    )
    assert max(loss, error) < 1e-30
