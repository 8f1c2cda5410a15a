"""Each token's nats go to one bucket, each word is counted once, and buckets sum to the total: under any tokenizer."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from compressive_transformer.data import Corpus, prepare
from compressive_transformer.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import ByFrequency, ByPosition, evaluate, truncate_split
from compressive_transformer.evaluate.buckets import TokenSpans
from compressive_transformer.model import CompressiveTransformer
from runs import MODEL
from small import small_model

# White space of every kind and width, at both ends too, words of several bytes a character, an unseen word.
ODD = "  \nAlice was  — naïve 猫 … the\tthe\u00a0of the rabbit-hole 👧\u3000and zyx, \n\n"
BORDERS = (20, 6, 1)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    alice = (files("compressive_transformer.apps.demo") / "sample/train/11.txt").read_text(encoding="utf-8")
    texts = {"train/a": alice[2000:5000], "train/b": alice[9000:10000]}
    texts |= {"validation/odd": ODD, "validation/plain": alice[5000:5160], "validation/white": " \n "}
    for name, text in texts.items():
        path = folder / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def spanning_tokenizer(path: Path, text: str) -> Path:
    """A byte-level BPE whose tokens pay no heed to white space: `of the` may be one."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module", params=["bytes", "bpe", "spanning"])
def corpus(request: pytest.FixtureRequest, books: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer: str | Path = request.param
    if tokenizer == "spanning":
        tokenizer = spanning_tokenizer(folder / "tokenizer.json", (books / "train/a.txt").read_text(encoding="utf-8"))
    made = prepare(books, folder / "data", tokenizer=tokenizer, vocab_size=330)
    assert made.lossless
    return made


@pytest.fixture(scope="module")
def model(corpus: Corpus) -> CompressiveTransformer:
    return small_model(**{**MODEL, "vocab_size": corpus.vocab_size, "segment_length": 25}).eval()


def nats_of(model: CompressiveTransformer, corpus: Corpus, number: int) -> list[float]:
    """Of each token of a document of the validation split."""
    ids = torch.from_numpy(corpus.validation.read(number))
    inputs = torch.cat([torch.tensor([corpus.tokenizer.start]), ids[:-1]])
    with torch.no_grad():
        logits = model(inputs[None]).logits[0]
    return [-float(row.log_softmax(0)[token]) for row, token in zip(logits, ids, strict=True)]


def texts_of(corpus: Corpus, name: str) -> list[str]:
    split = corpus.split(name)
    return [corpus.tokenizer.decode(split.read(number)) for number in range(len(split.documents))]


def word_of(text: str, place: int) -> str | None:
    """The word at a character, or else the next one, or else the last one."""
    while place < len(text) and text[place].isspace():
        place += 1
    words = text.split()
    if place == len(text) or not words:
        return words[-1] if words else None
    while place and not text[place - 1].isspace():
        place -= 1
    return text[place:].split()[0]


def complete(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of ids without the beginning of a character at its end."""
    return tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")


# --- by frequency ---


def test_words_by_frequency_equal_a_slow_count(model: CompressiveTransformer, corpus: Corpus) -> None:
    labels = ["≥ 20", "6–19", "1–5", "< 1"]
    trained = [word for text in texts_of(corpus, "train") for word in text.split()]

    def label(word: str | None) -> str:
        occurrences = trained.count(word) if word else 0
        return labels[sum(occurrences < border for border in BORDERS)]

    nats, tokens, words, sizes = (dict.fromkeys(labels, 0.0) for _ in range(4))
    for number, text in enumerate(texts_of(corpus, "validation")):
        ids = corpus.validation.read(number).tolist()
        for place, lost in enumerate(nats_of(model, corpus, number)):
            before, after = (complete(corpus.tokenizer, ids[:end]) for end in (place, place + 1))
            bucket = label(word_of(text, len(before)))
            nats[bucket] += lost
            tokens[bucket] += 1
            sizes[bucket] += len(after.encode()) - len(before.encode())
        for word in text.split():
            words[label(word)] += 1
    found = evaluate(model, corpus.validation, by=[ByFrequency(corpus, BORDERS)]).buckets["by_frequency"]
    assert [name for name, _ in found] == labels
    for name, score in found:
        assert score.nats == pytest.approx(nats[name], rel=1e-6)
        assert (score.tokens, score.words, score.bytes) == (tokens[name], words[name], sizes[name])
    assert all(words.values()), "each bucket should have some"


def test_default_borders_are_those_of_the_paper(corpus: Corpus) -> None:
    labels = ByFrequency(corpus).assignment(corpus.validation).labels
    assert labels == ("≥ 10,000", "1,000–9,999", "100–999", "< 100")
    assert ByFrequency(corpus, (5,)).assignment(corpus.validation).labels == ("≥ 5", "< 5")


@pytest.mark.parametrize("borders", [(), (1, 2), (2, 2), (5, 0)])
def test_invalid_borders_are_refused(corpus: Corpus, borders: tuple[int, ...]) -> None:
    with pytest.raises(CompressiveError, match=r"borders \[.*\] must be numbers of occurrences in falling order"):
        ByFrequency(corpus, borders)


# --- by position ---


def test_tokens_by_position_equal_a_slow_count(model: CompressiveTransformer, corpus: Corpus) -> None:
    found = evaluate(model, corpus.validation, by=[ByPosition(corpus)]).buckets["by_position"]
    longest = max(document.tokens for document in corpus.validation.documents)
    assert [name for name, _ in found[:5]] == ["0", "1", "2–3", "4–7", "8–15"]
    nats = [nats_of(model, corpus, number) for number in range(len(corpus.validation.documents))]
    first, words = 0, 0
    for power, (name, score) in enumerate(found):
        last = 2**power
        assert name.replace(",", "") == (str(first) if last == first + 1 else f"{first}–{last - 1}")
        within = [lost for document in nats for lost in document[first:last]]
        assert score.tokens == len(within) > 0
        assert score.nats == pytest.approx(sum(within), rel=1e-6)
        words += score.words
        assert (
            words
            == sum(  # a word counts where its first character becomes complete
                len(text[:end].split())
                for number, text in enumerate(texts_of(corpus, "validation"))
                for end in [len(complete(corpus.tokenizer, corpus.validation.read(number)[:last].tolist()))]
            )
        )
        first = last
    assert first >= longest


def test_positions_end_with_the_longest_document(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("xxxxx")
    made = prepare(tmp_path / "text.txt", tmp_path / "data", holdout=0)
    labels = ("0", "1", "2–3", "4–7")
    for tokens, count in {1: 1, 2: 2, 3: 3, 4: 3, 5: 4}.items():
        assert ByPosition(made).assignment(truncate_split(made.train, made.tokenizer, tokens)).labels == labels[:count]


# --- both ---


def test_buckets_sum_to_the_total(model: CompressiveTransformer, corpus: Corpus) -> None:
    plain = evaluate(model, corpus.validation)
    result = evaluate(model, corpus.validation, by=[ByPosition(corpus), ByFrequency(corpus, BORDERS)])
    assert (result.total, result.documents) == (plain.total, plain.documents)
    assert list(result.buckets) == ["by_position", "by_frequency"]
    assert plain.buckets == {}
    for buckets in result.buckets.values():
        scores = [score for _, score in buckets]
        assert math.fsum(score.nats for score in scores) == pytest.approx(result.total.nats, rel=1e-12)
        for count in ("tokens", "words", "bytes"):
            assert sum(getattr(score, count) for score in scores) == getattr(result.total, count)


def test_lanes_do_not_change_the_buckets(model: CompressiveTransformer, corpus: Corpus) -> None:
    by = [ByPosition(corpus), ByFrequency(corpus, BORDERS)]
    expected = evaluate(model, corpus.validation, by=by, batch_size=1).buckets
    for batch_size in (2, 5):
        found = evaluate(model, corpus.validation, by=by, batch_size=batch_size).buckets
        for name, scores in expected.items():
            for (label, one), (other_label, other) in zip(scores, found[name], strict=True):
                assert label == other_label
                assert replace(other, nats=0) == replace(one, nats=0)
                assert other.nats == pytest.approx(one.nats, rel=1e-6)


def test_the_buckets_of_all_processes_add_up(
    model: CompressiveTransformer, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = [ByPosition(corpus), ByFrequency(corpus, BORDERS)]
    parts: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: parts.append(sums.clone()))
    for rank in range(2):
        evaluate(model, corpus.validation, batch_size=2, rank=rank, world=2, by=by)
    expected = evaluate(model, corpus.validation, by=by).buckets
    for one, other, scores in zip(parts[1:3], parts[4:6], expected.values(), strict=True):
        table = [[score.nats, score.tokens, score.words, score.bytes] for _, score in scores]
        np.testing.assert_allclose((one + other).numpy().T, table, rtol=1e-6)
        assert one.any()
        assert other.any()


def test_buckets_read_as_text_and_are_json(model: CompressiveTransformer, corpus: Corpus) -> None:
    result = evaluate(model, corpus.validation, by=[ByFrequency(corpus, (10**6, BORDERS[1]))])
    lines = str(result).splitlines()
    assert lines[-4].split() == ["by", "frequency", "tokens", "words", "bits", "per", "byte", "word", "perplexity"]
    assert lines[-2].startswith("6–999,999 ")
    table = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [row["bucket"] for row in table["by_frequency"]] == ["≥ 1,000,000", "6–999,999", "< 6"]
    empty = table["by_frequency"][0]
    assert (empty["tokens"], empty["bits_per_byte"], empty["nats_per_token"], empty["word_perplexity"]) == (
        0,
        *[None] * 3,
    )
    assert "by_frequency" not in evaluate(model, corpus.validation).to_dict()


def test_truncated_documents_have_their_buckets(model: CompressiveTransformer, corpus: Corpus) -> None:
    split = truncate_split(corpus.validation, corpus.tokenizer, 40)
    result = evaluate(model, split, by=[ByPosition(corpus), ByFrequency(corpus)])
    for scores in result.buckets.values():
        assert sum(score.bytes for _, score in scores) == result.total.bytes
        assert sum(score.words for _, score in scores) == result.total.words


def test_buckets_of_another_corpus_are_refused(model: CompressiveTransformer, corpus: Corpus) -> None:
    other = replace(corpus, fingerprint="other")
    with pytest.raises(CompressiveError, match=r"by_position is for corpus .*, but the split validation is of"):
        evaluate(model, corpus.validation, by=[ByPosition(other)])


def test_words_by_frequency_need_a_lossless_tokenizer(corpus: Corpus) -> None:
    with pytest.raises(CompressiveError, match="need a lossless tokenizer, but the tokenizer of this corpus loses"):
        ByFrequency(replace(corpus, lossless=False))


# --- where tokens and words lie ---


def test_spans_cover_the_text_of_any_tokenizer(books: Path, corpus: Corpus, tmp_path: Path) -> None:
    unigram = tokenizers.Tokenizer(models.Unigram([(piece, -2.0) for piece in sorted({*ODD, "▁", "▁the", "▁o", "f▁"})]))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    unigram.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    for tokenizer in (corpus.tokenizer, HuggingFaceTokenizer(unigram)):
        ids = tokenizer.encode(ODD)
        assert tokenizer.decode(ids) == ODD
        spans = TokenSpans.from_ids(tokenizer, ids)
        assert spans.text == ODD
        assert list(spans.words) == ODD.split()
        assert spans.bytes.sum() == len(ODD.encode())
        assert [ODD[a:b] for a, b in zip(spans.word_starts, spans.word_ends, strict=True)] == ODD.split()
        for place, word in enumerate(spans.word_of_tokens().tolist()):
            assert spans.words[word] == word_of(ODD, int(spans.starts[place]))


def test_words_are_those_of_split_for_every_character() -> None:
    tokenizer = ByteTokenizer()
    every = "x".join(chr(point) for point in range(0x3100) if not 0xD800 <= point < 0xE000)
    assert list(TokenSpans.from_ids(tokenizer, tokenizer.encode(every)).words) == every.split()


def test_an_incomplete_last_character_counts_for_the_last_token() -> None:
    tokenizer = ByteTokenizer()
    spans = TokenSpans.from_ids(tokenizer, tokenizer.encode("a é")[:-1])
    assert spans.text == "a \N{REPLACEMENT CHARACTER}"
    assert spans.bytes.tolist() == [1, 1, 3]
