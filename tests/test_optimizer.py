"""The schedule is the paper's, and the network and f_c never touch one another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compressive_transformer.config import TrainConfig
from compressive_transformer.model import CompressiveTransformer
from compressive_transformer.train.optimizer import Optimizer, Update, scheduled, steps_per_update
from runs import tiny_model

CONFIG = TrainConfig(steps=100, warmup_steps=20, learning_rate=1e-2, min_learning_rate=1e-4)


def give_gradients(model: CompressiveTransformer, *, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


def updated(model: CompressiveTransformer, steps: int = 3, **training: Any) -> list[Update]:
    """The model after a few updates with gradients of very different sizes, which a clip makes equal."""
    optimizer = Optimizer(model, TrainConfig(**{"learning_rate": 1e-2, "warmup_steps": 0, **training}))
    updates = []
    for step in range(1, steps + 1):
        give_gradients(model, seed=step, size=10.0**-step)
        updates.append(optimizer.step(step))
    return updates


def halves(model: CompressiveTransformer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters of the network, and of the compression functions."""
    named = dict(model.named_parameters())
    own = {name: value for name, value in named.items() if ".compression." in name}
    return {name: value for name, value in named.items() if name not in own}, own


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[bool]:
    return [torch.equal(one[name], other[name]) for name in one]


# --- the schedule ---


def test_the_rate_rises_linearly_to_its_peak_at_the_end_of_warmup() -> None:
    for step in range(1, 21):
        assert scheduled(CONFIG, step, 1e-2) == pytest.approx(1e-4 + (1e-2 - 1e-4) * step / 20)
    assert scheduled(CONFIG, 20, 1e-2) == pytest.approx(1e-2)
    assert max(scheduled(CONFIG, step, 1e-2) for step in range(1, 101)) == scheduled(CONFIG, 20, 1e-2)


def test_a_cosine_decays_the_rate_to_the_minimum_at_the_last_step() -> None:
    rates = [scheduled(CONFIG, step, 1e-2) for step in range(20, 101)]
    assert rates == sorted(rates, reverse=True)
    assert rates[40] == pytest.approx((1e-2 + 1e-4) / 2)  # half way
    assert rates[20] == pytest.approx(1e-4 + (1e-2 - 1e-4) * (2 + 2**0.5) / 4)  # a quarter: 45 degrees
    assert rates[-1] == pytest.approx(1e-4)


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 1), (10, 0), (10, 10)])
def test_warmup_may_be_nothing_or_all(steps: int, warmup_steps: int) -> None:
    config = TrainConfig(steps=steps, warmup_steps=warmup_steps, learning_rate=1e-2)
    rates = [scheduled(config, step, 1e-2) for step in range(1, steps + 1)]
    assert all(1e-6 <= rate <= 1e-2 for rate in rates)
    assert rates == sorted(rates, reverse=warmup_steps < steps)
    assert rates[-1] == pytest.approx(1e-2 if warmup_steps == steps else 1e-6)


def test_a_peak_below_the_minimum_is_never_exceeded() -> None:
    assert {scheduled(CONFIG, step, 0.0) for step in (1, 10, 20, 50, 100)} == {0.0}
    assert {scheduled(CONFIG, step, 5e-5) for step in (1, 10, 20, 50, 100)} == {5e-5}


def test_both_halves_have_one_schedule_with_different_peaks() -> None:
    model = tiny_model()
    config = TrainConfig(steps=10, warmup_steps=4, learning_rate=1e-2, compression_learning_rate=1e-3)
    optimizer = Optimizer(model, config)
    give_gradients(model, seed=0)
    update = optimizer.step(7)
    network, own = halves(model)
    rates = {id(p): group["lr"] for group in optimizer.adam.param_groups for p in group["params"]}
    assert {rates[id(p)] for p in network.values()} == {scheduled(config, 7, 1e-2)} == {update.learning_rate}
    assert {rates[id(p)] for p in own.values()} == {scheduled(config, 7, 1e-3)}


