"""What a configuration is said to cost is what a model built from it has, holds and does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compressive_transformer.cli import main
from compressive_transformer.compression import COMPRESSIONS, Compression
from compressive_transformer.config import ModelConfig
from compressive_transformer.config.toml import to_dict
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate.cost import Cost, describe
from compressive_transformer.memory import SlotLayout
from compressive_transformer.model import CompressiveTransformer
from small import LAYERED, random_tokens, small_config

VARIANTS: dict[str, dict[str, object]] = {
    "span": {},
    "unit": {"compressed_position": "unit"},
    "a rate that divides": {"compression_rate": 2},
    "a rate of more than a segment": {"segment_length": 2, "compression_rate": 5},
    "post-norm": {"norm": "post", "segment_length": 7, "d_ff": 20},
    "mean pooling": {"compression": "mean"},
    "no loss": {"compression_loss": "none"},
    "no compressed memory": {"compressed_length": 0},
    "no memory": {"compressed_length": 0, "memory_length": 0},
    **LAYERED,
}
each_variant = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
some_variants = pytest.mark.parametrize("fields", [VARIANTS[name] for name in ("unit", "post-norm", *LAYERED)])


def counted_by_hand(config: ModelConfig, layer: int) -> tuple[int, int, int]:
    """Multiply-adds of a segment: reading, positions, compression loss; product by product."""
    d, n = config.d_model, config.segment_length
    n_m, n_cm, c = config.of_layer(layer)
    waiting = max((k * n - n_m) % c for k in range(c)) if n_cm else 0
    groups = (waiting + n) // c if n_cm else 0
    step = min(c, n) if n_cm and config.compressed_position == "span" else 1
    queries = -(-n // step) * step
    recent, slots = n_m + waiting, n_cm + n_m + waiting + n
    rows = recent + queries + 1
    compressed_rows = queries // step + n_cm - 1 if n_cm else 0
    reading = n * d * d + slots * d * 2 * d + n * d * d  # queries, keys and values, output
    reading += 2 * queries * slots * d  # scores by content, mixing of values
    reading += queries * (rows + compressed_rows) * d  # scores by position
    reading += 2 * n * d * config.d_ff
    learned = config.compression == "conv"
    if learned:
        reading += groups * c * d * d
    positions = (rows + step * compressed_rows) * d * d
    loss = 0
    if groups and learned and config.compression_loss == "attention":  # Algorithm 2; reading has projected all else
        loss = groups * d * 2 * d + 2 * n * groups * (c + 1) * d
    return reading, positions, loss


@each_variant
def test_multiply_adds_equal_a_count_by_hand(fields: dict[str, Any]) -> None:
    config = small_config(**fields)
    description = describe(config)
    for layer, cost in enumerate(description.layers):
        per_token = (cost.multiply_adds, cost.position_multiply_adds, cost.loss_multiply_adds)
        expected = counted_by_hand(config, layer)
        assert [config.segment_length * value for value in per_token] == pytest.approx(expected, abs=1e-6)
    assert description.outside.multiply_adds == config.d_model * config.vocab_size


@some_variants
def test_multiply_adds_are_those_of_a_real_model_on_a_cpu(fields: dict[str, Any]) -> None:
    # Without the compression loss: PyTorch's counter does not know the fused attention that it uses on a CPU.
    config = small_config(**fields)
    model, lanes = CompressiveTransformer(config), 3
    tokens = random_tokens(lanes, 4 * config.segment_length)
    with torch.no_grad():
        memory = model(tokens[:, : -config.segment_length]).memory
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, -config.segment_length :], memory)
    total = describe(config).total
    per_token = total.multiply_adds * lanes + total.position_multiply_adds  # lanes of one age share positions
    assert counter.get_total_flops() == pytest.approx(2 * config.segment_length * per_token)


@some_variants
def test_parameters_and_bytes_are_those_of_a_real_model(fields: dict[str, Any]) -> None:
    config = small_config(**fields)
    model, description = CompressiveTransformer(config), describe(config)
    named = dict(model.named_parameters())
    own = {name for name in named if ".compression." in name}
    assert description.total.compression_parameters == sum(named[name].numel() for name in own)
    assert description.total.parameters == sum(p.numel() for name, p in named.items() if name not in own)
    # Up to the last state of a segment, whose commit empties the pending ones.
    memory = model(random_tokens(1, 3 * config.segment_length - 1)).memory
    one = config.d_model * 4
    for layer, cost in enumerate(description.layers):
        states = (memory.layers[layer].compressed, memory.layers[layer].recent, memory.layers[layer].pending)
        assert cost.memory_bytes == sum(tier.nbytes for tier in states) + one
        layout = SlotLayout.of(config, layer)
        assert cost.memory_bytes == one * (layout.compressed_length + layout.recent_length + layout.segment_length)


def test_a_total_is_a_sum_and_of_widths_the_mean() -> None:
    config = small_config(n_layers=3, memory_length=(0, 5, 9), compressed_length=(0, 3, 0))
    description = describe(config)
    assert [cost.attention_width for cost in description.layers] == [4, 4 + 5 + 3, 4 + 9]
    assert [cost.temporal_range for cost in description.layers] == [0, 5 + 3 * 3, 9]
    total = description.total
    assert (total.attention_width, total.temporal_range) == (config.attention_width, config.temporal_range)
    parts = (*description.layers, description.outside)
    assert total.parameters == sum(part.parameters for part in parts)
    assert total.multiply_adds == sum(part.multiply_adds for part in parts)
    assert description.outside == Cost(parameters=11 * 8 + 2 * 8, multiply_adds=11 * 8)


def test_equal_layers_share_a_row() -> None:
    text = str(describe(small_config(n_layers=12, memory_length=(5,) * 9 + (0, 5, 5))))
    rows = [line.split() for line in text.splitlines()]
    assert [row[:2] for row in rows[4:7]] == [["0-8", "5"], ["9", "0"], ["10-11", "5"]]
    assert [row[0] for row in rows[7:9]] == ["outside", "total"]
    assert rows[8][1] == "11.6"  # (11 · 12 + 7) / 12
    assert all(len(line) <= 120 for line in text.splitlines())


def test_a_table_is_json_with_the_sizes_and_costs_of_each_layer() -> None:
    config = small_config(memory_length=(0, 5))
    description = describe(config)
    table = json.loads(json.dumps(description.to_dict(), allow_nan=False))
    assert table == description.to_dict()
    assert table["model"] == to_dict(config)
    assert [layer["memory_length"] for layer in table["layers"]] == [0, 5]
    assert table["layers"][1]["attention_width"] == description.layers[1].attention_width
    assert table["total"]["memory_bytes"] == description.total.memory_bytes


class Curious(Compression):
    def forward(self, evicted: torch.Tensor) -> torch.Tensor:
        return evicted.mean(2) if evicted.sum() > 0 else evicted.amax(2)


def test_a_compression_function_that_needs_numbers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPRESSIONS, "curious", Curious)
    with pytest.raises(CompressiveError, match=r"^compression = 'curious' does not run on PyTorch's meta device"):
        describe(small_config(compression="curious"))
    with pytest.raises(CompressiveError, match=r"^compression \('zip'\) is not a registered"):
        describe(small_config(compression="zip"))


# --- the command ---


Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `compressive describe` in this process; gives what it exits with, and what it prints where."""

    def run(*arguments: str | Path) -> tuple[object, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["compressive", "describe", *map(str, arguments)])
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    sizes = (
        "d_model = 8\nn_layers = 2\nn_heads = 2\nsegment_length = 4\nmemory_length = [1, 5]\ncompressed_length = 3\n"
    )
    path.write_text(f"[model]\n{sizes}[train]\nsteps = 3\n", encoding="utf-8")
    return path


