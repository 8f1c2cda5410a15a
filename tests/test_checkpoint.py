"""What is saved comes back to the bit, and what is damaged, foreign or pickled is refused by name."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressive_transformer.checkpoint import load, load_tensors, read_json, save, save_tensors, write_json
from compressive_transformer.data.tokenizers import ByteTokenizer, train_bpe
from compressive_transformer.errors import CompressiveError
from compressive_transformer.files import atomic_file
from compressive_transformer.model import CompressiveTransformer
from runs import tiny_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(tmp_path / "run", tiny_model(), ByteTokenizer())
    return tmp_path / "run"


def assert_same_model(actual: CompressiveTransformer, expected: CompressiveTransformer) -> None:
    assert actual.config == expected.config
    state = expected.state_dict()
    assert list(actual.state_dict()) == list(state)
    for name, tensor in actual.state_dict().items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name]), name


# --- what comes back ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"compressed_position": "unit", "norm": "post"},
        {"compressed_length": 0},
        {"compression": "conv", "compressed_length": (4, 0), "memory_length": (0, 9), "compression_rate": (2, 5)},
        {"position": "rotary"},
    ],
)
def test_a_model_comes_back_to_the_bit_and_ready_to_evaluate(
    tmp_path: Path, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    model = tiny_model(dropout=0.1, **fields).to(dtype)
    save(tmp_path / "many/runs/one", model, ByteTokenizer())
    loaded, tokenizer = load(str(tmp_path / "many/runs/one"))
    assert_same_model(loaded, model)
    assert isinstance(tokenizer, ByteTokenizer)
    assert not any(module.training for module in loaded.modules())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    tokens = torch.arange(40)[None]
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


def test_a_tokenizer_comes_back_with_its_model(tmp_path: Path) -> None:
    tokenizer = train_bpe(["the cat sat on the mat"] * 3, 262)
    save(tmp_path / "run", tiny_model(vocab_size=tokenizer.vocab_size), tokenizer)
    loaded = load(tmp_path / "run")[1]
    assert loaded.to_json() == tokenizer.to_json()


def test_a_run_is_three_files_that_others_can_read(run: Path) -> None:
    assert sorted(file.name for file in run.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert load_file(run / "model.safetensors").keys() == tiny_model().state_dict().keys()
    table = json.loads((run / "config.json").read_text())
    assert table["format"] == 1
    assert table["model"]["segment_length"] == 8


def test_a_config_from_before_rotary_positions_is_one_of_relative_ones(run: Path) -> None:
    table = json.loads((run / "config.json").read_text())
    assert table["model"].pop("position") == "relative"
    (run / "config.json").write_text(json.dumps(table))
    assert_same_model(load(run)[0], tiny_model())


def test_saving_again_replaces_what_was_there(run: Path) -> None:
    other = tiny_model(seed=1, memory_length=20)
    loaded, _ = load(run)
    before = loaded.embedding.weight.clone()
    save(run, other, ByteTokenizer())
    assert_same_model(load(run)[0], other)
    assert torch.equal(loaded.embedding.weight, before)  # what was loaded does not change under its user


def test_a_loaded_model_can_be_trained_and_saved_in_its_place(run: Path) -> None:
    model, tokenizer = load(run)
    with torch.no_grad():
        model.embedding.weight.add_(1)
    save(run, model, tokenizer)
    assert_same_model(load(run)[0], model)


# --- what is refused ---


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        table = json.loads((run / "config.json").read_text())
        table["model"].update(changes)
        (run / "config.json").write_text(json.dumps(table))

    return change


def changed_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        tensors = {name: value.clone() for name, value in load_file(run / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, run / "model.safetensors")

    return damage


def cut(name: str, keep: float) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: int(len(content) * keep)])

    return damage


class Harmful:
    """What runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("something was unpickled",))


def write_pickled(run: Path) -> None:
    (run / "model.safetensors").write_bytes(pickle.dumps(Harmful()))


