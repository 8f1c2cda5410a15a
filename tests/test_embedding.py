"""Tied embeddings: what stands between ids and hidden states, in one piece or in clusters of frequency."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import compressive_transformer as ct
import reference
from compressive_transformer.data import Corpus
from compressive_transformer.errors import CompressiveError
from compressive_transformer.model import CompressiveTransformer
from compressive_transformer.model.embedding import token_nats
from runs import tiny_model, tiny_run
from small import assert_close, assert_same_memory, ragged_pieces, random_tokens, small_config, small_model

ADAPTIVE = {"adaptive_cutoffs": [3, 7], "adaptive_factor": 2}  # of 11 ids, in widths of 8, 4 and 2


@pytest.fixture(params=[{}, ADAPTIVE, {"adaptive_cutoffs": [1]}], ids=["plain", "three clusters", "two clusters"])
def model(request: pytest.FixtureRequest) -> CompressiveTransformer:
    return small_model(**request.param).eval()


@pytest.fixture
def adaptive() -> CompressiveTransformer:
    return small_model(**ADAPTIVE).eval()


def targets_of(stream: Tensor) -> Tensor:
    """The next tokens, one of which does not count."""
    targets = torch.cat([stream[:, 1:], torch.full((len(stream), 1), -100)], dim=1)
    targets[0, 2] = -100
    return targets


# --- nats of targets ---


def test_nats_of_tokens_are_double_and_zero_where_ignored() -> None:
    logits = torch.randn(2, 3, 5)
    targets = torch.tensor([[0, 4, -100], [2, -100, -100]])
    nats = token_nats(logits, targets)
    assert nats.dtype == torch.float64
    for lane, place in [(0, 0), (0, 1), (1, 0)]:
        expected = -logits[lane, place].log_softmax(0)[targets[lane, place]]
        assert float(nats[lane, place]) == pytest.approx(float(expected), rel=1e-5)
    assert nats[targets == -100].eq(0).all()


def test_nats_of_targets_are_those_of_the_logits(model: CompressiveTransformer) -> None:
    stream = random_tokens(3, 23)
    targets = targets_of(stream)
    logits = model(stream).logits
    output = model(stream, targets=targets)
    assert output.nats.dtype == torch.float64
    # Those of a plain embedding are taken in single precision, as training takes them.
    tolerance = 1e-10 if model.config.adaptive_cutoffs else 1e-5
    expected = -logits.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    assert_close(output.nats, expected.masked_fill(targets == -100, 0), tolerance)
    assert output.nats[targets == -100].eq(0).all()
    assert model(stream).nats is None


def test_nats_and_memory_do_not_depend_on_how_a_stream_is_cut(model: CompressiveTransformer) -> None:
    stream = random_tokens(2, 26)
    targets = targets_of(stream)
    whole = model(stream, targets=targets)
    memory, read, found = model.empty_memory(2), [0, 0], torch.zeros(2, 26, dtype=torch.float64)
    for taken in ragged_pieces(random.Random(3), 2, 26, 9):
        chunk, wanted = random_tokens(2, max(taken) + 1, seed=1), random_tokens(2, max(taken) + 1, seed=2)
        for lane, count in enumerate(taken):
            chunk[lane, :count] = stream[lane, read[lane] :][:count]
            wanted[lane, :count] = targets[lane, read[lane] :][:count]
        output = model(chunk, memory, torch.tensor(taken), wanted)
        for lane, count in enumerate(taken):
            found[lane, read[lane] : read[lane] + count] = output.nats[lane, :count]
            assert output.nats[lane, count:].eq(0).all()  # padding has targets here, and no nats
            read[lane] += count
        memory = output.memory
    assert_close(found, whole.nats, 1e-10 if model.config.adaptive_cutoffs else 1e-5)
    assert_same_memory(model, memory, whole.memory)


def test_tokens_may_be_32_bit(model: CompressiveTransformer) -> None:
    stream = random_tokens(2, 9)
    assert torch.equal(model(stream.int()).logits, model(stream).logits)


def test_targets_that_do_not_fit_the_tokens_are_refused(model: CompressiveTransformer) -> None:
    with pytest.raises(
        ct.CompressiveError, match=r"targets must be int64 \[2, 4\] as the tokens, got torch.int64 \[2, 3\]"
    ):
        model(random_tokens(2, 4), targets=random_tokens(2, 3))
    with pytest.raises(ct.CompressiveError, match=r"targets must be int64 .*, got torch.float32"):
        model(random_tokens(2, 4), targets=torch.zeros(2, 4))


@pytest.mark.parametrize("wrong", [11, -1])
def test_ids_that_do_not_exist_are_never_taken_for_others(model: CompressiveTransformer, wrong: int) -> None:
    with pytest.raises(ct.CompressiveError, match=r"tokens and targets must be ids of 0 .. 10"):
        model(torch.tensor([[1, wrong]]))
    with pytest.raises(ct.CompressiveError, match=r"tokens and targets must be ids of 0 .. 10"):
        model(torch.tensor([[1, 2]]), targets=torch.tensor([[1, wrong]]))


# --- adaptive input and softmax ---


def slow_input(weights: dict[str, Tensor], token: int) -> Tensor:
    if token < 3:
        return weights["embedding.first.weight"][token]
    tail, low = (0, 3) if token < 7 else (1, 7)
    row = weights[f"embedding.tails.{tail}.rows.weight"][token - low]
    projection = weights[f"embedding.tails.{tail}.projection"]
    return sum(row[k] * projection[k] for k in range(len(row)))


def slow_log_probabilities(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """P(token) = P(cluster) P(token | cluster), in plain loops."""
    first = [math.exp(row @ hidden) for row in weights["embedding.first.weight"]]
    clusters = [math.exp(row @ hidden) for row in weights["embedding.clusters.weight"]]
    everything = sum(first) + sum(clusters)
    probabilities = [value / everything for value in first]
    for tail, cluster in enumerate(clusters):
        narrow = weights[f"embedding.tails.{tail}.projection"] @ hidden
        inside = [math.exp(row @ narrow) for row in weights[f"embedding.tails.{tail}.rows.weight"]]
        probabilities += [cluster / everything * value / sum(inside) for value in inside]
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_inputs_and_log_probabilities_of_clusters_equal_the_slow_reference(adaptive: CompressiveTransformer) -> None:
    weights = {name: value.detach() for name, value in adaptive.named_parameters()}
    ids = torch.arange(11).view(1, -1)
    inputs = adaptive.embedding(ids)[0]
    hidden = torch.randn(5, 8, dtype=torch.float64)
    logits, _ = adaptive.embedding.read_out(hidden[None], None)
    for token in range(11):
        assert_close(inputs[token], slow_input(weights, token))
    for row in range(5):
        assert_close(logits[0, row], slow_log_probabilities(weights, hidden[row]))
    assert_close(logits.exp().sum(-1), torch.ones(1, 5, dtype=torch.float64))


def test_the_rest_of_the_model_does_not_know_of_clusters(adaptive: CompressiveTransformer) -> None:
    # The reference model reads the same inputs from one table; its last hidden states come out of an identity.
    weights = {name: value.detach() for name, value in adaptive.named_parameters()}
    stream = random_tokens(1, 13)
    table = torch.stack([slow_input(weights, token) for token in range(11)])
    lane = reference.Lane(adaptive.config, {**weights, "embedding.weight": table})
    inverse = torch.linalg.pinv(table)
    hidden = lane.read(stream[0].tolist()) @ inverse.T
    expected = torch.stack([slow_log_probabilities(weights, row) for row in hidden])
    assert_close(adaptive(stream).logits[0], expected, 1e-8)


def test_gradients_of_nats_equal_finite_differences(adaptive: CompressiveTransformer) -> None:
    targets = torch.tensor([[0, 4, 10, -100], [3, 2, 7, 6]])
    hidden = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    parameters = list(adaptive.embedding.parameters())
    torch.autograd.gradcheck(lambda x, *_: adaptive.embedding.read_out(x, targets)[1], (hidden, *parameters))
    torch.autograd.gradcheck(lambda *_: adaptive.embedding(torch.arange(11)[None]), tuple(parameters[:-1]))


def test_each_parameter_has_a_gradient_where_a_cluster_is_absent() -> None:
    model = small_model(**ADAPTIVE)
    for targets in (torch.tensor([[1, 2, 0]]), torch.full((1, 3), -100)):
        model.zero_grad(set_to_none=True)
        model(torch.tensor([[0, 1, 2]]), targets=targets).nats.sum().backward()
        assert all(parameter.grad is not None for parameter in model.embedding.parameters())


@torch.no_grad()
def test_inputs_and_logits_of_all_clusters_begin_equally_large() -> None:
    torch.manual_seed(0)
    config = ct.ModelConfig(vocab_size=3000, d_model=64, n_layers=1, n_heads=2, adaptive_cutoffs=(1000, 2000))
    embedding = CompressiveTransformer(config).embedding
    inputs = embedding(torch.arange(3000)[None])[0]
    hidden = torch.randn(200, 64)
    for tail in embedding.tails:
        own = inputs[tail.low : tail.low + 1000]
        assert float(own.std()) == pytest.approx(64**-0.5, rel=0.2)
        scores = hidden @ tail.projection.T @ tail.rows.weight.T
        assert float(scores.std()) == pytest.approx(float((hidden @ inputs[:1000].T).std()), rel=0.2)


def test_clusters_save_parameters() -> None:
    def size(**fields: object) -> int:
        model = CompressiveTransformer(small_config(vocab_size=100, **fields))
        return sum(parameter.numel() for parameter in model.embedding.parameters())

    assert size() == 100 * 8
    # Rows, projections, and a row for each of the further clusters.
    expected = 10 * 8 + (30 * 4 + 4 * 8) + (60 * 2 + 2 * 8) + 2 * 8
    assert size(adaptive_cutoffs=[10, 40], adaptive_factor=2) == expected


def test_bf16_autocast_keeps_log_probabilities_in_single_precision() -> None:
    model = small_model(**ADAPTIVE).float().eval()
    stream = random_tokens(2, 9)
    expected = model(stream, targets=stream).nats
    with torch.autocast("cpu", torch.bfloat16):
        found, logits = model(stream, targets=stream).nats, model(stream).logits
    assert logits.dtype == torch.float32
    assert_close(logits.double().exp().sum(-1), torch.ones(2, 9, dtype=torch.float64), 1e-5)
    assert_close(found, expected, 0.3)


@pytest.mark.usefixtures("cpu")
def test_an_adaptive_model_trains_saves_resumes_evaluates_and_writes(corpus: Corpus, tmp_path: Path) -> None:
    fields = {"adaptive_cutoffs": (40, 130)}
    training = {"steps": 4, "validate_every": 4, "sample_every": 0}
    whole = tiny_run(corpus, tmp_path / "whole", model=fields, **training)
    tiny_run(corpus, tmp_path / "parts", model=fields, stop_at=2, **training)
    resumed = tiny_run(corpus, tmp_path / "parts", model=fields, resume="latest", **training)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    model, tokenizer = ct.load(tmp_path / "whole")
    assert model.config.adaptive_cutoffs == (40, 130)
    result = ct.evaluate(model, corpus.test)
    assert result.total.nats < ct.evaluate(tiny_model(**fields), corpus.test).total.nats
    with torch.no_grad():
        ids = torch.from_numpy(corpus.test.read(0))
        inputs = torch.cat([torch.tensor([tokenizer.start]), ids[:-1]])
        logits = model(inputs[None]).logits
    expected = -float(logits[0].double().log_softmax(-1).gather(1, ids[:, None]).sum())
    assert result.documents[0][1].nats == pytest.approx(expected, rel=1e-6)
    assert ct.Stream(model, tokenizer).write(5, seed=0)


def test_an_adaptive_model_with_targets_has_nats_and_says_where_logits_are():
    model, tokens = small_model(adaptive_cutoffs=(3, 6), adaptive_factor=2), random_tokens(2, 9)
    for output in (model(tokens[:, :4], targets=tokens[:, :4]), model(tokens, targets=tokens)):
        with pytest.raises(CompressiveError, match="an adaptive model that is given targets computes nats only"):
            output.logits.sum()
    assert model(tokens).logits.shape == (2, 9, 11)
