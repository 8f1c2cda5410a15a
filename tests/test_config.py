"""Configurations say what was wrong with which field, and what would be right."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings

from compressive_transformer.config import ModelConfig, TrainConfig
from compressive_transformer.config.toml import RENAMED, from_mapping, read_settings, to_dict, upgrade
from compressive_transformer.errors import CompressiveError
from small import configs, law


def refuses(message):
    return pytest.raises(CompressiveError, match=message)


# --- fields ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, r"^vocab_size \(0\) must be 1 or more$"),
        ({"segment_length": 0}, r"^segment_length \(0\) must be 1 or more$"),
        ({"compression_rate": 0}, r"^compression_rate \(0\) must be 1 or more$"),
        ({"n_layers": -2}, r"^n_layers \(-2\) must be 1 or more$"),
        ({"memory_length": -1}, r"^memory_length \(-1\) must be 0 or more$"),
        ({"compressed_length": -1}, r"^compressed_length \(-1\) must be 0 or more$"),
        ({"dropout": -0.1}, r"^dropout \(-0.1\) must be 0 or more$"),
        ({"dropout": 1.0}, r"^dropout \(1.0\) must be in \[0, 1\)$"),
        ({"dropout": math.nan}, r"^dropout \(nan\) must be 0 or more$"),
        (
            {"d_model": 64, "n_heads": 7},
            r"n_heads \(7\) must divide d_model \(64\); the nearest that does is 8",
        ),
        ({"d_model": 7, "n_heads": 7}, r"^d_model \(7\) must be even"),
        ({"d_model": "64"}, r"^d_model \('64'\) must be of type int$"),
        ({"d_model": 64.0}, r"^d_model \(64.0\) must be of type int$"),
        ({"n_layers": True}, r"^n_layers \(True\) must be of type int$"),
        ({"dropout": "0.1"}, r"^dropout \('0.1'\) must be of type float$"),
        ({"compression": 3}, r"^compression \(3\) must be of type str$"),
        ({"norm": "middle"}, r"^norm \('middle'\) must be 'pre' or 'post'$"),
        ({"position": "absolute"}, r"^position \('absolute'\) must be 'relative' or 'rotary'$"),
        (
            {"d_model": 60, "n_heads": 12, "position": "rotary"},
            r"^d_model / n_heads \(5\) must be even, since position = 'rotary' .* that makes it so is 10$",
        ),
        ({"compressed_position": "mean"}, r"^compressed_position \('mean'\) must be 'span' or 'unit'$"),
        ({"empty_slots": []}, r"^empty_slots \(\[\]\) must be 'masked' or 'zeros'$"),
        (
            {"compression_loss": "task"},
            r"^compression_loss \('task'\) must be 'attention' or 'auto-encoding' or 'bptt' or 'none'$",
        ),
        ({"compression_heads": 0}, r"^compression_heads \(0\) must be 1 or more$"),
        ({"adaptive_cutoffs": 3}, r"^adaptive_cutoffs \(3\) must be a list of int$"),
        ({"adaptive_cutoffs": [3, "4"]}, r"^adaptive_cutoffs \(\[3, '4'\]\) must be a list of int$"),
        ({"adaptive_cutoffs": [0, 4]}, r"^adaptive_cutoffs \(\[0, 4\]\) must rise from 1 on and end below vocab_size"),
        ({"adaptive_cutoffs": [4, 4]}, r"^adaptive_cutoffs \(\[4, 4\]\) must rise"),
        ({"adaptive_cutoffs": [4, 11]}, r"^adaptive_cutoffs \(\[4, 11\]\) must .* below vocab_size \(11\)$"),
        ({"adaptive_factor": 0}, r"^adaptive_factor \(0\) must be 1 or more$"),
        (
            {"d_model": 8, "n_heads": 2, "adaptive_cutoffs": [3, 6]},
            r"^d_model \(8\) leaves no width for the last of 3 clusters, each 4 times narrower: use fewer",
        ),
    ],
    ids=str,
)
def test_an_impossible_model_is_refused_by_field_value_and_limit(fields, message):
    with refuses(message):
        ModelConfig(**{"vocab_size": 11, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, r"^steps \(0\) must be 1 or more$"),
        ({"learning_rate": 0}, r"^learning_rate \(0.0\) must be more than 0$"),
        ({"learning_rate": math.nan}, r"^learning_rate \(nan\) must be more than 0$"),
        ({"max_grad_norm": -1.0}, r"^max_grad_norm \(-1.0\) must be more than 0$"),
        ({"weight_decay": math.inf}, r"^weight_decay \(inf\) must be 0 or more$"),
        ({"seed": -1}, r"^seed \(-1\) must be 0 or more$"),
        ({"seed": 2**63}, r"^seed \(9223372036854775808\) must be less than 2\*\*63$"),
        ({"max_document_length": -1}, r"^max_document_length \(-1\) must be 0 or more$"),
        ({"steps": 10, "warmup_steps": 11}, r"^warmup_steps \(11\) must be at most steps \(10\)$"),
        ({"batch_size": 6, "micro_batches": 4}, r"^micro_batches \(4\) must divide batch_size \(6\)$"),
        ({"bptt_segments": 1}, r"^bptt_segments \(1\) must be 2 or more$"),
        ({"precision": "fp16"}, r"^precision \('fp16'\) must be 'fp32' or 'bf16'$"),
    ],
    ids=str,
)
def test_an_impossible_training_run_is_refused_by_field_value_and_limit(fields, message):
    with refuses(message):
        TrainConfig(**fields)


@pytest.mark.parametrize("kind", [ModelConfig, TrainConfig])
def test_every_field_is_checked_against_its_type(kind):
    for field in dataclasses.fields(kind):
        required = {"vocab_size": 11} if kind is ModelConfig else {}
        with refuses(rf"^{field.name} \(\{{\}}\) must be "):
            kind(**{**required, field.name: {}})


def test_defaults_are_valid_and_an_integer_may_stand_for_a_float():
    config = ModelConfig(vocab_size=256, dropout=0)
    assert (config.dropout, config.d_ff) == (0.0, 2048)
    assert type(config.dropout) is float
    assert TrainConfig(max_grad_norm=1).max_grad_norm == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 8


def test_temporal_range_and_attention_width_are_those_of_section_3_3():
    sizes = {"vocab_size": 2, "d_model": 4, "n_heads": 2, "n_layers": 3, "segment_length": 3}
    config = ModelConfig(**sizes, memory_length=6, compressed_length=6, compression_rate=3)
    assert config.temporal_range == 3 * (6 + 3 * 6)
    assert config.attention_width == 6 + 6 + 3
    # Equal attention cost, twice the range of a Transformer-XL.
    plain = ModelConfig(**sizes, memory_length=12, compressed_length=0, compression_rate=3)
    assert plain.attention_width == config.attention_width
    assert config.temporal_range == 2 * plain.temporal_range


def test_range_is_a_sum_over_layers_and_width_their_mean():
    sizes = {"vocab_size": 2, "d_model": 4, "n_heads": 2, "n_layers": 3, "segment_length": 3}
    config = ModelConfig(**sizes, memory_length=(0, 6, 8), compressed_length=(0, 0, 6), compression_rate=(2, 3, 4))
    assert config.temporal_range == 0 + 6 + 8 + 4 * 6
    assert config.attention_width == 3 + (0 + 6 + 14) / 3
    uniform = ModelConfig(**sizes, memory_length=(5, 5, 5), compressed_length=2, compression_rate=3)
    assert (uniform.attention_width, uniform.temporal_range) == (10, 3 * (5 + 6))
    assert type(uniform.attention_width) is int


# --- one number or one a layer ---


def test_each_layer_has_the_number_that_was_given_for_it_or_for_all():
    config = ModelConfig(
        vocab_size=2, n_layers=3, memory_length=[1, 2, 0], compressed_length=7, compression_rate=(3, 1, 2)
    )
    assert [config.of_layer(layer) for layer in range(3)] == [(1, 7, 3), (2, 7, 1), (0, 7, 2)]
    assert (config.memory_length, config.compressed_length, config.compression_rate) == ((1, 2, 0), 7, (3, 1, 2))
    hash(config)  # a list became a tuple
    with refuses(r"^layer \(3\) must lie in 0 \.\. 2$"):
        config.of_layer(3)


@pytest.mark.parametrize("name", ["memory_length", "compressed_length", "compression_rate"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([4, 5], r"\(\[4, 5\]\) must be one number, or a list with one for each of the n_layers \(3\) layers, not 2$"),
        ((4,), r"\(\(4,\)\) must be one number, or a list with one for each of the n_layers \(3\) layers, not 1$"),
        ([4, True, 4], r"\(\[4, True, 4\]\) must be of type int, or a list with one for each of the n_layers \(3\) l"),
        ([4, 4.0, 4], r"\(\[4, 4.0, 4\]\) must be of type int, or a list "),
        (False, r"\(False\) must be of type int, or a list "),
        ("4,4,4", r"\('4,4,4'\) must be of type int, or a list "),
        (None, r"\(None\) must be of type int, or a list "),
        ([[4], [4], [4]], r"\(\[\[4\], \[4\], \[4\]\]\) must be of type int, or a list "),
        ((4, -1, 4), r"\(\(4, -1, 4\)\) must be [01] or more in each layer$"),
    ],
    ids=str,
)
def test_what_is_neither_one_number_nor_one_a_layer_is_refused(name, value, message):
    with refuses(f"^{name} {message}"):
        ModelConfig(vocab_size=2, n_layers=3, **{name: value})
    if name == "compression_rate":
        with refuses(r"^compression_rate \(\[2, 0, 2\]\) must be 1 or more in each layer$"):
            ModelConfig(vocab_size=2, n_layers=3, compression_rate=[2, 0, 2])


# --- tables ---


@settings(law, max_examples=20)
@given(config=configs)
def test_a_config_is_what_its_table_describes(config):
    assert from_mapping(ModelConfig, to_dict(config), "here") == config
    assert json.loads(json.dumps(to_dict(config))) == to_dict(config)


def test_a_table_holds_one_number_or_a_list_with_one_per_layer():
    table = to_dict(ModelConfig(vocab_size=2, n_layers=2, memory_length=(0, 5), compressed_length=[1, 2]))
    assert (table["memory_length"], table["compressed_length"], table["compression_rate"]) == ([0, 5], [1, 2], 4)


def test_an_unknown_field_is_refused_with_the_nearest_name():
    with refuses(r"^small.toml: unknown field 'memory_lenght'; did you mean memory_length\?$"):
        from_mapping(ModelConfig, {"vocab_size": 2, "memory_lenght": 3}, "small.toml")
    with refuses(r"^here: unknown field 'zzz'; known fields: steps, batch_size, "):
        from_mapping(TrainConfig, {"zzz": 3}, "here")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_means_a_current_field(old, new):
    fields = {field.name for kind in (ModelConfig, TrainConfig) for field in dataclasses.fields(kind)}
    assert new in fields
    assert old not in fields
    assert upgrade({old: 3}) == {new: 3}


def test_an_old_file_is_read_as_a_new_one():
    assert from_mapping(TrainConfig, {"batch": 8, "clip": 0.5}, "old") == TrainConfig(batch_size=8, max_grad_norm=0.5)
    model = from_mapping(ModelConfig, {"vocab_size": 2, "compressed_scale": "matched"}, "old")
    assert model == ModelConfig(vocab_size=2, compressed_scale="rms")


def test_a_missing_field_and_a_wrong_value_are_refused_with_their_place():
    with refuses(r"^here: field 'vocab_size' is missing$"):
        from_mapping(ModelConfig, {}, "here")
    with refuses(r"^here: n_layers \(0\) must be 1 or more$"):
        from_mapping(ModelConfig, {"vocab_size": 2, "n_layers": 0}, "here")


# --- files and overrides ---


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text('[model]\nn_layers = 2\ncompression = "mean"\n[train]\nmax_grad_norm = 0.5\n', encoding="utf-8")
    return path


def test_overrides_lie_over_the_file(toml):
    overrides = ["model.n_layers=3", "model.compression=conv", "train.max_grad_norm=1e-1", "model.norm='a=b'"]
    overrides.append("model.memory_length=[64, 0,128]")
    assert read_settings(toml) == {"model": {"n_layers": 2, "compression": "mean"}, "train": {"max_grad_norm": 0.5}}
    assert read_settings(toml, overrides) == {
        "model": {"n_layers": 3, "compression": "conv", "norm": "'a=b'", "memory_length": [64, 0, 128]},
        "train": {"max_grad_norm": 0.1},
    }


def test_both_tables_are_there_even_if_the_file_is_empty(tmp_path):
    (tmp_path / "empty.toml").touch()
    assert read_settings(tmp_path / "empty.toml", ["train.seed=3"]) == {"model": {}, "train": {"seed": 3}}


@pytest.mark.parametrize("override", ["seed=3", "model.n_layers", "training.seed=3", "=3", ""])
def test_a_malformed_override_is_refused_with_an_example(toml, override):
    with refuses(rf"^--set {override}: expected model.FIELD=VALUE or train.FIELD=VALUE, for example "):
        read_settings(toml, [override])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[model\n", r"not a readable TOML file: .*line 1"),
        (b"\xff\xfe", r"not a readable TOML file: .*utf-8"),
        (
            b"[models]\nn_layers = 2\n",
            r"unknown table or field 'models'; expected tables \[model\] and \[train\]",
        ),
        (b"n_layers = 2\n", r"unknown table or field 'n_layers'; expected tables"),
        (b"model = 2\n", r"unknown table or field 'model'; expected tables"),
    ],
    ids=["syntax", "encoding", "table", "field", "no table"],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path, content, message):
    (tmp_path / "bad.toml").write_bytes(content)
    with refuses(r"bad.toml: " + message):
        read_settings(tmp_path / "bad.toml")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with refuses(r"none.toml: not a readable TOML file: .*No such file"):
        read_settings(tmp_path / "none.toml")