BIAS = "final_norm.bias"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, r"run: no such folder; expected a run that `compressive train` wrote"),
    "no config": (lambda run: (run / "config.json").unlink(), r"config\.json: no such file"),
    "no weights": (lambda run: (run / "model.safetensors").unlink(), r"model\.safetensors: no such file"),
    "no tokenizer": (lambda run: (run / "tokenizer.json").unlink(), r"no tokenizer at .*tokenizer\.json"),
    "weights cut": (cut("model.safetensors", 0.9), r"model\.safetensors: not a readable safetensors file"),
    "header cut": (cut("model.safetensors", 0.01), r"model\.safetensors: not a readable safetensors file"),
    "weights empty": (cut("model.safetensors", 0), r"model\.safetensors: not a readable safetensors file"),
    "weights garbage": (
        lambda run: (run / "model.safetensors").write_bytes(bytes(range(256)) * 99),
        r"model\.safetensors: not a readable safetensors file",
    ),
    "weights pickled": (write_pickled, r"model\.safetensors: not a readable safetensors file"),
    "other shape": (
        changed_tensors(lambda tensors: tensors.update({BIAS: torch.zeros(15)})),
        r"model\.safetensors: tensor 'final_norm\.bias' has shape \[15\], the config says \[16\]",
    ),
    "other config": (
        changed_config(d_ff=32),
        r"model\.safetensors: tensor .* has shape .*, the config says .*32",
    ),
    "missing tensor": (
        changed_tensors(lambda tensors: tensors.pop(BIAS)),
        r"model\.safetensors: tensor 'final_norm\.bias' is missing",
    ),
    "extra tensor": (
        changed_tensors(lambda tensors: tensors.update(more=torch.zeros(1))),
        r"model\.safetensors: unknown tensor 'more'",
    ),
    "integers": (
        changed_tensors(lambda tensors: tensors.update({BIAS: torch.zeros(16, dtype=torch.int64)})),
        r"model\.safetensors: tensors are F32, I64",
    ),
    "two precisions": (
        changed_tensors(lambda tensors: tensors.update({BIAS: torch.zeros(16, dtype=torch.float64)})),
        r"model\.safetensors: tensors are F32, F64",
    ),
    "config cut": (cut("config.json", 0.5), r"config\.json: not a readable JSON file"),
    "config not UTF-8": (
        lambda run: (run / "config.json").write_bytes(b"\xff"),
        r"config\.json: not a readable JSON file",
    ),
    "config deep": (
        lambda run: (run / "config.json").write_text("[" * 100_000),
        r"config\.json: not a readable JSON file",
    ),
    "config a list": (
        lambda run: (run / "config.json").write_text("[]"),
        r"config\.json: expected a JSON object, got list",
    ),
    "no model": (
        lambda run: (run / "config.json").write_text('{"format": 1}'),
        r"config\.json: expected a table 'model'",
    ),
    "no format": (lambda run: (run / "config.json").write_text("{}"), r"config\.json: format None is unknown"),
    "later format": (
        lambda run: (run / "config.json").write_text('{"format": 2}'),
        r"config\.json: format 2 is unknown to this version, which reads format 1",
    ),
    "unknown key": (
        changed_config(memory_lenght=3),
        r"config\.json: unknown field 'memory_lenght'; did you mean memory_length\?",
    ),
    "impossible size": (changed_config(n_heads=3), r"config\.json: n_heads \(3\) must divide d_model \(16\)"),
    "wrong type": (changed_config(d_model="16"), r"config\.json: d_model \('16'\) must be of type int"),
    "unknown compression": (changed_config(compression="zip"), r"compression \('zip'\) is not a registered"),
    "tokenizer damaged": (cut("tokenizer.json", 0.5), r"tokenizer\.json is not a tokenizer\.json"),
    "other tokenizer": (
        lambda run: train_bpe(["abc abc"], 258).save(run / "tokenizer.json"),
        r"tokenizer\.json has 258 ids, the model 257; these files do not belong together",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_refused_in_one_line_with_the_file_named(run: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(run)
    with pytest.raises(CompressiveError, match=message) as caught:
        load(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pkl"])
def test_pickled_weights_are_never_opened(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(CompressiveError, match=rf"model\{suffix}: pickled weights are never loaded"):
        load(path)


# --- whole or not at all ---


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_failed_write_leaves_the_earlier_file_and_nothing_else(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")
    expected = CompressiveError if isinstance(failure, OSError) else type(failure)

    def write_half() -> None:
        with atomic_file(path) as temporary:
            temporary.write_text("half of what")
            raise failure

    with pytest.raises(expected):
        write_half()
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_seen_only_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")
    with atomic_file(path) as temporary:
        temporary.write_text("later")
        assert path.read_text() == "earlier"
    assert path.read_text() == "later"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_leaves_the_earlier_model(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    files = sorted(run.iterdir())
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(CompressiveError, match=r"cannot write .*: No space left on device"):
        save(run, tiny_model(seed=1), ByteTokenizer())
    with pytest.raises(CompressiveError, match=r"cannot write .*model\.safetensors: No space left on device"):
        save_tensors(run / "model.safetensors", tiny_model(seed=1).state_dict())
    assert sorted(run.iterdir()) == files
    assert_same_model(load(run)[0], tiny_model())


def test_tensors_that_cannot_be_written_are_an_error_with_the_file_named(tmp_path: Path) -> None:
    with pytest.raises(CompressiveError, match=r"none/x\.safetensors"):
        save_tensors(tmp_path / "none/x.safetensors", {"a": torch.zeros(2)})
    assert not list(tmp_path.iterdir())


def test_tensors_and_tables_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).view(2, 3).T, "b": torch.ones((), dtype=torch.bool), "c": torch.zeros(0, 3)}
    save_tensors(tmp_path / "x.safetensors", tensors)
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    table = {"ä": [1, 2.5, None], "nested": {"x": "\u2028"}}
    write_json(tmp_path / "x.json", table)
    assert read_json(tmp_path / "x.json") == table
