"""What stands on disk is what the source says, and a mistake leaves nothing behind but one clear line."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from compressive_transformer.data import Corpus, Split, open_corpus, prepare
from compressive_transformer.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, train_bpe
from compressive_transformer.errors import CompressiveError

SAMPLE = Path(str(files("compressive_transformer.apps.demo") / "sample"))

HARD = [
    "Das Boot\r\nlief aus.\r\n",
    "old Mac\rline ends\r",
    "吾輩は猫である。\u3000名前はまだ無い。",
    "👩‍👩‍👧‍👦 e\u0301 \u2581 \ufeff\x00\x1f \x85 end",
    "<|endoftext|><DW52> colored",
    " ",
    "\r\n",
    "\n\n\ttabs\t\n",
]


def write_folder(folder: Path, texts: list[str], prefix: str = "text") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{prefix}{number:03}.txt").write_bytes(text.encode("utf-8"))
    return folder


def read_texts(split: Split, corpus: Corpus) -> list[str]:
    return [corpus.tokenizer.decode(split.read(number)) for number in range(len(split.documents))]


def translated(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def count_words(text: str) -> int:
    """Runs of characters that are no whitespace, counted one character at a time."""
    pairs = zip(" " + text, text, strict=False)
    return sum(before.isspace() and not character.isspace() for before, character in pairs)


@pytest.fixture
def small(tmp_path: Path) -> Corpus:
    return prepare(write_folder(tmp_path / "texts", HARD), tmp_path / "data", holdout=4)


def fails_with(message: str, tmp_path: Path, source: str | Path, **options: Any) -> None:
    """Preparing fails with this message, in one line, and leaves nothing, not even parents of the folder."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CompressiveError, match=message) as caught:
        prepare(source, tmp_path / "new" / "data", **options)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


# --- what stands on disk ---


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_every_document_comes_back_and_is_counted_right(tmp_path: Path, kind: str) -> None:
    prepare(write_folder(tmp_path / "texts", HARD), tmp_path / "data", tokenizer=kind, vocab_size=270, holdout=0)
    corpus = open_corpus(tmp_path / "data")
    assert corpus.lossless
    assert read_texts(corpus.train, corpus) == [translated(text) for text in HARD]
    offset = 0
    for document, text in zip(corpus.train.documents, map(translated, HARD), strict=True):
        assert document.offset == offset
        assert document.tokens == len(corpus.tokenizer.encode(text))
        assert document.bytes == len(text.encode("utf-8"))
        assert document.words == count_words(text)
        offset += document.tokens
    assert len(corpus.train.tokens) == offset


def test_the_sample_has_the_words_that_its_readme_says(tmp_path: Path) -> None:
    corpus = prepare(SAMPLE, tmp_path / "data")
    words = {name: sum(document.words for document in split.documents) for name, split in corpus.splits.items()}
    assert words == {"train": 342_801, "validation": 75_651, "test": 80_370}
    with (SAMPLE / "metadata.csv").open(encoding="utf-8", newline="") as file:
        titles = {row[0]: row[1] for row in csv.reader(file)}
    for name, split in corpus.splits.items():
        stems = sorted(path.stem for path in (SAMPLE / name).iterdir())
        assert [document.title for document in split.documents] == [titles[stem] for stem in stems]


