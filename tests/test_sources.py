"""Benchmarks and sound are read as papers read them: the same bytes, the same counts, the same cuts."""

from __future__ import annotations

import io
import json
import math
import shutil
import wave
import zipfile
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressive_transformer.cli import main
from compressive_transformer.data import Corpus, Document, Split, open_corpus, prepare, published
from compressive_transformer.data.published import SPLITS_OF_PAPERS, Published
from compressive_transformer.data.sources.audio import read_wav, wav_of
from compressive_transformer.data.tokenizers import mu_law_decode, mu_law_encode
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import Evaluation, evaluate, truncate_split
from compressive_transformer.generate.stream import Stream
from compressive_transformer.model import with_lengths
from runs import tiny_model, tiny_run, write_books

SAMPLE = Path(str(files("compressive_transformer.apps.demo") / "sample"))


def refused(message: str, tmp_path: Path, source: str, **options: Any) -> None:
    with pytest.raises(CompressiveError, match=message) as caught:
        prepare(source, tmp_path / "refused", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "refused").exists()


def tokens_of(corpus: Corpus) -> list[int]:
    return [token for split in corpus.splits.values() for token in split.read(0).tolist()]


# --- Enwik8 ---

# Its borders, at 90 and 95 of 100, stand within characters; line ends are of all kinds.
ENWIK = ("old\r\nnew\rline " + "猫" * 62).encode()


@pytest.mark.parametrize("archived", [False, True])
def test_enwik8_keeps_every_byte_and_cuts_at_90_and_95_of_100(tmp_path: Path, archived: bool) -> None:
    file = tmp_path / "enwik8"
    file.write_bytes(ENWIK)
    if archived:
        with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
            archive.write(file, "enwik8")
        file = tmp_path / "enwik8.zip"
    said: list[str] = []
    corpus = prepare(f"enwik8:{file}", tmp_path / "data", progress=said.append)
    assert bytes(tokens_of(corpus)) == ENWIK
    assert list(corpus.splits) == ["train", "validation", "test"]
    sizes = [split.documents[0].bytes for split in corpus.splits.values()]
    assert sizes == [len(ENWIK) - 20, 10, 10]
    assert [len(split.documents) for split in corpus.splits.values()] == [1, 1, 1]
    assert corpus.lossless
    assert corpus.train.documents[0].words == 4
    with pytest.raises(UnicodeDecodeError):
        bytes(corpus.train.read(0).tolist()).decode()
    assert said[0] == (
        f"enwik8:{file.name}: bytes are kept as they are;"
        " splits: 90, 5 and 5 of 100 parts of 200 bytes in order: 180, 10, 10"
    )


def test_a_beginning_of_raw_bytes_counts_bytes_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes(ENWIK)
    corpus = prepare(f"enwik8:{tmp_path / 'enwik8'}", tmp_path / "data")
    part = truncate_split(corpus.validation, corpus.tokenizer, 7).documents[0]
    assert part.bytes == part.tokens > 3


def test_what_is_no_enwik8_is_refused(tmp_path: Path) -> None:
    refused("cannot read .*none: No such file or directory; enwik8: needs a file", tmp_path, f"enwik8:{tmp_path}/none")
    refused("Is a directory", tmp_path, f"enwik8:{tmp_path}")
    (tmp_path / "short").write_bytes(b"x" * 19)
    refused("short has 19 bytes: at least 20 are needed", tmp_path, f"enwik8:{tmp_path}/short")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a", "a")
        archive.writestr("b", "b")
    refused("two.zip must hold one file, it holds 2: unpack it", tmp_path, f"enwik8:{tmp_path}/two.zip")
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("enwik8", "a" * 100)
    (tmp_path / "broken.zip").write_bytes(whole.getvalue().replace(b"a" * 100, b"b" * 100))
    refused("cannot unpack .*broken.zip: .*; unpack it and give the file", tmp_path, f"enwik8:{tmp_path}/broken.zip")
    (tmp_path / "enwik8").write_bytes(ENWIK)
    refused("enwik8:enwik8 is read as bytes, not as bpe", tmp_path, f"enwik8:{tmp_path}/enwik8", tokenizer="bpe")


# --- WikiText ---

WIKITEXT = {
    "train": " \n = A <unk> page = \n \n the page is the page of a \n",
    "valid": " \n = A page = \n",
    "test": " \n the cat \n",
}