SIZES = ModelConfig(vocab_size=257, d_model=8, n_layers=2, n_heads=2, segment_length=4, compressed_length=3)


def test_describe_assumes_bytes_where_a_recipe_has_no_vocabulary(command: Run, toml: Path) -> None:
    code, out, err = command(toml)
    assert (code, out) == (0, f"{describe(replace(SIZES, memory_length=(1, 5)))}\n")
    assert err == "vocab_size is not given: 257 assumed, as for bytes\n"
    assert out.startswith("2 layers, d_model 8, segments of 4 tokens, 257 token ids\n")


def test_settings_lie_over_the_file_and_json_has_everything(command: Run, toml: Path) -> None:
    options = ["--set", "model.memory_length=6", "--set", "model.vocab_size=90", "--set", "model.compression=max"]
    code, out, err = command(toml, *options, "--json")
    expected = describe(replace(SIZES, vocab_size=90, memory_length=6, compression="max"))
    assert (code, json.loads(out), err) == (0, expected.to_dict(), "")


def test_a_run_is_described_by_its_folder(command: Run, finished: Path) -> None:
    sizes = json.loads((finished / "config.json").read_text(encoding="utf-8"))["model"]
    assert command(finished) == (0, f"{describe(ModelConfig(**sizes))}\n", "")
    changed = describe(ModelConfig(**{**sizes, "memory_length": (1, 20)}))
    assert command(finished, "--set", "model.memory_length=[1,20]") == (0, f"{changed}\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "model.memory_length=[1,2,3]"], "model: memory_length ([1, 2, 3]) must be one number, or a list"),
        (["--set", "model.n_layer=3"], "model: unknown field 'n_layer'; did you mean n_layers?"),
        (["--set", "model.compression=zip"], "compression ('zip') is not a registered compression function"),
        (["--set", "train.steps=3"], "--set train.steps=3: expected model.FIELD=VALUE, for example"),
    ],
)
def test_what_cannot_be_described_is_refused_in_one_line(
    command: Run, toml: Path, options: list[str], message: str
) -> None:
    code, out, _ = command(toml, *options)
    assert str(code).startswith(f"compressive: {message}")
    assert out == ""


def test_a_file_or_run_that_is_not_there_is_refused(command: Run, tmp_path: Path) -> None:
    assert "none.toml: not a readable TOML file" in str(command(tmp_path / "none.toml")[0])
    assert "config.json: no such file" in str(command(tmp_path)[0])