def test_bpe_learns_from_the_training_documents_only(tmp_path: Path) -> None:
    source = tmp_path / "texts"
    write_folder(source / "train", ["the cat sat on the mat, the cat sat on the mat"])
    write_folder(source / "test", ["zyx zyx zyx zyx zyx zyx zyx zyx zyx zyx zyx"])
    corpus = prepare(source, tmp_path / "data", tokenizer="bpe", vocab_size=300)
    learnt = train_bpe([(source / "train/text000.txt").read_text()], 300)
    assert corpus.tokenizer.to_json() == learnt.to_json()
    assert corpus.train.documents[0].tokens < corpus.train.documents[0].bytes / 2
    assert corpus.test.documents[0].tokens == corpus.test.documents[0].bytes


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_tokens_are_two_bytes_where_the_ids_fit(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    vocabulary = {"hello": 0, "world": vocab_size - 2}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    HuggingFaceTokenizer(tokenizer).save(tmp_path / "tokenizer.json")
    source = write_folder(tmp_path / "texts", ["hello world hello"])
    corpus = prepare(source, tmp_path / "data", tokenizer=tmp_path / "tokenizer.json", holdout=0)
    assert corpus.vocab_size == vocab_size
    assert corpus.train.tokens.dtype == np.dtype(dtype)
    assert corpus.train.read(0).tolist() == [0, vocab_size - 2, 0]
    assert (tmp_path / "data/train.bin").stat().st_size == 3 * np.dtype(dtype).itemsize


def test_tokens_are_mapped_read_only_and_hold_no_start(small: Corpus) -> None:
    assert isinstance(small.train.tokens, np.memmap)
    assert not small.train.tokens.flags.writeable
    assert small.train.start_id == small.tokenizer.start == 256
    assert int(small.train.tokens.max()) < 256


def test_part_of_a_document_is_that_part(small: Corpus) -> None:
    whole = small.train.read(1)
    assert whole.dtype == np.int64
    assert small.train.read(1, 2, 5).tolist() == whole[2:5].tolist()
    assert small.train.read(1, 3).tolist() == whole[3:].tolist()
    assert small.train.read(1, 3, 3).size == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((99,), "train has documents 0 to 3, not 99"),
        ((-1,), "not -1"),
        ((0, 5, 4), "tokens 5 to 4 of 'text000' do not exist: it has 19"),
        ((0, 0, 20), "tokens 0 to 20"),
        ((0, -1, 3), "tokens -1 to 3"),
    ],
)
def test_a_part_that_does_not_exist_is_refused(small: Corpus, arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(CompressiveError, match=message):
        small.train.read(*arguments)


def test_the_index_says_how_the_corpus_was_made_and_names_no_path(small: Corpus) -> None:
    content = (small.path / "documents.json").read_text(encoding="utf-8")
    index = json.loads(content)
    assert index["source"] == "texts"
    assert index["reading"] == "CRLF and CR are read as LF"
    assert index["split_rule"] == "of every 4 documents in order the 2nd is for validation, the 3rd for test"
    assert index["tokenizer"] == "bytes"
    assert str(small.path.parent) not in content


# --- splits ---


def titles(split: Split) -> list[str]:
    return [document.title for document in split.documents]


@given(count=st.integers(3, 25), holdout=st.integers(3, 12))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_document_of_every_holdout_goes_to_validation_and_one_to_test(
    tmp_path_factory: pytest.TempPathFactory, count: int, holdout: int
) -> None:
    folder = tmp_path_factory.mktemp("holdout")
    corpus = prepare(write_folder(folder / "texts", ["text"] * count), folder / "data", holdout=holdout)
    names = [f"text{number:03}" for number in range(count)]
    parts = [titles(split) for split in (corpus.train, corpus.validation, corpus.test)]
    assert parts[1] == names[1::holdout]
    assert parts[2] == names[2::holdout]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == names


def test_without_holdout_everything_is_for_training(tmp_path: Path) -> None:
    corpus = prepare(write_folder(tmp_path / "texts", HARD), tmp_path / "data", holdout=0)
    assert list(corpus.splits) == ["train"]
    for name in ("validation", "test", "valid"):
        with pytest.raises(CompressiveError, match=f"has no {name} split: it has train; prepare it"):
            corpus.split(name)
    with pytest.raises(CompressiveError, match="no validation split"):
        _ = corpus.validation
    with pytest.raises(CompressiveError, match="no test split"):
        _ = corpus.test


def test_documents_are_in_the_order_of_their_names_at_any_depth(tmp_path: Path) -> None:
    source = tmp_path / "texts"
    for name in ("b/1.txt", "a/2.txt", "c.txt", "a/1.txt", "b/notes.md", "a/.txt.swp"):
        write_folder((source / name).parent, [])
        (source / name).write_text(name)
    corpus = prepare(source, tmp_path / "data", holdout=0)
    assert read_texts(corpus.train, corpus) == ["a/1.txt", "a/2.txt", "b/1.txt", "c.txt"]


def test_folders_named_as_splits_are_the_splits(tmp_path: Path) -> None:
    source = tmp_path / "texts"
    write_folder(source / "train", ["a"], "only")
    write_folder(source / "validation", ["b", "c"], "val")
    corpus = prepare(source, tmp_path / "data", holdout=10)
    assert list(corpus.splits) == ["train", "validation"]
    assert titles(corpus.validation) == ["val000", "val001"]
    assert json.loads((tmp_path / "data/documents.json").read_text())["split_rule"] == "as the source has them"


def test_one_file_is_one_document_and_parents_of_the_corpus_are_made(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "texts", HARD) / "text000.txt"
    corpus = prepare(str(source), str(tmp_path / "many/corpora/data"), holdout=0)
    assert corpus.path == tmp_path / "many/corpora/data"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "texts"]
    assert read_texts(corpus.train, corpus) == [translated(HARD[0])]