def write_wikitext(folder: Path, ending: str = "tokens", **parts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for part, text in parts.items():
        (folder / f"wiki.{part}.{ending}").write_bytes(text.encode())
    return folder


@pytest.mark.parametrize("ending", ["tokens", "raw"])
def test_wikitext_is_one_document_of_words_with_an_end_for_each_line(tmp_path: Path, ending: str) -> None:
    folder = write_wikitext(tmp_path / "wikitext", ending, train=WIKITEXT["train"], valid=WIKITEXT["valid"])
    corpus = prepare(f"wikitext:{folder}", tmp_path / "data")
    words = WIKITEXT["train"].replace("\n", "<eos>").split()
    # Unlike whitespace-separated words, the ends of lines count.
    assert corpus.train.documents[0] == Document("wiki.train", 0, 16, len(words), len(WIKITEXT["train"]))
    assert corpus.tokenizer.decode(corpus.train.read(0)) == WIKITEXT["train"]
    assert corpus.tokenizer.decode(corpus.validation.read(0)) == WIKITEXT["valid"]
    assert corpus.vocab_size == len(set(words)) + 1
    assert corpus.lossless
    counts = np.bincount(corpus.train.read(0))
    assert counts.tolist() == sorted(counts, reverse=True)  # as adaptive softmax needs them
    part = truncate_split(corpus.train, corpus.tokenizer, 9).documents[0]
    assert (part.tokens, part.words) == (9, 9)


def test_other_layouts_of_the_same_lines_are_the_same(tmp_path: Path) -> None:
    one = prepare(f"wikitext:{write_wikitext(tmp_path / 'a', **WIKITEXT)}", tmp_path / "one")
    other = {part: text.replace(" \n", "\r\n").replace(" = ", "=  ".rjust(4)) for part, text in WIKITEXT.items()}
    two = prepare(f"wikitext:{write_wikitext(tmp_path / 'b', **other)}", tmp_path / "two")
    for name, split in one.splits.items():
        assert split.read(0).tolist() == two.split(name).read(0).tolist()


def test_words_that_training_lacks_are_unknown_and_the_corpus_is_lossy(tmp_path: Path) -> None:
    corpus = prepare(f"wikitext:{write_wikitext(tmp_path / 'wikitext', **WIKITEXT)}", tmp_path / "data")
    assert corpus.tokenizer.decode(corpus.test.read(0)) == " \n the <unk> \n"
    assert not open_corpus(tmp_path / "data").lossless


def test_another_folder_can_be_read_with_the_words_of_a_corpus(tmp_path: Path) -> None:
    first = prepare(f"wikitext:{write_wikitext(tmp_path / 'a', **WIKITEXT)}", tmp_path / "one")
    folder = write_wikitext(tmp_path / "b", train=WIKITEXT["valid"])
    second = prepare(f"wikitext:{folder}", tmp_path / "two", tokenizer=tmp_path / "one" / "tokenizer.json")
    assert second.train.read(0).tolist() == first.validation.read(0).tolist()


def test_wikitext_without_what_it_needs_is_refused(tmp_path: Path) -> None:
    folder = write_wikitext(tmp_path / "wikitext", valid=" a \n", test=" a \n")
    message = "has no wiki.train.tokens .*the vocabulary is that of the training split.*wiki.valid.tokens, wiki.test"
    refused(message, tmp_path, f"wikitext:{folder}")
    refused("found no file of WikiText", tmp_path, f"wikitext:{tmp_path}")
    write_wikitext(folder, train=" a \n")
    refused("is read as words, not as bytes: give no tokenizer", tmp_path, f"wikitext:{folder}", tokenizer="bytes")
    write_wikitext(folder, "raw", train=" a \n")
    refused("both .tokens and .raw files of WikiText: keep one kind", tmp_path, f"wikitext:{folder}")
    (folder / "wiki.train.raw").unlink()
    (folder / "wiki.train.tokens").write_bytes(b"a\xff")
    refused("wiki.train.tokens is not UTF-8 at byte 1", tmp_path, f"wikitext:{folder}")


def test_words_and_sound_are_for_their_own_sources(tmp_path: Path) -> None:
    books = write_books(tmp_path / "books")
    refused(
        "books is text: the tokenizer words is for wikitext: or audio: sources", tmp_path, str(books), tokenizer="words"
    )
    prepare(f"wikitext:{write_wikitext(tmp_path / 'wikitext', **WIKITEXT)}", tmp_path / "data")
    refused("the tokenizer words is for wikitext:", tmp_path, str(books), tokenizer=tmp_path / "data")


# --- sound ---


def chirp(samples: int = 900) -> np.ndarray[Any, Any]:
    """A tone that rises, from silence to the full range."""
    at = np.arange(samples) / samples
    return at * np.sin(2 * math.pi * (5 * at + 30 * at**2))


def write_sound(
    path: Path, samples: np.ndarray[Any, Any], *, width: int = 2, rate: int = 8000, channels: int = 1
) -> None:
    """A WAV file whose channels are the samples times 1.5, 0.5, ... so that their mean is the samples."""
    weights = [1.0] if channels == 1 else [1.5, 0.5]
    scaled = np.stack([np.clip(samples * weight, -1, 1) for weight in weights], axis=1).ravel()
    whole = np.round(scaled * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        content = [int(v + 128 if width == 1 else v).to_bytes(width, "little", signed=width > 1) for v in whole]
        file.writeframes(b"".join(content))


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_any_width_are_read_as_they_were_written(tmp_path: Path, width: int, channels: int) -> None:
    samples = chirp() * 0.6
    write_sound(tmp_path / "chirp.wav", samples, width=width, channels=channels, rate=12_345)
    rate, found = read_wav(tmp_path / "chirp.wav")
    assert rate == 12_345
    assert np.abs(found - samples).max() < 1.5 / 2 ** (8 * width - 1) + 1e-9


def test_sound_becomes_bytes_of_mu_law_and_comes_back(tmp_path: Path) -> None:
    samples = {"a": chirp(), "b": chirp(500), "c": chirp(300) / 7}
    for name, content in samples.items():
        write_sound(tmp_path / "sound" / f"{name}.wav", content)
    said: list[str] = []
    prepare(f"audio:{tmp_path / 'sound'}", tmp_path / "data", holdout=3, progress=said.append)
    corpus = open_corpus(tmp_path / "data")
    assert "sound of 8,000 samples a second in 8-bit µ-law, channels mixed to one" in said[0]
    assert corpus.vocab_size == 257
    assert corpus.lossless
    for (name, content), split in zip(samples.items(), corpus.splits.values(), strict=True):
        assert split.documents[0] == Document(name, 0, len(content), words=0, bytes=len(content))
        ids = split.read(0)
        assert ids.tolist() == mu_law_encode(read_wav(tmp_path / "sound" / f"{name}.wav")[1]).tolist()
        (tmp_path / "back.wav").write_bytes(wav_of(ids, 8000))
        rate, back = read_wav(tmp_path / "back.wav")
        assert rate == 8000
        # A step of µ-law is at most 2.2 % of the sample, and of 1 / 255 near silence.
        assert (np.abs(back - content) <= 0.022 * np.abs(content) + 2e-4).all()
        assert np.abs(back - mu_law_decode(ids)).max() < 1e-4


def test_folders_are_splits_of_sound_too(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        write_sound(tmp_path / "sound" / split / "deep" / f"{split}.wav", chirp(50))
    corpus = prepare(f"audio:{tmp_path / 'sound'}", tmp_path / "data")
    assert {name: split.documents[0].title for name, split in corpus.splits.items()} == {
        "train": "train",
        "validation": "validation",
    }


def test_what_is_no_sound_is_refused(tmp_path: Path) -> None:
    sound = tmp_path / "sound"
    sound.mkdir()
    refused(r"sound has no \*\.wav files: convert other formats", tmp_path, f"audio:{sound}")
    (sound / "a.wav").write_bytes(b"RIFF....WAVE")
    refused(r"a\.wav is not a WAV file of integers \(PCM\)", tmp_path, f"audio:{sound}")
    write_sound(sound / "a.wav", chirp(0))
    refused(r"a\.wav is empty: take it out", tmp_path, f"audio:{sound}", holdout=0)
    write_sound(sound / "a.wav", chirp(9))
    write_sound(sound / "b.wav", chirp(9), rate=16_000)
    refused(r"a\.wav has 8000 samples per second, .*b\.wav has 16000: resample all to one", tmp_path, f"audio:{sound}")
    (sound / "b.wav").unlink()
    refused("has 1 document", tmp_path, f"audio:{sound}")
    refused("audio:sound is read as mu-law, not as bytes", tmp_path, f"audio:{sound}", tokenizer="bytes")
    prepare(f"audio:{sound}", tmp_path / "data", holdout=0)
    write_sound(sound / "a.wav", chirp(9), rate=16_000)
    message = r"has 16000 samples per second, .* is for 8000: resample the sound"
    refused(message, tmp_path, f"audio:{sound}", holdout=0, tokenizer=tmp_path / "data")
    shutil.move(sound / "a.wav", (sound / "test").mkdir() or sound / "test" / "a.wav")
    refused("has test but no train: add it or rename", tmp_path, f"audio:{sound}")


@pytest.mark.usefixtures("cpu")
def test_a_model_of_sound_trains_is_scored_and_writes_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    for number in range(3):
        write_sound(tmp_path / "sound" / f"{number}.wav", chirp(60 + number))
    corpus = prepare(f"audio:{tmp_path / 'sound'}", tmp_path / "data", holdout=3)
    model = tiny_run(corpus, tmp_path / "run", steps=2, batch_size=1, validate_every=2, sample_every=0)
    result = evaluate(model, corpus.test)
    assert result.total.bits_per_byte == pytest.approx(result.total.nats_per_token / math.log(2))
    assert result.to_dict()["word_perplexity"] is None
    assert "word perplexity   none, there are no words" in str(result)
    json.dumps(result.to_dict(), allow_nan=False)

    prompt = tmp_path / "sound" / "1.wav"
    arguments = ["generate", str(tmp_path / "run"), "--prompt", str(prompt), "--tokens", "10", "--seed", "1"]
    monkeypatch.setattr("sys.argv", ["compressive", *arguments])
    capsysbinary.readouterr()
    main()
    (tmp_path / "written.wav").write_bytes(capsysbinary.readouterr().out)
    rate, samples = read_wav(tmp_path / "written.wav")
    assert (rate, len(samples)) == (8000, 10)
    stream = Stream(model, corpus.tokenizer)
    stream.read(corpus.tokenizer.decode(mu_law_encode(read_wav(prompt)[1])))
    expected = corpus.tokenizer.encode(stream.write(10, seed=1))
    assert mu_law_encode(samples).tolist() == expected.tolist()

    write_sound(prompt, chirp(50), rate=16_000)
    with pytest.raises(SystemExit, match=r"has 16000 samples a second, the run's data 8000: convert it first"):
        main()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with pytest.raises(SystemExit, match=r"writes sound: send it to a file, compressive generate .* > sound\.wav"):
        main()


# --- official splits ---


def of_counts(known: Published, **changed: int) -> Split:
    """A split with these counts, and nothing else."""
    counts = {**known._asdict(), **changed}
    words = [counts["words"] or 7] + [0] * (counts["documents"] - 1)
    sizes = [counts["bytes"] or 9] + [0] * (counts["documents"] - 1)
    documents = tuple(Document("d", 0, 1, *measure) for measure in zip(words, sizes, strict=True))
    family = known.name.partition("-1")[0].partition("-2")[0] if known.name.startswith("Wiki") else known.name
    tokens = np.zeros(0, dtype=np.uint16)
    return Split(known.split, documents, tokens, counts["vocab_size"] or 257, True, "f", benchmark=family)


@pytest.mark.parametrize("known", SPLITS_OF_PAPERS, ids=lambda known: f"{known.name} {known.split}")
def test_a_split_is_official_only_with_exactly_the_published_counts(known: Published) -> None:
    assert of_counts(known).official == known.name
    assert of_counts(known, documents=known.documents + 1).official == ""
    for count in ("words", "bytes", "vocab_size"):
        if value := getattr(known, count):
            assert of_counts(known, **{count: value - 1}).official == ""


def test_the_sample_is_of_pg19_but_not_an_official_split(tmp_path: Path, corpus: Corpus) -> None:
    books = write_books(tmp_path / "books")
    shutil.copy(SAMPLE / "metadata.csv", books)
    of_pg19 = prepare(books, tmp_path / "data")
    assert of_pg19.validation.benchmark == "PG-19"
    assert of_pg19.validation.official == corpus.validation.official == corpus.validation.benchmark == ""
    index = json.loads((tmp_path / "data" / "documents.json").read_text(encoding="utf-8"))
    assert index["benchmark"] == "PG-19"


def test_a_score_says_whether_it_can_stand_beside_published_figures(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scored(split: Split) -> Evaluation:
        return evaluate(tiny_model(), split)

    short = replace(corpus.validation, documents=corpus.validation.documents[:1])
    plain = scored(truncate_split(short, corpus.tokenizer, 30))
    assert plain.conditions["benchmark"] is None
    assert "benchmark" not in str(plain)
    split = replace(truncate_split(short, corpus.tokenizer, 30), benchmark="PG-19")
    text = "PG-19, but not an official split: not comparable with published figures"
    assert scored(split).conditions["benchmark"] == text
    assert str(scored(split)).splitlines()[-1] == f"benchmark         {text}"
    words = split.documents[0].words
    monkeypatch.setattr(published, "SPLITS_OF_PAPERS", [Published("PG-19", "validation", 1, words=words)])
    assert scored(split).to_dict()["conditions"]["benchmark"] == "PG-19, the official validation split"
    # A part of an official split is none.
    assert scored(truncate_split(split, corpus.tokenizer, 20)).conditions["benchmark"] == text


def test_a_word_perplexity_on_wikitext_is_that_of_its_tokens(tmp_path: Path) -> None:
    folder = write_wikitext(tmp_path / "wikitext", train=WIKITEXT["train"] * 9, valid=WIKITEXT["valid"])
    corpus = prepare(f"wikitext:{folder}", tmp_path / "data")
    model = tiny_model(vocab_size=corpus.vocab_size, adaptive_cutoffs=(3, 6))
    score = evaluate(with_lengths(model, memory_length=20), corpus.validation).total
    assert score.word_perplexity == pytest.approx(math.exp(score.nats_per_token))
    stream = Stream(model, corpus.tokenizer)
    stream.read("the page\n")
    written = stream.write(12, seed=0)
    assert torch.from_numpy(corpus.tokenizer.encode(written)).numel() == 12
