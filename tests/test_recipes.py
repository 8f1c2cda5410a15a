"""Each recipe builds and takes a step: those of the paper's size without data, their small twins on real text."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from compressive_transformer.config import ModelConfig, TrainConfig
from compressive_transformer.config.toml import from_mapping, read_settings
from compressive_transformer.data import Corpus, prepare
from compressive_transformer.model import CompressiveTransformer, Output, with_lengths
from compressive_transformer.train import train

CONFIGS = Path(__file__).parents[1] / "configs"
PAPER = {path.stem: path for path in sorted((CONFIGS / "paper").glob("*.toml"))}
SMALL = {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}
VOCABULARY = {"pg19": 32_000, "enwik8": 257, "wikitext103": 267_736, "speech": 257}

# Section 4, 5 and App. B: layers, segment, recent and compressed memory in training, rate, warm-up, steps.
STATED = {
    "pg19": (36, 512, 512, 512, 2, 16_000, 500_000),
    "enwik8": (24, 768, 768, 1152, 3, 4_000, 100_000),
    "wikitext103": (18, 512, 512, 512, 4, 16_000, 500_000),
    "speech": (20, 768, 768, 768, 4, 4_000, 100_000),
}
EVALUATION = {"enwik8": {"compressed_length": 3072}, "wikitext103": {"memory_length": 500, "compressed_length": 1500}}


def configs_of(path: Path, vocab_size: int, **changes: Any) -> tuple[ModelConfig, TrainConfig]:
    tables = read_settings(path)
    model = from_mapping(ModelConfig, {"vocab_size": vocab_size, **tables["model"], **changes}, "model")
    return model, from_mapping(TrainConfig, tables["train"], "train")


def step(model: CompressiveTransformer, device: str) -> Output:
    """Two segments of one lane, forward, and backward through the second."""
    tokens = torch.zeros(1, model.config.segment_length, dtype=torch.int64, device=device)
    with torch.no_grad():
        memory = model(tokens).memory
    output: Output = model(tokens, memory, targets=tokens)
    assert output.nats is not None
    (output.nats.sum() + output.compression_loss).backward()
    return output


def test_there_is_a_recipe_and_a_twin_for_each_experiment() -> None:
    assert PAPER.keys() == STATED.keys()
    assert {f"{name}-small" for name in PAPER} <= SMALL.keys()


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_of_the_paper_has_its_stated_sizes(name: str) -> None:
    model, training = configs_of(PAPER[name], VOCABULARY[name])
    memory = (model.segment_length, model.memory_length, model.compressed_length, model.compression_rate)
    assert (model.n_layers, *memory, training.warmup_steps, training.steps) == STATED[name]
    assert (training.learning_rate, training.min_learning_rate, training.max_grad_norm) == (3e-4, 1e-6, 0.1)
    assert (training.late_update_step, training.late_steps_per_update) == (60_000, 4)
    assert training.max_document_length % model.segment_length == 0


@pytest.mark.parametrize("name", [name for name in PAPER if name != "wikitext103"])
def test_a_recipe_of_the_paper_takes_a_step(name: str) -> None:
    # All layers are alike: two show what all of them do.
    config, _ = configs_of(PAPER[name], VOCABULARY[name], n_layers=2)
    with torch.device("meta"):
        model = CompressiveTransformer(config)
    output = step(model, "meta")
    assert output.logits.shape == (1, config.segment_length, config.vocab_size)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_recipe_of_wikitext_takes_a_step_at_a_sixteenth() -> None:
    # Which rows a cluster computes depends on the tokens, so this cannot be done without data on the meta device.
    table = read_settings(PAPER["wikitext103"])["model"]
    widths = ("d_model", "d_ff", "segment_length", "memory_length", "compressed_length")
    changes = {**{field: table[field] // 16 for field in widths}, "n_heads": 4, "n_layers": 2}
    config, _ = configs_of(PAPER["wikitext103"], VOCABULARY["wikitext103"], **changes)
    model = CompressiveTransformer(config)
    output = step(model, "cpu")
    assert output.nats is not None
    assert bool(output.nats.isfinite().all())


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_of_the_paper_builds_with_both_memories(name: str) -> None:
    config, _ = configs_of(PAPER[name], VOCABULARY[name])
    with torch.device("meta"):
        model = CompressiveTransformer(config)
    lengths = EVALUATION.get(name, {})
    for field, length in lengths.items():
        assert getattr(with_lengths(model, **lengths).config, field) == length
        assert f"--{field.replace('_', '-')} {length}" in PAPER[name].read_text(encoding="utf-8")
    if name == "speech":
        assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(40e6, rel=0.05)


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Sample books as WikiText lays text out: enough of them for all clusters of the twin."""
    folder = tmp_path_factory.mktemp("words")
    sample = files("compressive_transformer.apps.demo") / "sample"
    for part, split, size in (("train", "train", 3), ("valid", "validation", 1)):
        books = sorted((Path(str(sample)) / split).glob("*.txt"))[:size]
        text = "".join(book.read_text(encoding="utf-8") for book in books)
        (folder / f"wiki.{part}.tokens").write_text(text, encoding="utf-8")
    return prepare(f"wikitext:{folder}", folder / "data")


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", SMALL)
def test_a_small_recipe_trains_on_real_text(name: str, corpus: Corpus, words: Corpus, tmp_path: Path) -> None:
    data = words if name.startswith("wikitext") else corpus
    changes = {
        "steps": 2,
        "batch_size": 2,
        "warmup_steps": 1,
        "validate_every": 2,
        "validation_tokens": 100,
        "sample_every": 0,
    }
    path = tmp_path / "recipe.toml"
    path.write_text((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"), encoding="utf-8")
    tables = read_settings(path, [f"train.{field}={value}" for field, value in changes.items()])
    config = from_mapping(ModelConfig, {"vocab_size": data.vocab_size, **tables["model"]}, "model")
    train(CompressiveTransformer(config), data, from_mapping(TrainConfig, tables["train"], "train"), tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["enwik8", "wikitext103"])
def test_lanes_divide_training_data_of_one_document(name: str) -> None:
    tables = tomllib.loads(PAPER[name].read_text(encoding="utf-8"))
    tokens = {"enwik8": 90_000_000, "wikitext103": 103_227_021}[name]
    longest, batch_size = tables["train"]["max_document_length"], tables["train"]["batch_size"]
    assert -(-tokens // longest) == batch_size