# --- JSON lines and datasets ---


def write_lines(file: Path, records: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def test_json_lines_give_the_same_tokens_as_files(tmp_path: Path, small: Corpus) -> None:
    file = write_lines(
        tmp_path / "books.jsonl", [{"body": text, "title": f"text{i:03}"} for i, text in enumerate(HARD)]
    )
    corpus = prepare(file, tmp_path / "lines", field="body", holdout=4)
    for name, split in small.splits.items():
        assert (small.path / f"{name}.bin").read_bytes() == (tmp_path / f"lines/{name}.bin").read_bytes()
        assert corpus.split(name).documents == split.documents


def test_json_lines_of_splits_are_the_splits_and_blank_lines_nothing(tmp_path: Path) -> None:
    write_lines(tmp_path / "texts/train.jsonl", [{"text": "a\u2028b"}, {"text": "c", "title": "C"}])
    (tmp_path / "texts/test.jsonl").write_text('{"text": "d"}\n\n  \n')
    corpus = prepare(tmp_path / "texts", tmp_path / "data")
    assert titles(corpus.train) == ["train:1", "C"]
    assert read_texts(corpus.train, corpus) == ["a\u2028b", "c"]
    assert titles(corpus.test) == ["test:1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is not JSON"),
        (b"\xff\xfe{}", "line 2 is not JSON in UTF-8"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b'"text"', "line 2 must be a record such as"),
        (b'{"body": "x"}', "line 2 has no field 'text', it has body"),
        (b"{}", "line 2 has no field 'text', it has none"),
        (b'{"text": 3}', "line 2: field 'text' must be text, not int"),
        (b'{"text": ""}', "line 2 is empty"),
        (b'{"text": "ab\\ud800"}', r"line 2: character 2 \(U\+D800\) is a lone surrogate"),
    ],
    ids=lambda value: str(value[:12]),
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "books.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    fails_with(f"books.jsonl, {message}", tmp_path, file, holdout=0)


def test_a_dataset_gives_the_same_tokens_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_lines(tmp_path / "set/train.jsonl", [{"text": text, "short_book_title": "A book"} for text in HARD])
    write_lines(tmp_path / "set/test.jsonl", [{"text": text} for text in HARD[:2]])
    corpus = prepare(f"hf:{tmp_path / 'set'}", tmp_path / "data", tokenizer="bpe", vocab_size=260)
    assert list(corpus.splits) == ["train", "test"]
    assert read_texts(corpus.train, corpus) == [translated(text) for text in HARD]
    assert titles(corpus.train) == ["A book"] * len(HARD)
    assert titles(corpus.test) == ["test:0", "test:1"]
    assert str(tmp_path) not in (tmp_path / "data/documents.json").read_text()


def test_a_dataset_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    fails_with("cannot load the dataset .*none", tmp_path, f"hf:{tmp_path / 'none'}")
    write_lines(tmp_path / "set/test.jsonl", [{"text": "a"}])
    fails_with("must have a split train, it has test", tmp_path, f"hf:{tmp_path / 'set'}")
    write_lines(tmp_path / "set/train.jsonl", [{"body": "a"}])
    fails_with("record 0 of train has no field 'text', it has body", tmp_path, f"hf:{tmp_path / 'set'}")


def test_without_the_library_datasets_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails_with(r"pip install 'compressive-transformer\[data\]'", tmp_path, "hf:pg19")


# --- tokenizers of others ---


