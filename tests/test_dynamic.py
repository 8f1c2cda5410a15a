"""Dynamic evaluation: each token is scored before the model learns from it, and nothing of it stays."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from compressive_transformer.data import Corpus
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import ByPosition, dynamic_evaluate, evaluate, truncate_split
from compressive_transformer.model import CompressiveTransformer
from runs import MODEL, tiny_model
from small import small_model

RATE = 0.02


@pytest.fixture(scope="module")
def model() -> CompressiveTransformer:
    """In float64, far from its first values; dropout must not act."""
    return small_model(**{"vocab_size": 257, **MODEL, "dropout": 0.5})


def learnt_from(model: CompressiveTransformer, corpus: Corpus, number: int, rate: float) -> float:
    """Nats of a document of the test split, in an explicit loop over its segments."""
    model = copy.deepcopy(model).eval()
    ids = torch.from_numpy(corpus.test.read(number))
    inputs = torch.cat([torch.tensor([corpus.tokenizer.start]), ids[:-1]])
    memory, total = model.empty_memory(1), 0.0
    for tokens, targets in zip(inputs.split(8), ids.split(8), strict=True):
        output = model(tokens[None], memory)
        losses = -output.logits[0].log_softmax(1)[torch.arange(len(targets)), targets]
        total += float(losses.detach().sum())
        model.zero_grad()
        losses.mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
        memory = output.memory
    return total


def test_it_equals_a_loop_of_scoring_and_one_step_of_descent(model: CompressiveTransformer, corpus: Corpus) -> None:
    plain = evaluate(model, corpus.test, batch_size=1)
    found = dynamic_evaluate(model, corpus.test, learning_rate=RATE)
    for number, ((title, score), (_, before)) in enumerate(zip(found.documents, plain.documents, strict=True)):
        assert title == corpus.test.documents[number].title
        assert score.nats == pytest.approx(learnt_from(model, corpus, number, RATE), rel=1e-5)
        assert score.nats != pytest.approx(before.nats, rel=1e-2)
        assert replace(score, nats=0) == replace(before, nats=0)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_learning_rate_zero_is_evaluation_to_the_bit(corpus: Corpus, precision: torch.dtype) -> None:
    plain = tiny_model(dropout=0.5).to(precision)
    found, expected = dynamic_evaluate(plain, corpus.test, learning_rate=0), evaluate(plain, corpus.test, batch_size=1)
    assert found.total == expected.total
    assert found.documents == expected.documents
    assert {name for name in found.conditions if found.conditions[name] != expected.conditions.get(name)} == {"dynamic"}


def test_learning_from_repetition_helps(corpus: Corpus) -> None:
    plain = tiny_model()
    found = dynamic_evaluate(plain, corpus.validation, learning_rate=0.5, by=[ByPosition(corpus)])
    expected = evaluate(plain, corpus.validation, batch_size=1, by=[ByPosition(corpus)])
    assert found.total.nats < 0.9 * expected.total.nats
    pairs = list(zip(found.buckets["by_position"], expected.buckets["by_position"], strict=True))
    assert [one == other for one, other in pairs[:5]] == [True] * 4 + [False]  # the first segment, and the second


def test_the_order_of_documents_does_not_matter(model: CompressiveTransformer, corpus: Corpus) -> None:
    split = corpus.test
    found = dynamic_evaluate(model, split, learning_rate=RATE)
    backwards = dynamic_evaluate(model, replace(split, documents=split.documents[::-1]), learning_rate=RATE)
    assert backwards.documents == found.documents[::-1]


def test_buckets_sum_to_the_total(model: CompressiveTransformer, corpus: Corpus) -> None:
    split = truncate_split(corpus.test, corpus.tokenizer, 60)
    found = dynamic_evaluate(model, split, learning_rate=RATE, by=[ByPosition(corpus)])
    scores = [score for _, score in found.buckets["by_position"]]
    assert math.fsum(score.nats for score in scores) == pytest.approx(found.total.nats, rel=1e-12)
    assert found.total == dynamic_evaluate(model, split, learning_rate=RATE).total


@pytest.mark.parametrize("training", [True, False])
def test_the_model_does_not_change(model: CompressiveTransformer, corpus: Corpus, training: bool) -> None:
    split = truncate_split(corpus.test, corpus.tokenizer, 30)
    model.train(training)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():  # gradients are the evaluation's own business
        found = dynamic_evaluate(model, split, learning_rate=RATE)
    assert model.training == training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert found == dynamic_evaluate(model, split, learning_rate=RATE)


def test_compression_functions_do_not_learn(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, copies = tiny_model(), []
    monkeypatch.setattr(copy, "deepcopy", lambda model: copies.append(tiny_model()) or copies[0])
    dynamic_evaluate(plain, corpus.test, learning_rate=RATE)
    for (name, before), (_, after) in zip(plain.named_parameters(), copies[0].named_parameters(), strict=True):
        assert torch.equal(before, after) == (".compression." in name), name


def test_the_result_names_the_learning_rate(model: CompressiveTransformer, corpus: Corpus) -> None:
    split = truncate_split(corpus.test, corpus.tokenizer, 20)
    found = dynamic_evaluate(model, split, learning_rate=RATE)
    assert found.conditions["dynamic"]["learning_rate"] == RATE
    assert "dynamic           SGD at 0.02 after each segment" in str(found)
    assert "dynamic" not in str(evaluate(model, split))


@pytest.mark.parametrize("rate", [-1e-9, math.inf, math.nan])
def test_invalid_learning_rates_are_refused(model: CompressiveTransformer, corpus: Corpus, rate: float) -> None:
    with pytest.raises(CompressiveError, match=r"learning_rate \(.*\) must be 0 or more, and finite"):
        dynamic_evaluate(model, corpus.test, learning_rate=rate)


def test_a_corpus_of_another_tokenizer_is_refused(corpus: Corpus) -> None:
    with pytest.raises(CompressiveError, match="the corpus has 257 token ids, the model 300"):
        dynamic_evaluate(tiny_model(vocab_size=300), corpus.test, learning_rate=RATE)