@pytest.mark.parametrize(
    ("settings", "periods"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"steps_per_update": 2}, [2, 2, 2, 2, 2, 2]),
        ({"late_steps_per_update": 4}, [1, 1, 1, 1, 1, 1]),  # step 0 stands for never
        ({"late_steps_per_update": 4, "late_update_step": 4}, [1, 1, 1, 4, 4, 4]),
        ({"steps_per_update": 3, "late_steps_per_update": 1, "late_update_step": 1}, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_update_period_changes_at_its_step(settings: dict[str, int], periods: list[int]) -> None:
    assert [steps_per_update(TrainConfig(**settings), step) for step in range(1, 7)] == periods


# --- groups ---


def test_every_parameter_is_in_one_group() -> None:
    model = tiny_model(compressed_position="unit")
    groups = Optimizer(model, TrainConfig()).adam.param_groups
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(members) == len(set(members))
    assert set(members) == {id(parameter) for parameter in model.parameters()}


def test_without_gradient_matrices_decay_and_vectors_do_not() -> None:
    model, start = tiny_model(), tiny_model()
    with torch.no_grad():
        for one, other in zip(model.parameters(), start.parameters(), strict=True):
            other.copy_(one.add_(1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    config = TrainConfig(
        steps=4,
        warmup_steps=4,
        learning_rate=0.5,
        weight_decay=0.1,
        compression_learning_rate=0.25,
        compression_weight_decay=0.2,
    )
    Optimizer(model, config).step(4)
    for (name, one), other in zip(model.named_parameters(), start.parameters(), strict=True):
        share = (
            0.25 * 0.2 if ".compression." in name else 0.5 * 0.1 if one.ndim > 1 and not name.endswith("_bias") else 0.0
        )
        torch.testing.assert_close(one, (1 - share) * other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("setting", ["max_grad_norm", "weight_decay"])
def test_a_setting_of_one_half_never_changes_the_other(setting: str) -> None:
    plain, network, own = tiny_model(), tiny_model(), tiny_model()
    updated(plain)
    updated(network, **{setting: 0.05})
    updated(own, **{f"compression_{setting}": 0.05})
    for changed, half in ((network, 0), (own, 1)):
        assert not any(same(halves(changed)[half], halves(plain)[half])) or setting == "weight_decay"
        assert not all(same(halves(changed)[half], halves(plain)[half]))
        assert all(same(halves(changed)[1 - half], halves(plain)[1 - half]))


def test_each_half_is_clipped_to_its_norm_and_reports_the_norm_before() -> None:
    model = tiny_model()
    optimizer = Optimizer(model, TrainConfig(max_grad_norm=0.5, compression_max_grad_norm=0.25))
    seen: list[float] = []

    def measure(*_: object) -> None:
        for half in halves(model):
            seen.append(float(torch.cat([p.grad.flatten() for p in half.values()]).norm()))

    optimizer.adam.register_step_pre_hook(measure)
    give_gradients(model, seed=0)
    before = [float(torch.cat([p.grad.flatten() for p in half.values()]).norm()) for half in halves(model)]
    update = optimizer.step(1)
    assert list(update.to_dict().values())[1:] == pytest.approx(before)
    assert seen == pytest.approx([0.5, 0.25], rel=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_below_the_clip_stay_as_they_are() -> None:
    one, other = tiny_model(), tiny_model()
    updated(one, max_grad_norm=1e6, compression_max_grad_norm=1e6)
    updated(other, max_grad_norm=1e9, compression_max_grad_norm=1e9)
    assert all(same(dict(one.named_parameters()), dict(other.named_parameters())))


def test_a_compression_function_without_parameters_needs_no_group() -> None:
    model = tiny_model(compression="mean")
    assert [update.compression_gradient_norm for update in updated(model)] == [0.0] * 3
    assert len(Optimizer(model, TrainConfig()).adam.param_groups) == 2


# --- Muon ---


def test_muon_updates_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    model = tiny_model(compression_loss="auto-encoding", compressed_position="unit")
    optimizer = Optimizer(model, TrainConfig(optimizer="muon"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    muon, adam = (
        {names[p] for group in optimizer.optimizers[kind].param_groups for p in group["params"]}
        for kind in ("muon", "adam")
    )
    parts = ("query", "key_value", "output", "position", "compressed_position")
    assert muon == {
        f"blocks.{layer}.{part}.weight"
        for layer in range(2)
        for part in (*(f"attention.{name}" for name in parts), "feed_forward.0", "feed_forward.2")
    }
    assert adam == set(names.values()) - muon
    assert {"embedding.weight", "blocks.0.compression.weight", "blocks.0.compression_decoder.weight"} <= adam
    assert set(Optimizer(model, TrainConfig()).optimizers) == {"adam"}


def test_an_update_with_muon_is_that_of_both_optimizers_called_by_hand() -> None:
    model, other = tiny_model(), tiny_model()
    config = TrainConfig(
        optimizer="muon",
        steps=9,
        warmup_steps=0,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=1e9,
        compression_max_grad_norm=1e9,
    )
    optimizer, named = Optimizer(model, config), dict(other.named_parameters())
    hidden = [
        p
        for name, p in named.items()
        if p.ndim == 2 and ("attention." in name or "feed_forward." in name) and not name.endswith("_bias")
    ]
    own = [p for name, p in named.items() if ".compression." in name]
    vectors = [p for name, p in named.items() if p.ndim == 1 or name.endswith("_bias")]
    by_hand = [
        torch.optim.Muon(hidden, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([named["embedding.weight"]], betas=(0.9, 0.98), weight_decay=0.1),
        torch.optim.AdamW(vectors, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.AdamW(own, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for step in (1, 2):
        give_gradients(model, seed=step)
        give_gradients(other, seed=step)
        optimizer.step(step)
        for at, one in enumerate(by_hand):
            for group in one.param_groups:
                group["lr"] = scheduled(config, step, config.compression_learning_rate if at == 3 else 1e-2)
            one.step()
    for (name, one), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("setting", ["learning_rate", "max_grad_norm", "weight_decay"])
def test_with_muon_a_setting_of_one_half_never_changes_the_other(setting: str) -> None:
    plain, network, own = tiny_model(), tiny_model(), tiny_model()
    updated(plain, optimizer="muon")
    updated(network, optimizer="muon", **{setting: 0.05})
    updated(own, optimizer="muon", **{f"compression_{setting}": 0.05})
    for changed, half in ((network, 0), (own, 1)):
        assert not all(same(halves(changed)[half], halves(plain)[half]))
        assert all(same(halves(changed)[1 - half], halves(plain)[1 - half]))


# --- state ---


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_optimizer_is_restored_to_the_bit(kind: Any) -> None:
    model, other = tiny_model(), tiny_model()
    config = replace(CONFIG, optimizer=kind)
    optimizer = Optimizer(model, config)
    for step in (1, 2):
        give_gradients(model, seed=step)
        optimizer.step(step)
    give_gradients(model, seed=3)  # of an update that is not complete
    tensors = {**optimizer.state(), **optimizer.gradients()}
    copied = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    other.load_state_dict(model.state_dict())
    restored = Optimizer(other, config)
    restored.restore(copied)
    for step in (3, 4):
        assert optimizer.step(step) == restored.step(step)
        give_gradients(model, seed=step + 1)
        give_gradients(other, seed=step + 1)
    assert all(same(dict(other.named_parameters()), dict(model.named_parameters())))


def test_the_state_has_a_name_for_each_tensor_of_each_parameter() -> None:
    model = tiny_model()
    optimizer = Optimizer(model, CONFIG)
    assert (optimizer.state(), optimizer.gradients()) == ({}, {})
    give_gradients(model, seed=0)
    names = [name for name, _ in model.named_parameters()]
    assert list(optimizer.gradients()) == [f"gradient.{name}" for name in names]
    optimizer.step(1)
    assert optimizer.gradients() == {}
    expected = {f"adam.{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in names}
    assert set(optimizer.state()) == expected