def test_a_lossy_tokenizer_is_recorded_as_such(tmp_path: Path) -> None:
    lower = tokenizers.Tokenizer.from_str(train_bpe(HARD, 300).to_json())
    lower.normalizer = normalizers.Lowercase()
    HuggingFaceTokenizer(lower).save(tmp_path / "tokenizer.json")
    lossless = prepare(write_folder(tmp_path / "low", ["all is low"]), tmp_path / "a", tokenizer=tmp_path, holdout=0)
    lossy = prepare(write_folder(tmp_path / "up", ["Not", "all"]), tmp_path / "b", tokenizer=tmp_path, holdout=0)
    assert (lossless.lossless, lossless.train.lossless) == (True, True)
    assert (lossy.lossless, lossy.train.lossless) == (False, False)
    assert (open_corpus(tmp_path / "b").lossless, lossy.train.documents[0].words) == (False, 1)


def test_a_tokenizer_that_lacks_a_character_stops_with_the_file_named(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.Unigram([("?", 0.0), ("a", -1.0)], unk_id=0))
    HuggingFaceTokenizer(tokenizer).save(tmp_path / "tokenizer.json")
    source = write_folder(tmp_path / "texts", ["aaa", "aba"])
    message = r"text001\.txt: the tokenizer has no token for 'b'"
    fails_with(message, tmp_path, source, tokenizer=tmp_path, holdout=0)


