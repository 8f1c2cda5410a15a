"""However text is packed, compressed, cut into files or kept by other libraries: the same documents, or a clear no."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tracemalloc
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import pytest

from compressive_transformer.data import Corpus, open_corpus, prepare
from compressive_transformer.data.sources import open_source
from compressive_transformer.data.tokenizers import SentencePieceTokenizer, load_tokenizer
from compressive_transformer.errors import CompressiveError

SAMPLE = Path(str(files("compressive_transformer.apps.demo") / "sample"))
BOOK = (SAMPLE / "train/11.txt").read_text(encoding="utf-8")
TEXTS = ["old\r\nline ends\r", "吾輩は猫である。", BOOK[2000:2900], " ", "\u2028 last"]


def zstd_compress(content: bytes) -> bytes:
    zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    return zstd.compress(content)  # type: ignore[no-any-return]


COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstd_compress}
each_compression = pytest.mark.parametrize("suffix", COMPRESS)


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "title": f"t{n}"}) + "\n" for n, text in enumerate(texts)).encode()


def write(file: Path, content: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def same(one: Corpus, other: Corpus, *, titles: bool = True) -> None:
    """Equal tokens, and equal documents, at least but for their titles."""
    assert list(one.splits) == list(other.splits)
    for name, split in one.splits.items():
        assert split.tokens.tolist() == other.split(name).tokens.tolist()
        pairs = zip(split.documents, other.split(name).documents, strict=True)
        assert all(a.words == b.words and a.tokens == b.tokens and (a.title == b.title or not titles) for a, b in pairs)


def refused(message: str, tmp_path: Path, source: Any, **options: Any) -> None:
    with pytest.raises(CompressiveError, match=message) as caught:
        prepare(source, tmp_path / "refused", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("refused*"))


# --- compressed files ---


@each_compression
def test_compressed_text_is_that_text(tmp_path: Path, suffix: str) -> None:
    for split, texts in {"train": TEXTS, "test": TEXTS[:2]}.items():
        for number, text in enumerate(texts):
            write(tmp_path / f"plain/{split}/{number}.txt", text.encode())
            # Some as they are: files of both kinds may stand beside one another.
            packed = COMPRESS[suffix](text.encode()) if number % 2 == 0 else text.encode()
            write(tmp_path / f"packed/{split}/{number}.txt{suffix if number % 2 == 0 else ''}", packed)
        write(tmp_path / f"lines/{split}.jsonl{suffix}", COMPRESS[suffix](lines(texts)))
        write(tmp_path / f"folders/{split}/deep/1.jsonl{suffix}", COMPRESS[suffix](lines(texts)))
    plain = prepare(tmp_path / "plain", tmp_path / "a")
    same(prepare(tmp_path / "packed", tmp_path / "b"), plain)
    for name in ("lines", "folders"):
        same(prepare(tmp_path / name, tmp_path / f"{name}-data"), plain, titles=False)
    one = prepare(tmp_path / f"lines/test.jsonl{suffix}", tmp_path / "c", holdout=0)
    assert [document.title for document in one.train.documents] == ["t0", "t1"]
    assert one.train.tokens.tolist() == plain.test.tokens.tolist()


@each_compression
def test_compressed_lines_are_read_one_at_a_time(tmp_path: Path, suffix: str) -> None:
    record = json.dumps({"text": "word " * 20_000}).encode() + b"\n"
    file = write(tmp_path / f"large.jsonl{suffix}", COMPRESS[suffix](record * 200))
    tracemalloc.start()
    count = sum(1 for _ in open_source(file, holdout=0, field="text").read())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 200
    assert peak < 20 * len(record)


@each_compression
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_compressed_file_that_is_cut_off_or_damaged_is_refused(tmp_path: Path, suffix: str, kind: str) -> None:
    whole = COMPRESS[suffix](lines([BOOK[5000:5100]]))
    for length in (*range(0, 30), *range(30, len(whole), 11), len(whole) - 1):
        file = write(tmp_path / f"a.{kind}{suffix}", whole[:length])
        with pytest.raises(CompressiveError, match=rf"a\.{kind}\{suffix} is damaged or truncated \(.*\): download it"):
            list(open_source(file, holdout=0, field="text").read())
    for content in (b"no such thing", whole + b"more", whole[:40] + b"\x55\x55\x55" + whole[43:]):
        refused("is damaged or truncated", tmp_path, write(tmp_path / f"a.{kind}{suffix}", content), holdout=0)


def test_compressed_files_of_several_parts_are_read_to_the_end(tmp_path: Path) -> None:
    for suffix, compress in COMPRESS.items():
        file = write(tmp_path / f"a.txt{suffix}", compress(b"one ") + compress(b"two"))
        assert [document.content for _, document in open_source(file, holdout=0, field="text").read()] == ["one two"]


def test_without_a_library_for_zstd_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("backports.zstd", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    file = write(tmp_path / "a.txt.zst", b"x")
    message = r"reading \.zst files needs the library .*zstd: pip install 'compressive-transformer\[data\]'"
    refused(message, tmp_path, file, holdout=0)


def test_text_that_would_be_read_twice_or_left_out_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a/1.txt", b"text")
    write(tmp_path / "a/1.txt.gz", gzip.compress(b"text"))
    refused(r"a has both 1\.txt and 1\.txt\.gz: keep one of them", tmp_path, tmp_path / "a")
    write(tmp_path / "b/1.txt", b"text")
    write(tmp_path / "b/2.jsonl", lines(["text"]))
    refused(r"b has both 1\.txt and 2\.jsonl: keep one format", tmp_path, tmp_path / "b")
    write(tmp_path / "c/train.jsonl", lines(["text"]))
    write(tmp_path / "c/train.jsonl.gz", gzip.compress(lines(["text"])))
    refused(r"c has both train\.jsonl and train\.jsonl\.gz: keep one of them", tmp_path, tmp_path / "c")
    for name in ("a.parquet.gz", "a.csv.gz", ".gz", ".txt"):
        refused(r"must be a \.txt, \.jsonl or \.parquet file or a folder", tmp_path, write(tmp_path / name, b"x"))


def test_the_bytes_read_for_documents_are_those_of_the_files(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": TEXTS}), tmp_path / "a.parquet")
    for suffix, compress in {"": bytes, ".gz": gzip.compress}.items():
        write(tmp_path / f"a.jsonl{suffix}", compress(lines(TEXTS)))
        write(tmp_path / f"a.txt{suffix}", compress(BOOK.encode()))
    for name in ("a.parquet", "a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.gz", SAMPLE):
        source = open_source(tmp_path / name, holdout=0, field="text")
        assert sum(text.read for _, text in source.read()) == source.size > 0, name


# --- Parquet ---


def test_parquet_gives_the_documents_of_json_lines(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"{text} {number}" for number in range(9) for text in TEXTS]
    table = arrow.table({"id": range(45), "text": texts, "title": [f"t{n}" for n in range(45)]})
    write(tmp_path / "lines/train.jsonl", lines(texts))
    write(tmp_path / "lines/test.jsonl", lines(texts[:2]))
    expected = prepare(tmp_path / "lines", tmp_path / "a")
    for folder in ("files", "shards/train", "shards/test"):
        (tmp_path / folder).mkdir(parents=True)
    parquet.write_table(table[:30], tmp_path / "files/train-00000-of-00002.parquet", row_group_size=7)
    parquet.write_table(table[30:], tmp_path / "files/train-00001-of-00002.parquet", compression="zstd")
    parquet.write_table(table[:2], tmp_path / "files/test-00000-of-00001.parquet")
    parquet.write_table(table, tmp_path / "shards/train/0.parquet")
    parquet.write_table(table[:2], tmp_path / "shards/test/0.parquet")
    same(prepare(tmp_path / "files", tmp_path / "b"), expected)
    same(prepare(tmp_path / "shards", tmp_path / "c"), expected)
    one = prepare(tmp_path / "shards/train/0.parquet", tmp_path / "d", holdout=0)
    assert one.train.tokens.tolist() == expected.train.tokens.tolist()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_of_a_parquet_file_a_few_pages_are_in_memory(tmp_path: Path, compression: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    random = Random(0)
    texts = [random.randbytes(20_000).hex() for _ in range(300)]
    pages = {"use_dictionary": False, "write_batch_size": 4, "data_page_size": 2**16}
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet", compression=compression, **pages)
    pool = arrow.default_memory_pool()
    before = pool.bytes_allocated()
    read = open_source(tmp_path / "a.parquet", holdout=0, field="text").read()
    peaks = [pool.bytes_allocated() - before for _ in read]
    assert len(peaks) == len(texts)
    assert max(peaks) < 40_000 * 300 / 4


def test_parquet_without_text_or_damaged_is_refused_with_its_place(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"body": ["a"], "title": ["b"]}), file)
    refused(r"a\.parquet has no field 'text', it has body, title", tmp_path, file, holdout=0)
    parquet.write_table(arrow.table({"text": ["a", None]}), file)
    refused(r"a\.parquet, row 1: field 'text' must be text, not NoneType", tmp_path, file, holdout=0)
    parquet.write_table(arrow.table({"text": [BOOK[n : n + 50] for n in range(0, 5000, 50)]}), file)
    whole = file.read_bytes()
    for content in (b"", b"PAR1", whole[:-9], whole[9:], whole[:100] + b"\x55" * 2000 + whole[2100:]):
        message = r"a\.parquet is not a Parquet file, or damaged|cannot read .*a\.parquet"
        refused(message, tmp_path, write(file, content), holdout=0)


def test_without_pyarrow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = r"reading \.parquet files needs the library pyarrow: pip install 'compressive-transformer\[data\]'"
    refused(message, tmp_path, write(tmp_path / "a.parquet", b"x"), holdout=0)


# --- datasets and records ---


def test_datasets_in_memory_on_disk_and_streaming_equal_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "lines/train.jsonl", lines(TEXTS))
    write(tmp_path / "lines/test.jsonl", lines(TEXTS[:2]))
    expected = prepare(tmp_path / "lines", tmp_path / "files")
    titles = [f"t{number}" for number in range(len(TEXTS))]
    train = datasets.Dataset.from_dict({"text": TEXTS, "title": titles})
    splits = datasets.DatasetDict({"test": train.take(2), "train": train})
    same(prepare(splits, tmp_path / "dict"), expected)
    same(prepare({"train": train.to_iterable_dataset(), "test": train.take(2)}, tmp_path / "stream"), expected)
    splits.save_to_disk(tmp_path / "saved")
    same(prepare(f"hf:{tmp_path / 'saved'}", tmp_path / "from-disk"), expected)
    train.save_to_disk(tmp_path / "one")
    held_out = prepare(f"hf:{tmp_path / 'one'}", tmp_path / "one-data", holdout=3)
    same(held_out, prepare(tmp_path / "lines/train.jsonl", tmp_path / "lines-data", holdout=3))
    same(held_out, prepare(train, tmp_path / "object", holdout=3))
    assert json.loads((tmp_path / "one-data/documents.json").read_text())["source"] == "hf:one"


def test_a_configuration_of_a_dataset_is_named_after_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("en", "ja"))
    write(tmp_path / "set/README.md", f"---\nconfigs:\n{configs}---\n".encode())
    write(tmp_path / "set/en/train.jsonl", lines(["hello", "good bye"]))
    write(tmp_path / "set/ja/train.jsonl", lines(["吾輩は", "猫である"]))
    corpus = prepare(f"hf:{tmp_path / 'set'}:ja", tmp_path / "data")
    assert corpus.tokenizer.decode(corpus.train.tokens) == "吾輩は猫である"
    assert json.loads((tmp_path / "data/documents.json").read_text())["source"] == "hf:set:ja"
    refused(r"cannot load the dataset .*set: .*\['en', 'ja'\]", tmp_path, f"hf:{tmp_path / 'set'}")
    refused("cannot load the dataset .*set:fr: .*fr", tmp_path, f"hf:{tmp_path / 'set'}:fr")


def test_a_title_that_no_file_can_hold_is_written_as_far_as_it_can(tmp_path: Path) -> None:
    corpus = prepare([{"text": "a", "title": "The \ud800 end"}], tmp_path / "data", holdout=0)
    assert corpus.train.documents[0].title == "The ? end"


def test_records_can_be_given_and_must_be_readable_twice(tmp_path: Path) -> None:
    records = [{"text": text} for text in TEXTS]
    corpus = prepare({"train": records, "validation": records[:1]}, tmp_path / "data", tokenizer="bpe", vocab_size=260)
    assert [corpus.tokenizer.decode(corpus.train.read(number)) for number in (1, 2)] == TEXTS[1:3]
    assert corpus.validation.documents[0].title == "validation:0"
    for source in (iter(records), 3, {"train": (record for record in records)}):
        refused("a source must be a path, .* not .*: records are read more", tmp_path, source)
    refused("the dataset records must have a split train, it has test", tmp_path, {"test": records})
    refused("record 0 of records has no field 'body', it has text", tmp_path, records, field="body")


# --- SentencePiece ---


def train_sentence_piece(**options: Any) -> bytes:
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    settings = {"vocab_size": 500, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1, **options}
    sentences = iter(BOOK[:100_000].splitlines())
    library.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **settings)
    return model.getvalue()


LOSSLESS = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
    "user_defined_symbols": ["\n"],
}


@pytest.fixture(scope="module")
def lossless_model() -> bytes:
    return train_sentence_piece(**LOSSLESS)


@pytest.mark.parametrize(
    "options", [LOSSLESS, {"model_type": "bpe", "character_coverage": 1.0}], ids=["lossless", "as it comes"]
)
def test_a_sentence_piece_model_gives_the_ids_of_its_own_library(tmp_path: Path, options: dict[str, Any]) -> None:
    library = pytest.importorskip("sentencepiece")
    model = train_sentence_piece(**options)
    reference = library.SentencePieceProcessor(model_proto=model)
    text = BOOK[100_000:140_000].replace("_", "")
    if options is not LOSSLESS:
        text = "".join(character for character in text if character in BOOK[:100_000])
    write(tmp_path / "books/1.txt", text.encode())
    file = write(tmp_path / "m.model", model)
    prepare(tmp_path / "books", tmp_path / "data", tokenizer=file, holdout=0)
    file.unlink()
    corpus = open_corpus(tmp_path / "data")
    ids = corpus.train.read(0).tolist()
    assert ids == reference.encode(text)
    assert corpus.vocab_size == reference.get_piece_size() + 1
    assert corpus.lossless == (options is LOSSLESS)
    assert json.loads((tmp_path / "data/documents.json").read_text())["tokenizer"] == "sentencepiece"
    decoder = corpus.tokenizer.decoder()
    shown = "".join(map(decoder, ids[:3000])) + decoder.flush()
    assert shown == corpus.tokenizer.decode(ids[:3000]) == reference.decode(ids[:3000])


def test_what_sentence_piece_does_not_keep_is_measured(tmp_path: Path, lossless_model: bytes) -> None:
    file = write(tmp_path / "m.model", lossless_model)
    for text, lossless in {"  two  spaces\n\nand 猫\0 ": True, "a \u2581 b": False}.items():
        corpus = prepare([{"text": text}], tmp_path / str(lossless), tokenizer=file, holdout=0)
        assert corpus.lossless == lossless


def test_special_pieces_are_text_where_they_stand_in_a_text(lossless_model: bytes) -> None:
    tokenizer = SentencePieceTokenizer(lossless_model)
    text = "<s> and </s> and <unk>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not {0, 1, 2} & set(tokenizer.encode(text).tolist())


def test_what_is_no_model_or_lacks_a_character_is_refused(tmp_path: Path, lossless_model: bytes) -> None:
    for content in (b"", b"no model", lossless_model[:1000]):
        with pytest.raises(CompressiveError, match=r"m\.model: this is not a SentencePiece model"):
            load_tokenizer(write(tmp_path / "m.model", content))
    SentencePieceTokenizer(lossless_model).save(tmp_path / "tokenizer.json")
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    for value in (3, "%%%", "AAAA", "AAA", "é"):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**saved, "model": value}))
        with pytest.raises(CompressiveError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path / "tokenizer.json")
    plain = SentencePieceTokenizer(train_sentence_piece(model_type="char"))
    with pytest.raises(CompressiveError, match="the tokenizer has no token for '猫'"):
        plain.encode("a 猫")
    with pytest.raises(CompressiveError, match="lone surrogate"):
        plain.encode("\ud800")


def test_without_sentence_piece_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(CompressiveError, match=r"needs the library sentencepiece: pip install 'compressive-transf"):
        load_tokenizer(write(tmp_path / "m.model", b"x"))
