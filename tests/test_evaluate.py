"""A score is a property of model and text: each token predicted once, from its document's beginning."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compressive_transformer.checkpoint import digest
from compressive_transformer.data import Corpus, Split, prepare
from compressive_transformer.data.tokenizers import ByteTokenizer, train_bpe
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import Evaluation, Score, evaluate, sweep, truncate_split
from compressive_transformer.model import CompressiveTransformer, with_lengths
from compressive_transformer.model.embedding import token_nats
from runs import MODEL
from small import small_model


@pytest.fixture(scope="module")
def model() -> CompressiveTransformer:
    """In float64, far from its first values, so that memory matters."""
    return small_model(**{"vocab_size": 257, **MODEL}).eval()


@pytest.fixture(scope="module")
def scored(model: CompressiveTransformer, corpus: Corpus) -> Evaluation:
    return evaluate(model, corpus.test, batch_size=1)


@pytest.fixture(autouse=True)
def _short_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package's name `evaluate` is the function; the module is found under its full name.
    monkeypatch.setattr(sys.modules["compressive_transformer.evaluate.subset"], "LONG_DOCUMENT", 20)


def score(**counts: float) -> Score:
    return Score(**{"nats": 100.0, "tokens": 40, "words": 10, "bytes": 50, **counts})  # type: ignore[arg-type]


# --- the nats ---


def test_nats_are_those_of_reading_token_by_token(
    model: CompressiveTransformer, corpus: Corpus, scored: Evaluation
) -> None:
    for number, (title, found) in enumerate(scored.documents):
        memory, expected, before = None, 0.0, corpus.tokenizer.start
        for token in corpus.test.read(number).tolist():
            with torch.no_grad():
                output = model(torch.tensor([[before]]), memory)
            expected -= float(output.logits[0, 0].log_softmax(0)[token])
            memory, before = output.memory, token
        assert title == corpus.test.documents[number].title
        assert found.nats == pytest.approx(expected, rel=1e-6)
    assert scored.total.nats == pytest.approx(sum(found.nats for _, found in scored.documents), rel=1e-12)


@pytest.mark.parametrize(("batch_size", "name"), [(2, "train"), (3, "validation"), (8, "train")])
def test_lanes_do_not_change_the_score(
    model: CompressiveTransformer, corpus: Corpus, batch_size: int, name: str
) -> None:
    split = truncate_split(corpus.split(name), corpus.tokenizer, 300)
    assert len({document.tokens for document in split.documents}) > 1 or name == "train"
    expected, found = evaluate(model, split, batch_size=1), evaluate(model, split, batch_size=batch_size)
    for one, other in zip(found.documents, expected.documents, strict=True):
        assert one[0] == other[0]
        assert one[1].nats == pytest.approx(other[1].nats, rel=1e-6)
    assert found.total.nats == pytest.approx(expected.total.nats, rel=1e-6)


def test_lanes_do_not_change_the_score_with_rotary_positions(corpus: Corpus) -> None:
    rotary = small_model(**{"vocab_size": 257, **MODEL, "position": "rotary"}).eval()
    one, three = (evaluate(rotary, corpus.test, batch_size=batch_size).documents for batch_size in (1, 3))
    assert [found.nats for _, found in three] == pytest.approx([found.nats for _, found in one], rel=1e-6)


def test_every_token_is_scored_once(model: CompressiveTransformer, corpus: Corpus, scored: Evaluation) -> None:
    counts = [document.tokens for document in corpus.test.documents]
    assert [found.tokens for _, found in scored.documents] == counts
    told: list[int] = []
    evaluate(model, corpus.test, batch_size=3, progress=told.append)
    assert sum(told) == scored.total.tokens == sum(counts)


def test_documents_are_scored_independently(model: CompressiveTransformer, corpus: Corpus, scored: Evaluation) -> None:
    last = replace(corpus.test, documents=corpus.test.documents[1:])
    assert evaluate(model, last, batch_size=1).total.nats == pytest.approx(scored.documents[1][1].nats, rel=1e-9)


def test_a_uniform_model_needs_log_vocab_size_nats_per_token(model: CompressiveTransformer, corpus: Corpus) -> None:
    even = small_model(model.config)
    torch.nn.init.zeros_(even.embedding.weight)
    total = evaluate(even, corpus.test).total
    assert total.nats_per_token == pytest.approx(math.log(257))
    assert total.bits_per_byte == pytest.approx(math.log2(257))


# --- what is made of them ---


def test_measures_follow_their_formulas() -> None:
    found = score()
    assert found.word_perplexity == pytest.approx(math.exp(10))
    assert found.bits_per_byte == pytest.approx(100 / math.log(2) / 50)
    assert found.nats_per_token == 2.5
    # One bit for each byte: 2 ** (bytes in a word) for a word.
    even = score(nats=50 * math.log(2))
    assert even.bits_per_byte == pytest.approx(1)
    assert even.word_perplexity == pytest.approx(2**5)


@pytest.mark.parametrize("counts", [{"nats": 1e6}, {"words": 0}])
def test_an_infinite_perplexity_is_null_in_json(counts: dict[str, float]) -> None:
    found = score(**counts)
    assert found.word_perplexity == math.inf
    assert found.to_dict()["word_perplexity"] is None
    assert found.to_dict()["bits_per_byte"] == found.bits_per_byte
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(("count", "measure"), [("tokens", "nats_per_token"), ("bytes", "bits_per_byte")])
def test_division_by_zero_is_nan_and_null_in_json(count: str, measure: str) -> None:
    nothing = score(**{count: 0})
    assert math.isnan(getattr(nothing, measure))
    assert nothing.to_dict()[measure] is None


def test_a_total_is_computed_from_sums_not_means(scored: Evaluation, corpus: Corpus) -> None:
    documents = corpus.test.documents
    assert scored.total.words == sum(document.words for document in documents)
    assert scored.total.bytes == sum(document.bytes for document in documents)
    bits = scored.total.nats / math.log(2) / sum(document.bytes for document in documents)
    assert scored.total.bits_per_byte == pytest.approx(bits)


def test_the_table_is_json_with_all_conditions(
    scored: Evaluation, corpus: Corpus, model: CompressiveTransformer
) -> None:
    table = json.loads(json.dumps(scored.to_dict(), allow_nan=False))
    assert table["nats"] == scored.total.nats
    assert [entry["title"] for entry in table["documents"]] == [document.title for document in corpus.test.documents]
    assert table["documents"][1]["bits_per_byte"] == scored.documents[1][1].bits_per_byte
    conditions = table["conditions"]
    assert conditions["split"] == "test"
    assert conditions["corpus_fingerprint"] == corpus.fingerprint
    assert conditions["lossless"] is True
    assert conditions["model"]["memory_length"] == model.config.memory_length
    assert conditions["precision"] == "float64"
    assert conditions["versions"]["torch"] == torch.__version__


def test_other_memory_lengths_are_recorded_and_change_the_score(
    model: CompressiveTransformer, corpus: Corpus, scored: Evaluation
) -> None:
    changed = evaluate(with_lengths(model, memory_length=20, compressed_length=2), corpus.test)
    assert changed.conditions["model"]["memory_length"] == 20
    assert changed.conditions["model"]["compressed_length"] == 2
    assert changed.total.tokens == scored.total.tokens
    assert changed.total.nats != pytest.approx(scored.total.nats, rel=1e-6)


def test_a_sweep_is_an_evaluation_with_each_memory_length(model: CompressiveTransformer, corpus: Corpus) -> None:
    split = truncate_split(corpus.test, corpus.tokenizer, 120)
    found = sweep(model, split, memory_lengths=[0, 20], compressed_lengths=[0, 3, 5], batch_size=2)
    lengths = [(memory, compressed) for memory in (0, 20) for compressed in (0, 3, 5)]
    for result, (memory, compressed) in zip(found, lengths, strict=True):
        changed = with_lengths(model, memory_length=memory, compressed_length=compressed)
        assert result == evaluate(changed, split, batch_size=2)
    assert len({result.total.nats for result in found}) == len(found)
    assert sweep(model, split, compressed_lengths=[4]) == sweep(model, split, memory_lengths=[9]) == sweep(model, split)
    assert sweep(model, split) == [evaluate(model, split)]


def test_a_sweep_with_an_invalid_length_reads_nothing(corpus: Corpus) -> None:
    told: list[int] = []
    plain = small_model(**{"vocab_size": 257, **MODEL, "compressed_length": 0})
    with pytest.raises(CompressiveError, match="needs parameters that this model was built without"):
        sweep(plain, corpus.test, compressed_lengths=[0, 4], progress=told.append)
    assert not told


def test_a_score_reads_as_text(scored: Evaluation) -> None:
    text = str(scored)
    assert text.startswith("test: 2 documents, ")
    assert f"bits per byte     {scored.total.bits_per_byte:.4f}" in text
    assert "segment 8, recent 9, compressed 4 at rate 3" in text
    layered = {**scored.conditions["model"], "memory_length": [0, 9]}
    assert "recent [0, 9], " in str(replace(scored, conditions={**scored.conditions, "model": layered}))
    assert "not sound" not in text
    lossy = replace(scored, conditions={**scored.conditions, "lossless": False})
    assert "(not sound: the tokenizer loses text)" in str(lossy)


# --- beginnings of documents ---


def test_truncated_documents_have_the_counts_of_their_text(corpus: Corpus) -> None:
    split = truncate_split(corpus.train, corpus.tokenizer, 1500)  # 500 of each, but one has fewer
    assert [document.tokens for document in split.documents] == [500, 387, 500]
    for number, document in enumerate(split.documents):
        text = corpus.tokenizer.decode(corpus.train.read(number)[:500])
        assert corpus.tokenizer.decode(split.read(number)) == text
        assert document.words == len(text.split())
        assert document.bytes == len(text.encode())
    assert split.documents[1] == corpus.train.documents[1]
    assert (split.name, split.fingerprint) == (corpus.train.name, corpus.train.fingerprint)


def test_a_result_says_which_weights_were_scored(model: CompressiveTransformer, corpus: Corpus) -> None:
    split = truncate_split(corpus.test, corpus.tokenizer, 40)
    other = small_model(replace(model.config))
    other.load_state_dict(model.state_dict())
    assert evaluate(other, split).conditions == evaluate(model, split).conditions
    assert evaluate(model, split).conditions["weights_sha256"] == digest(model.state_dict())
    with torch.no_grad():
        other.embedding.weight[0, 0] += 1e-3
    found, expected = evaluate(other, split).conditions, evaluate(model, split).conditions
    assert {name for name in expected if found[name] != expected[name]} == {"weights_sha256"}


def test_few_tokens_come_from_few_documents(corpus: Corpus) -> None:
    split = truncate_split(corpus.test, corpus.tokenizer, 39)
    assert [(document.title, document.tokens) for document in split.documents] == [(corpus.test.documents[0].title, 39)]


def test_truncation_keeps_characters_whole(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("aé猫👧" * 9, encoding="utf-8")
    split = prepare(tmp_path / "text.txt", tmp_path / "data", holdout=0).train
    for tokens in range(4, 20):
        cut = truncate_split(split, ByteTokenizer(), tokens).documents[0]
        assert cut.bytes == cut.tokens <= tokens < cut.tokens + 4
        assert "\N{REPLACEMENT CHARACTER}" not in ByteTokenizer().decode(split.read(0, 0, cut.tokens))


def test_truncation_to_more_tokens_changes_nothing(corpus: Corpus) -> None:
    assert truncate_split(corpus.test, corpus.tokenizer, 10**9) == corpus.test


def test_a_truncated_document_is_scored_as_in_the_whole(model: CompressiveTransformer, corpus: Corpus) -> None:
    short = evaluate(model, truncate_split(corpus.test, corpus.tokenizer, 60))
    assert short.total.tokens == 60
    with torch.no_grad():
        for number, (_, found) in enumerate(short.documents):
            ids = torch.from_numpy(corpus.test.read(number))
            inputs = torch.cat([torch.tensor([corpus.tokenizer.start]), ids[:-1]])
            nats = token_nats(model(inputs[None]).logits, ids[None])[0, :30].sum()
            assert found.nats == pytest.approx(float(nats), rel=1e-6)


def test_truncation_to_no_tokens_is_refused(corpus: Corpus) -> None:
    with pytest.raises(CompressiveError, match=r"tokens \(0\) must be 1 or more"):
        truncate_split(corpus.test, corpus.tokenizer, 0)


# --- borders ---


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(model: CompressiveTransformer, corpus: Corpus, training: bool) -> None:
    other = small_model(replace(model.config, dropout=0.5)).train(training)
    split = truncate_split(corpus.test, corpus.tokenizer, 40)
    first = evaluate(other, split)
    assert other.training == training
    assert evaluate(other, split).total == first.total  # nothing is dropped while it is scored

    def fail(tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(other, split, progress=fail)
    assert other.training == training
    assert all(parameter.grad is None for parameter in other.parameters())


def test_a_corpus_of_another_tokenizer_is_refused(model: CompressiveTransformer, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc abc abc")
    train_bpe(["abc abc"], 259).save(tmp_path / "tokenizer.json")
    other = prepare(tmp_path / "text.txt", tmp_path / "data", tokenizer=tmp_path / "tokenizer.json", holdout=0)
    with pytest.raises(CompressiveError, match=r"the corpus has 259 token ids, the model 257; prepare the"):
        evaluate(model, other.train)


def test_fewer_lanes_than_processes_are_refused(model: CompressiveTransformer, corpus: Corpus) -> None:
    with pytest.raises(CompressiveError, match=r"batch_size \(1\) must be at least the number of processes \(2\)"):
        evaluate(model, corpus.test, batch_size=1, world=2)
    with pytest.raises(CompressiveError, match=r"batch_size \(0\) must be at least"):
        evaluate(model, corpus.test, batch_size=0)


def test_the_scores_of_all_processes_add_up(
    model: CompressiveTransformer, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    split: Split = truncate_split(corpus.train, corpus.tokenizer, 300)
    parts: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda nats: parts.append(nats.clone()))
    for rank in range(2):
        evaluate(model, split, batch_size=3, rank=rank, world=2)
    expected = [found.nats for _, found in evaluate(model, split).documents]
    assert (parts[0] + parts[1]).tolist() == pytest.approx(expected, rel=1e-6)
    assert all(part.any() for part in parts)