def test_a_document_without_tokens_is_named(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    HuggingFaceTokenizer(tokenizer).save(tmp_path / "tokenizer.json")
    source = write_folder(tmp_path / "texts", ["a a", "   "])
    fails_with(r"text001\.txt has no tokens", tmp_path, source, tokenizer=str(tmp_path), holdout=0)


# --- mistakes ---


Make = Callable[[Path], Path]

SOURCES: dict[str, tuple[Make, str]] = {
    "missing": (lambda path: path / "none", "no source at .*none: give a folder"),
    "empty folder": (
        lambda path: write_folder(path / "texts", []),
        r"texts has no \.txt, \.jsonl or \.parquet files \(no files at all\)",
    ),
    "not UTF-8": (
        lambda path: write_bytes(write_folder(path / "texts", ["a"]) / "z.txt", b"caf\xe9"),
        r"z\.txt is not UTF-8 at byte 3",
    ),
    "empty file": (
        lambda path: write_bytes(write_folder(path / "texts", ["a"]) / "z.txt", b""),
        r"z\.txt is empty: take it out",
    ),
    "too few": (
        lambda path: write_folder(path / "texts", ["a", "b"]),
        "texts has 2 document.* too few for validation and test .* set holdout to 0",
    ),
    "one file": (
        lambda path: write_folder(path / "texts", ["a"]) / "text000.txt",
        "too few for validation and test",
    ),
    "no train": (
        lambda path: write_folder(path / "texts/test", ["a"]).parent,
        "texts has test but no train: add it",
    ),
    "empty split": (
        lambda path: write_folder(write_folder(path / "texts/train", ["a"]).parent / "test", []).parent,
        r"test has no \.txt, \.jsonl or \.parquet files",
    ),
    "empty lines of a split": (
        lambda path: (
            write_lines(write_lines(path / "texts/train.jsonl", [{"text": "a"}]).parent / "test.jsonl", []).parent
        ),
        "texts has no documents for test",
    ),
    "empty lines": (lambda path: write_lines(path / "texts.jsonl", []), "has no documents for train"),
    "other suffixes": (
        lambda path: write_bytes(write_bytes(path / "texts/a.md", b"a") / "README", b"a"),
        r"\.parquet files \(1 with \.md, 1 with no suffix\): rename",
    ),
    "both kinds": (
        lambda path: write_lines(write_folder(path / "texts/train", ["a"]).parent / "train.jsonl", [{}]).parent,
        r"texts has both train/ and train\.jsonl",
    ),
    "other file": (
        lambda path: write_bytes(path / "texts/a.md", b"a") / "a.md",
        r"a\.md must be a \.txt, \.jsonl or \.parquet file or a folder; \.txt or \.jsonl files may",
    ),
    "bad metadata": (
        lambda path: write_bytes(write_folder(path / "texts", ["a"]) / "metadata.csv", b"1,\xff"),
        r"metadata\.csv must be a CSV file",
    ),
}


def write_bytes(file: Path, content: bytes) -> Path:
    """The folder in which the file now is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file.parent


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_bad_source_is_named_and_leaves_nothing(tmp_path: Path, name: str, tokenizer: str) -> None:
    make, message = SOURCES[name]
    fails_with(message, tmp_path, make(tmp_path), tokenizer=tokenizer, vocab_size=260)


@pytest.mark.parametrize("holdout", [-1, 1, 2])
def test_a_holdout_that_cannot_be_is_refused(tmp_path: Path, holdout: int) -> None:
    source = write_folder(tmp_path / "texts", HARD)
    fails_with(rf"holdout \({holdout}\) must be 0 .* or at least 3", tmp_path, source, holdout=holdout)


def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "texts", HARD)
    fails_with(r"vocab_size \(100\)", tmp_path, source, tokenizer="bpe", vocab_size=100)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "texts", HARD)
    fails_with("no tokenizer at .*gpt2: give", tmp_path, source, tokenizer=tmp_path / "gpt2")


def test_what_exists_is_never_overwritten(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "texts", HARD)
    (tmp_path / "empty").mkdir()
    prepare(source, tmp_path / "empty")
    before = (tmp_path / "empty/documents.json").read_bytes()
    for out in (tmp_path / "empty", source, source / "text000.txt"):
        with pytest.raises(CompressiveError, match="exists and is not an empty folder: remove it"):
            prepare(source, out)
    assert (tmp_path / "empty/documents.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "texts"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_an_interruption_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    source = write_folder(tmp_path / "texts", HARD)

    def fail(handle: int) -> None:
        raise failure

    monkeypatch.setattr("os.fsync", fail)
    expected = CompressiveError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected):
        prepare(source, tmp_path / "data")
    assert list(tmp_path.iterdir()) == [source]


def test_progress_says_what_each_split_holds(tmp_path: Path) -> None:
    messages: list[str] = []
    prepare(write_folder(tmp_path / "t", ["a b", "c", "d"]), tmp_path / "data", progress=messages.append)
    assert messages == [
        "train: 1 documents, 3 tokens, 2 words",
        "validation: 1 documents, 1 tokens, 1 words",
        "test: 1 documents, 1 tokens, 1 words",
    ]


# --- opening ---


def damaged(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A change to the index of a corpus."""

    def damage(path: Path) -> None:
        index = json.loads((path / "documents.json").read_text())
        change(index)
        (path / "documents.json").write_text(json.dumps(index))

    return damage


def first(index: dict[str, Any]) -> dict[str, Any]:
    return index["splits"]["train"]["documents"][0]  # type: ignore[no-any-return]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (
        lambda path: (path / "documents.json").unlink(),
        r"cannot read .*documents\.json.* prepare it again",
    ),
    "no tokens": (lambda path: (path / "test.bin").unlink(), r"cannot read .*test\.bin.* prepare it again"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), r"no tokenizer at .*tokenizer\.json"),
    "tokens cut": (
        lambda path: (path / "test.bin").write_bytes(b"ab"),
        r"test\.bin has 2 bytes, its index says \d+",
    ),
    "tokens longer": (
        lambda path: (path / "train.bin").write_bytes((path / "train.bin").read_bytes() + b"\0\0"),
        r"train\.bin has \d+ bytes",
    ),
    "index cut": (lambda path: (path / "documents.json").write_text('{"format'), "is not JSON"),
    "index deep": (lambda path: (path / "documents.json").write_text("[" * 100_000), "is not JSON"),
    "index not UTF-8": (lambda path: (path / "documents.json").write_bytes(b"\xff"), "is not JSON"),
    "index a list": (lambda path: (path / "documents.json").write_text("[]"), "is not the index of a corpus"),
    "other format": (damaged(lambda index: index.update(format="x")), "is not the index of a corpus"),
    "later version": (
        damaged(lambda index: index.update(version=2)),
        "has version 2, this release reads version 1",
    ),
    "other dtype": (
        damaged(lambda index: index.update(dtype="float16")),
        "dtype 'float16' must be uint16 or uint32",
    ),
    "dtype a list": (damaged(lambda index: index.update(dtype=[])), r"dtype \[\] must be"),
    "wider dtype": (
        damaged(lambda index: index.update(dtype="uint32")),
        r"\.bin has \d+ bytes, its index says",
    ),
    "other vocabulary": (
        damaged(lambda index: index.update(vocab_size=300)),
        "is for vocab_size 300, .* has 257",
    ),
    "vocabulary a text": (damaged(lambda index: index.update(vocab_size="257")), "vocab_size a number"),
    "lossless a text": (
        damaged(lambda index: index.update(lossless="yes")),
        "lossless must be true or false",
    ),
    "no splits": (damaged(lambda index: index.pop("splits")), "splits must be train"),
    "no train": (damaged(lambda index: index["splits"].pop("train")), "splits must be train"),
    "path as a split": (damaged(lambda index: index["splits"].update({"../x": {}})), "splits must be train"),
    "no documents": (
        damaged(lambda index: index["splits"]["test"].update(documents=[])),
        "test must have a list",
    ),
    "split a list": (damaged(lambda index: index["splits"].update(test=[])), "split test must have a list"),
    "document a number": (
        damaged(lambda index: index["splits"]["train"].update(documents=[3])),
        "document 0 of train must have bytes, offset, title, tokens, words",
    ),
    "title a number": (damaged(lambda index: first(index).update(title=3)), "document 0 of train must have"),
    "tokens negative": (
        damaged(lambda index: first(index).update(tokens=-3)),
        "document 0 of train must have",
    ),
    "words a bool": (damaged(lambda index: first(index).update(words=True)), "document 0 of train must have"),
    "field too many": (damaged(lambda index: first(index).update(path="x")), "document 0 of train must have"),
    "field too few": (damaged(lambda index: first(index).pop("bytes")), "document 0 of train must have"),
    "offset wrong": (
        damaged(lambda index: first(index).update(offset=1)),
        "document 0 of train must begin at token 0",
    ),
    "tokens wrong": (
        damaged(lambda index: first(index).update(tokens=1)),
        "document 1 of train must begin at token 1",
    ),
    "tokens none": (
        damaged(lambda index: first(index).update(tokens=0)),
        "must begin at token 0 and have tokens",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_corpus_is_refused_with_the_file_named(small: Corpus, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(small.path)
    with pytest.raises(CompressiveError, match=message) as caught:
        open_corpus(small.path)
    assert str(small.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompressiveError, match=r"no corpus at .*none: make one with `compressive prepare SOURCE"):
        open_corpus(tmp_path / "none")


def test_an_id_that_cannot_be_is_found_when_it_is_read(small: Corpus) -> None:
    file = small.path / "train.bin"
    file.write_bytes(file.read_bytes()[:-2] + b"\x00\x01")  # 256, the start
    split = open_corpus(small.path).train
    with pytest.raises(CompressiveError, match="have id 256, but ids end at 255: the corpus is damaged"):
        split.read(len(split.documents) - 1)


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    def fingerprint(folder: Path, texts: list[str], **options: Any) -> str:
        return prepare(write_folder(folder / "texts", texts), folder / "data", **options).fingerprint

    one = fingerprint(tmp_path / "1", HARD)
    assert fingerprint(tmp_path / "2", HARD) == one == open_corpus(tmp_path / "1/data").fingerprint
    # Not even a change that keeps every number of the index goes unnoticed.
    swapped = [*HARD[:-1], HARD[-1].replace("tabs", "stab")]
    others = [
        fingerprint(tmp_path / "3", swapped),
        fingerprint(tmp_path / "4", HARD, holdout=3),
        fingerprint(tmp_path / "5", HARD, tokenizer="bpe", vocab_size=257),
    ]
    assert len({one, *others}) == 4


def test_the_index_holds_the_sha256_of_each_file_of_tokens(small: Corpus) -> None:
    index = json.loads((small.path / "documents.json").read_text())
    for name, entry in index["splits"].items():
        assert entry["sha256"] == hashlib.sha256((small.path / f"{name}.bin").read_bytes()).hexdigest()


def test_byte_tokens_on_disk_are_little_endian_words_of_the_bytes(small: Corpus) -> None:
    expected = "".join(translated(text) for number, text in enumerate(HARD) if number % 4 in (0, 3))
    assert (small.path / "train.bin").read_bytes() == b"".join(bytes([b, 0]) for b in expected.encode("utf-8"))
    assert isinstance(small.tokenizer, ByteTokenizer)
