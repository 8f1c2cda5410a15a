"""Distant recall: properties of the synthetic documents, the targets, and the count of answers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compressive_transformer
from compressive_transformer.apps.experiment.plan import read_plan
from compressive_transformer.apps.experiment.report import summarize
from compressive_transformer.apps.experiment.running import finish
from compressive_transformer.checkpoint import read_json
from compressive_transformer.cli import main
from compressive_transformer.data import Corpus, Split, open_corpus, prepare
from compressive_transformer.data.lanes import Lanes
from compressive_transformer.data.sources.passkey import LENGTH as PASSKEY_LENGTH
from compressive_transformer.data.sources.recall import FILLER, KEYS, LENGTH, SPACING, VALUES, recall_document
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import ByPosition, dynamic_evaluate, evaluate
from compressive_transformer.evaluate.recall import (
    REACHES,
    Answer,
    AnswerGroup,
    answers_of,
    count_right,
    reach_of,
    recall_accuracy,
)
from compressive_transformer.memory import SlotLayout
from compressive_transformer.model import IGNORE_INDEX, CompressiveTransformer
from runs import tiny_model, tiny_run
from small import small_config

SAMPLE = Path(compressive_transformer.__file__).parent / "apps" / "demo" / "sample"

pytestmark = pytest.mark.usefixtures("cpu")

# Segments, memory and rate divide nothing; answers lie in each of the three reaches.
MODEL = {"segment_length": 37, "memory_length": 20, "compressed_length": 16, "compression_rate": 3, "n_layers": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare("recall:30-120:3", tmp_path_factory.mktemp("recall") / "data")


def part(corpus: Corpus, count: int, tokens: int = LENGTH) -> Split:
    """Return a split with the starts of the first documents."""
    documents = corpus.validation.documents[:count]
    return replace(corpus.validation, documents=tuple(replace(document, tokens=tokens) for document in documents))


def model_for_recall(**fields: Any) -> CompressiveTransformer:
    """Return a model with large weights: its likeliest tokens are values that change from place to place."""
    model = tiny_model(**{**MODEL, **fields}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.embedding.weight[[id for id in range(257) if id not in set(VALUES)]] *= 0.2
    return model


# --- the documents ---


@pytest.mark.parametrize(("least", "greatest"), [(75, 140), (150, 280), (100, 100), (8, 1279)])
def test_a_key_has_one_value_and_recurs_within_the_range(least: int, greatest: int) -> None:
    for seed in range(20):
        document = recall_document(np.random.default_rng(seed), least=least, greatest=greatest)
        assert len(document) == LENGTH
        places = [place for place, byte in enumerate(document) if byte in KEYS]
        for key in KEYS:
            of_key = [place for place in places if document[place] == key]
            assert not of_key or of_key[0] < greatest
            assert all(least <= distance <= greatest for distance in np.diff(of_key))
            assert len({document[place + 1] for place in of_key}) <= 1
        assert all(document[place + 1] in VALUES for place in places)
        assert min(np.diff(places)) >= 2 + SPACING
        rest = [byte for place, byte in enumerate(document) if place not in places and place - 1 not in places]
        assert set(rest) == set(FILLER)


def test_keys_and_values_differ_and_all_distances_are_equally_frequent() -> None:
    assert len({*KEYS, *VALUES, *FILLER}) == 8 + 32 + 16
    documents = [recall_document(np.random.default_rng(seed), least=75, greatest=140) for seed in range(60)]
    distances = np.concatenate(
        [np.diff([place for place, byte in enumerate(text) if byte == key]) for text in documents for key in KEYS]
    )
    counts = np.histogram(distances, bins=6, range=(75, 141))[0]
    assert 4500 < counts.sum() < 5500
    assert counts.min() > 0.85 * counts.max()
    values = np.bincount([byte for text in documents for byte in text], minlength=256)[list(VALUES)]
    assert values.all()


def test_a_corpus_is_reproducible_and_no_two_documents_are_the_same(data: Corpus, tmp_path: Path) -> None:
    again, more = (prepare(f"recall:30-120:{count}", tmp_path / str(count)) for count in (3, 5))
    assert again.fingerprint == data.fingerprint != more.fingerprint
    texts = [split.read(number).tobytes() for split in data.splits.values() for number in range(len(split.documents))]
    assert len(set(texts)) == len(texts) == 3 + 32 + 64
    assert more.train.read(2).tolist() == data.train.read(2).tolist()
    assert more.test.read(63).tolist() == data.test.read(63).tolist()


@pytest.mark.parametrize("setting", ["", "75", "75-", "7-30", "30-20", "30-1280", "30-40:0", "a-b", "30-40:5:6"])
def test_impossible_distances_are_refused(setting: str, tmp_path: Path) -> None:
    with pytest.raises(CompressiveError, match=rf"^recall:{setting}( must be recall:MIN-MAX|: distances must)"):
        prepare(f"recall:{setting}", tmp_path / "data")
    assert not (tmp_path / "data").exists()


# --- targets ---


def test_values_are_the_only_targets_and_all_tokens_are_inputs(data: Corpus) -> None:
    split = part(data, 5)
    everything = replace(split, targets=None)
    pairs = list(zip(Lanes(split, batch_size=3, length=7), Lanes(everything, batch_size=3, length=7), strict=True))
    assert any(ours.total_targets == 0 for ours, _ in pairs)
    for ours, plain in pairs:
        assert torch.equal(ours.tokens, plain.tokens)
        wanted = torch.isin(plain.targets, torch.tensor(list(VALUES)))
        assert torch.equal(ours.targets, plain.targets.where(wanted, torch.tensor(IGNORE_INDEX)))
        assert ours.total_targets == int(wanted.sum())


def test_targets_are_counted_over_all_processes(data: Corpus) -> None:
    split = part(data, 5)
    whole = Lanes(split, batch_size=4, length=50)
    shares = [Lanes(split, batch_size=4, length=50, rank=rank, world=2) for rank in range(2)]
    for segment, *parts in zip(whole, *shares, strict=True):
        assert torch.equal(segment.targets, torch.cat([part.targets for part in parts]))
        assert {part.total_targets for part in parts} == {segment.total_targets}


def test_a_score_is_of_the_targets_alone(data: Corpus) -> None:
    split, model = part(data, 3), model_for_recall()
    result = evaluate(model, split, batch_size=2, by=[ByPosition(data)])
    nats = []
    for number in range(3):
        ids = torch.tensor(split.read(number))
        logits = model(torch.cat([torch.tensor([256]), ids[:-1]])[None]).logits[0]
        places = [place for place, id in enumerate(ids.tolist()) if id in VALUES]
        nats.append(-logits.log_softmax(-1)[places, ids[places]].sum().item())
        score = result.documents[number][1]
        assert (score.tokens, score.words, score.bytes) == (len(places), 0, len(places))
        assert score.nats == pytest.approx(nats[-1])
    total = result.total
    assert sum(score.tokens for _, score in result.buckets["by_position"]) == total.tokens
    assert sum(score.bytes for _, score in result.buckets["by_position"]) == total.bytes
    assert sum(score.nats for _, score in result.buckets["by_position"]) == pytest.approx(total.nats)
    assert (
        evaluate(model, split, batch_size=1).total.nats == dynamic_evaluate(model, split, learning_rate=0.0).total.nats
    )


def test_training_passes_steps_without_targets(data: Corpus, tmp_path: Path) -> None:
    small = {"batch_size": 1, "log_every": 1, "steps": 12, "validate_every": 6, "sample_every": 0}
    model = tiny_run(data, tmp_path / "run", model={"segment_length": 2}, **small)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    losses = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines() if "loss" in line]
    assert 0.0 in [entry["loss"] for entry in losses if "loss" in entry]


def test_impossible_targets_are_refused(data: Corpus, tmp_path: Path) -> None:
    shutil.copytree(data.path, tmp_path / "data")
    file = tmp_path / "data/documents.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    for targets in ([], [256], [-1], ["a"], [1.0], {"1": 1}, "all"):
        file.write_text(json.dumps({**index, "targets": targets}))
        with pytest.raises(CompressiveError, match="targets must be a list of token ids below 256, at least one"):
            open_corpus(tmp_path / "data")


# --- answers ---


def test_answers_are_the_values_of_keys_that_occurred_before(data: Corpus) -> None:
    for number, answers in enumerate(answers_of(data.test)):
        ids, expected = data.test.read(number).tolist(), []
        for place, id in enumerate(ids):
            earlier = [before for before in range(place) if ids[before] == id and id in KEYS]
            if id in KEYS and earlier:
                expected.append(Answer(place + 1, place + 2, place - earlier[-1]))
        assert answers == expected
        assert all(ids[answer.first] == ids[answer.first - answer.distance] for answer in answers)


def test_an_answer_is_right_where_all_its_tokens_are() -> None:
    answers = [[Answer(1, 2, 1), Answer(3, 5, 2)], [Answer(0, 2, 1)], []]
    hits = [np.array([0, 1, 0, 1, 0], bool), np.array([1, 1], bool), np.zeros(3, bool)]
    assert count_right(answers, hits) == [[True, False], [True], []]
    assert count_right(answers, [np.ones_like(of_document) for of_document in hits]) == [[True, True], [True], []]


def test_accuracy_is_that_of_single_steps(data: Corpus) -> None:
    split, model = part(data, 3, tokens=310), model_for_recall()
    asked, right = answers_of(split), []
    for number, answers in enumerate(asked):
        ids, memory, likeliest = split.read(number).tolist(), model.empty_memory(1), []
        for token in [256, *ids[:-1]]:
            with torch.no_grad():
                output = model(torch.tensor([[token]]), memory)
            memory = output.memory
            likeliest.append(int(output.logits[0, -1].argmax()))
        right.append([likeliest[answer.first] == ids[answer.first] for answer in answers])
    result = recall_accuracy(model, split, batch_size=2)
    assert [(bucket.answers, bucket.right) for bucket in result.documents] == [(len(of), sum(of)) for of in right]
    assert 0 < result.total.right < result.total.answers
    assert result.accuracy == sum(map(sum, right)) / sum(map(len, right))


def test_accuracy_is_independent_of_the_batch_and_groups_hold_all_answers(data: Corpus) -> None:
    split, model = part(data, 5), model_for_recall().train()
    result = recall_accuracy(model, split)
    assert result == recall_accuracy(model, split, batch_size=1) == recall_accuracy(model, split, batch_size=2)
    assert model.training
    for buckets in (result.by_reach, result.by_distance, result.documents):
        assert sum(bucket.answers for bucket in buckets) == result.total.answers
        assert sum(bucket.right for bucket in buckets) == result.total.right
    assert all(bucket.answers for bucket in result.by_reach)
    assert [bucket.label for bucket in result.by_reach] == list(REACHES)
    distances = [answer.distance for of_document in answers_of(split) for answer in of_document]
    assert len(result.by_distance) == 4
    for bucket in result.by_distance:
        low, high = map(int, bucket.label.split("–"))
        assert bucket.answers == sum(low <= distance <= high for distance in distances)
    assert result.chance == 1 / 32


@pytest.mark.parametrize(
    "fields",
    [
        MODEL,
        {**MODEL, "compressed_length": 0},
        {**MODEL, "n_layers": 2, "memory_length": (0, 20), "compressed_length": (16, 3)},
    ],
)
def test_an_answer_is_in_the_slot_that_stands_for_its_token(fields: dict[str, Any]) -> None:
    config = small_config(**fields)
    for place in range(2, 230, 7):
        for distance in range(1, place + 1, 3):
            # The token at `place` - `distance` is the input after it.
            state, segment = place - distance + 1, place - place % 37
            nearest = 3
            for layer in range(config.n_layers):
                compressed, recent = SlotLayout.of(config, layer).slot_spans(segment)
                if state >= segment or any(state in span for span in recent):
                    nearest = 0
                elif any(state in span for span in compressed):
                    apart = not any({state, state - 1} <= set(span) for span in compressed)
                    nearest = min(nearest, 1 + apart)
            assert reach_of(config, Answer(place, place + 1, distance)) == nearest


def test_a_corpus_without_answers_or_of_other_tokens_is_refused(corpus: Corpus, data: Corpus) -> None:
    with pytest.raises(CompressiveError, match="split test has no answers: distant recall needs a corpus made"):
        recall_accuracy(tiny_model(), corpus.test)
    with pytest.raises(CompressiveError, match="the corpus has 257 token ids, the model 300"):
        recall_accuracy(tiny_model(vocab_size=300), data.test)


def test_a_group_without_answers_has_no_accuracy() -> None:
    assert AnswerGroup("none", 0, 0).to_dict() == {"label": "none", "answers": 0, "right": 0, "accuracy": None}


# --- keys hidden in text ---


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare(f"passkey:{SAMPLE}:100-900:3", tmp_path_factory.mktemp("passkey") / "data")


def test_keys_hidden_in_text_keep_numbers_and_distances(hidden: Corpus) -> None:
    sentence = re.compile(rb" The key of ([A-Z][a-z]{4}) is ([0-9]{4})\. ")
    assert [len(split.documents) for split in hidden.splits.values()] == [3, 32, 53]
    for split in hidden.splits.values():
        source = sorted((SAMPLE / split.name).glob("*.txt"))[0].read_bytes()
        text = re.sub(rb"[0-9]", b"", source.replace(b"\r\n", b"\n"))
        document = bytes(split.read(0).tolist())
        assert len(document) == PASSKEY_LENGTH
        matches = list(sentence.finditer(document))
        assert text.startswith(sentence.sub(b"", document))
        assert len(matches) > 20
        numbers = {match[1]: match[2] for match in matches}
        assert len(set(numbers.values())) == len(numbers) == 8
        asked = []
        for name, number in numbers.items():
            of_key = [match for match in matches if match[1] == name]
            assert {match[2] for match in of_key} == {number}
            starts = [match.start(2) for match in of_key]
            assert all(100 <= distance <= 900 for distance in np.diff(starts))
            asked += [Answer(start, start + 4, start - before) for before, start in pairwise(starts)]
        assert answers_of(split)[0] == sorted(asked)
    assert set(np.flatnonzero(hidden.test.is_target(np.arange(256)))) == set(b"0123456789")


def test_hidden_keys_are_reproducible_also_in_text_without_splits(hidden: Corpus, tmp_path: Path) -> None:
    again = prepare(f"passkey:{SAMPLE}:100-900:3", tmp_path / "again")
    assert again.fingerprint == hidden.fingerprint
    whole = prepare(f"passkey:{SAMPLE / 'train'}:100-900:5", tmp_path / "whole", holdout=3)
    assert [len(split.documents) for split in whole.splits.values()] == [2, 2, 1]
    assert len({split.read(n).tobytes() for split in whole.splits.values() for n in range(len(split.documents))}) == 5


def test_recall_in_text_counts_whole_numbers(hidden: Corpus) -> None:
    split = replace(hidden.test, documents=hidden.test.documents[:1])
    result = recall_accuracy(model_for_recall(), split)
    assert result.chance == pytest.approx(1e-4)
    assert result.total.answers == len(answers_of(split)[0])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("", "must be passkey:SOURCE:MIN-MAX"),
        ("SOURCE", "must be passkey:SOURCE:MIN-MAX"),
        ("SOURCE:20-300", "distances must rise from 27"),
        ("SOURCE:300-200", "distances must rise from 27"),
        ("SOURCE:100-8166", "to at most 8165 tokens"),
        ("SOURCE:100-200:0", "there must be training documents"),
        ("recall:75-140:100-900", "keys can be hidden in text only, and recall:75-140 is not text"),
        ("SHORT:100-200", "needs texts of at least 8,192 bytes without digits"),
    ],
)
def test_keys_that_do_not_fit_are_refused(setting: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("1" * 9000 + "short")
    source = setting.replace("SOURCE", str(SAMPLE)).replace("SHORT", str(tmp_path / "short.txt"))
    with pytest.raises(CompressiveError, match=rf"passkey:.*{message}"):
        prepare(f"passkey:{source}", tmp_path / "data")
    assert not (tmp_path / "data").exists()


# --- the command and experiments ---


def test_the_command_prints_the_accuracy_of_a_run(
    data: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run(data, tmp_path / "run", model=MODEL, steps=1, warmup_steps=1, validate_every=0, sample_every=0)
    options = ["--split", "validation", "--batch-size", "32"]
    arguments = ["compressive", "recall", str(tmp_path / "run"), str(data.path), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    shown = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    main()
    table = json.loads(capsys.readouterr().out)
    assert shown.splitlines()[0] == f"validation: {table['answers']:,} answers in 32 documents"
    assert shown.splitlines()[1] == f"accuracy          {table['accuracy']:.4f}   (chance 0.0312)"
    for bucket in (*table["by_reach"], *table["by_distance"]):
        assert f"{bucket['label']:<28}{bucket['answers']:>10,}{bucket['accuracy']:>10.4f}\n" in shown
    assert len(table["documents"]) == 32


PLAN: dict[str, Any] = {
    "seeds": [0, 1],
    "baseline": "short",
    "model": {"d_model": 16, "n_heads": 2, **MODEL},
    "train": {
        "steps": 2,
        "batch_size": 2,
        "warmup_steps": 1,
        "validate_every": 1,
        "validation_tokens": 500,
        "learning_rate": 0.3,
        "max_grad_norm": 10.0,
    },
    "evaluate": {"task": "recall", "batch_size": 8},
    "settings": {"short": {"model": {"compressed_length": 0}}, "long": {}},
}


def test_an_experiment_compares_accuracies(data: Corpus, tmp_path: Path) -> None:
    data = replace(data, splits={**data.splits, "validation": part(data, 8)})
    plan = read_plan(PLAN, data)
    for run in plan.runs():
        finish(run, data, tmp_path / "out")
    results = summarize(plan, data, tmp_path / "out", processes=1, failed={})
    table = results.to_dict()
    short, long = (entry["measures"]["accuracy"]["values"] for entry in table["settings"])
    against = table["settings"][1]["against_baseline"]
    assert against["differences"] == [value - baseline for baseline, value in zip(short, long, strict=True)]
    assert against["difference"] == pytest.approx(np.mean(long) - np.mean(short))
    low, high = against["difference_over_runs"]
    half = 12.7062 * np.std(against["differences"], ddof=1) / 2**0.5  # Student's t of one degree of freedom
    assert (low + high) / 2 == pytest.approx(against["difference"])
    assert (high - low) / 2 == pytest.approx(half, rel=1e-4)
    low, high = against["difference_over_documents"]
    assert low <= against["difference"] <= high
    assert against["documents"] == 8
    score = read_json(tmp_path / "out/runs/long/seed-0/result.json")["score"]
    assert score["accuracy"] == score["right"] / score["answers"]
    assert "| setting | seeds | accuracy | − short |" in str(results)
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    from compressive_transformer.apps.experiment.drawing import draw

    assert draw(table, tmp_path) == ["curves.svg", "settings.svg"]


def test_a_plan_for_recall_on_a_corpus_without_answers_is_refused(corpus: Corpus) -> None:
    with pytest.raises(CompressiveError, match="split validation has no answers"):
        read_plan(PLAN, corpus)
