"""What compression loses is measured as the reference computes it, beside mean pooling, for every function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import reference
from compressive_transformer.compression import COMPRESSIONS
from compressive_transformer.config import ModelConfig
from compressive_transformer.data import Corpus, Split
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate.reconstruction import measure_reconstruction
from compressive_transformer.model import CompressiveTransformer
from runs import tiny_model


def altered_model(**fields: Any) -> CompressiveTransformer:
    """A tiny model in double precision, its compression functions far from mean pooling."""
    model = tiny_model(**fields).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * (".compression" in name))
    return model


def beginnings_of(split: Split, tokens: int) -> Split:
    documents = [replace(document, tokens=min(tokens, document.tokens)) for document in split.documents]
    return replace(split, documents=tuple(documents))


class Measured(reference.Lane):
    """Adds up, for each layer, the squares of the error, of mean pooling's and of the target."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.squares = torch.zeros(self.c.n_layers, 3).double()

    def compress(
        self, layer: int, evicted: list[torch.Tensor], usage: list[float], following: torch.Tensor | None
    ) -> list[torch.Tensor]:
        new: list[torch.Tensor] = super().compress(layer, evicted, usage, following)
        rate = self.rate[layer]
        means = [sum(evicted[at : at + rate]) / rate for at in range(0, len(evicted), rate)]
        if self.c.compressed_scale == "rms":
            means = [self.matched(mean, evicted[g * rate : (g + 1) * rate]) for g, mean in enumerate(means)]
        zeros = [torch.zeros_like(state) for state in new]  # attention over zeros is zero: the error is the target
        for at, states in enumerate((new, means, zeros) if new else ()):
            self.squares[layer, at] += self.reconstruction(layer, evicted, states)
        return new


@pytest.mark.parametrize("fields", [{}, {"compression": "most-used", "compressed_length": (0, 4)}], ids=str)
def test_the_error_equals_the_reference(corpus: Corpus, fields: dict[str, Any]) -> None:
    model, split = altered_model(**fields), beginnings_of(corpus.test, 60)
    squares = torch.zeros(2, 3).double()
    for number in range(len(split.documents)):
        lane = Measured(model.config, dict(model.named_parameters()))
        with torch.no_grad():
            lane.read([split.start_id, *split.read(number, 0, 59).tolist()])
        squares += lane.squares
    measured = measure_reconstruction(model, split)
    expected = squares[:, :2] / squares[:, 2:].clamp(min=1e-300)
    assert measured.error == pytest.approx(expected[:, 0].tolist(), abs=1e-9)
    assert measured.mean_pooling == pytest.approx(expected[:, 1].tolist(), abs=1e-9)
    assert measured.error[1] != pytest.approx(measured.mean_pooling[1], rel=1e-3)


def starts_as_mean(name: str) -> bool:
    """Return True for mean pooling, and for functions that begin as it."""
    function = COMPRESSIONS[name](ModelConfig(vocab_size=9, d_model=6, n_heads=1, compression=name), 3)
    evicted = torch.randn(1, 4, 3 + function.overlap, 6)
    usage = [torch.rand(1, 4, 3)] if function.uses_usage else []
    return torch.allclose(function(evicted, *usage), evicted[:, :, :3].mean(2), atol=1e-6)


@pytest.mark.parametrize("compression", sorted(COMPRESSIONS))
def test_every_function_is_measured_whatever_trains_it(corpus: Corpus, compression: str) -> None:
    found = []
    for loss in ("attention", "auto-encoding", "bptt"):
        measured = measure_reconstruction(
            tiny_model(compression=compression, compression_loss=loss).double(), beginnings_of(corpus.test, 60)
        )
        found.append(measured.error)
        assert all(0 < error < 1 for error in measured.mean_pooling)
        if starts_as_mean(compression):
            assert measured.error == pytest.approx(measured.mean_pooling, rel=1e-6)
        else:
            assert measured.error != pytest.approx(measured.mean_pooling, rel=1e-2)
    assert all(error == pytest.approx(found[0]) for error in found)


def test_the_batch_does_not_matter_and_hooks_are_removed(corpus: Corpus) -> None:
    model = altered_model()
    alone, together = (
        measure_reconstruction(model.train(), corpus.validation, batch_size=batch_size) for batch_size in (1, 5)
    )
    assert alone.error == pytest.approx(together.error, rel=1e-9)
    assert alone.mean_pooling == pytest.approx(together.mean_pooling, rel=1e-9)
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_never_evicts_has_no_error(corpus: Corpus) -> None:
    for fields in ({"compressed_length": 0}, {"memory_length": 400}):
        measured = measure_reconstruction(tiny_model(**fields), corpus.test)
        assert measured.error == measured.mean_pooling == (0.0, 0.0)


def test_a_corpus_of_another_tokenizer_is_refused(corpus: Corpus) -> None:
    with pytest.raises(CompressiveError, match="the corpus has 257 token ids, the model 300; prepare the corpus"):
        measure_reconstruction(tiny_model(vocab_size=300), corpus.test)
