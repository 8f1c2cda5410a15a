"""Text comes back from its tokens, whatever it is, and mistakes end in one clear line."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from compressive_transformer.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    MuLawTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    mu_law_decode,
    mu_law_encode,
    train_bpe,
    train_words,
)
from compressive_transformer.errors import CompressiveError

ALICE = (files("compressive_transformer.apps.demo") / "sample/train/11.txt").read_text(encoding="utf-8")[:60_000]

TEXTS = [
    "",
    " ",
    "  two  spaces \t and a tab\n\n\n",
    "line\r\nline\rline\n",
    "Straße, naïve café, Ångström, ½ ﬁ",
    "Привет, мир! שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "吾輩は猫である。名前はまだ無い。 안녕하세요",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u00e9 \ufeff \u2581 \ufffd",
    "\x00\x01\x1f\x7f\x85\xa0\u2028\U0010ffff",
    "<|endoftext|> <s></s> <unk> [MASK] <DW52> Ġ Ċ ▁",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ALICE[:5_000],
]


def foreign(
    *, vocabulary: list[str], decoder: decoders.Decoder | None, unknown: str | None = None
) -> tokenizers.Tokenizer:
    """A character-level tokenizer in the way of SentencePiece, with a special token."""
    pieces = [("<s>", 0.0), *[(piece, -1.0) for piece in vocabulary]]
    names = [piece for piece, _ in pieces]
    model = models.Unigram(pieces, unk_id=names.index(unknown) if unknown else None, byte_fallback="<0x00>" in names)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    if decoder:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentencepiece_like() -> HuggingFaceTokenizer:
    """With byte fallback, as Llama 2 and Gemma have it."""
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1),
    ]
    vocabulary = [
        "<unk>",
        *[f"<0x{byte:02X}>" for byte in range(256)],
        "▁",
        *"abcdefghijklmnopqrstuvwxyz<>",
        "▁the",
    ]
    tokenizer = foreign(vocabulary=vocabulary, decoder=decoders.Sequence(parts), unknown="<unk>")
    return HuggingFaceTokenizer(tokenizer)


BYTES = ByteTokenizer()
BPE = train_bpe([ALICE, *TEXTS], vocab_size=600)
SENTENCEPIECE = sentencepiece_like()
WORDS = train_words(["the cat sat on the mat\n\nthe <unk> is the end\n"])
SOUND = MuLawTokenizer(8000)

every = pytest.mark.parametrize(
    "tokenizer",
    [BYTES, BPE, SENTENCEPIECE, WORDS, SOUND],
    ids=["bytes", "bpe", "sentencepiece", "words", "mu-law"],
)

lossless = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])


@lossless
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_hard_texts_come_back_as_they_were(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


@lossless
@given(text=st.text())
def test_any_text_comes_back_and_never_holds_the_start(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ((ids >= 0) & (ids < tokenizer.start)).all()


def test_byte_ids_are_the_bytes() -> None:
    assert BYTES.encode("aé\n").tolist() == [97, 0xC3, 0xA9, 10]
    assert (BYTES.vocab_size, BYTES.start) == (257, 256)


def test_bpe_has_the_size_asked_for_and_is_shorter_than_bytes() -> None:
    assert (BPE.vocab_size, BPE.start) == (600, 599)
    assert len(BPE.encode(ALICE)) < 0.6 * len(BYTES.encode(ALICE))


def test_bpe_without_merges_still_knows_every_byte() -> None:
    tokenizer = train_bpe(["a"], vocab_size=257)
    assert tokenizer.vocab_size == 257
    assert sorted(tokenizer.encode("aé😀").tolist()) == sorted(tokenizer.encode("😀éa").tolist())
    assert len(tokenizer.encode("aé😀")) == 7


def test_bpe_learnt_twice_from_the_same_text_is_the_same() -> None:
    assert train_bpe([ALICE, *TEXTS], vocab_size=600).to_json() == BPE.to_json()


def test_special_tokens_of_other_models_are_ordinary_text_to_bpe() -> None:
    ids = train_bpe([ALICE], vocab_size=600).encode("<|endoftext|>")
    assert len(ids) > 3
    assert ids.tolist() != BPE.encode("endoftext").tolist()


@pytest.mark.parametrize("vocab_size", [256, 0, -1])
def test_a_vocabulary_smaller_than_the_bytes_is_refused(vocab_size: int) -> None:
    with pytest.raises(CompressiveError, match=rf"vocab_size \({vocab_size}\) must be at least 257"):
        train_bpe([ALICE], vocab_size=vocab_size)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, SENTENCEPIECE], ids=["bytes", "bpe", "sentencepiece"])
@pytest.mark.parametrize("surrogate", [chr(0xD800), chr(0xDFFF)])
def test_a_lone_surrogate_is_refused_with_its_position(tokenizer: Tokenizer, surrogate: str) -> None:
    with pytest.raises(CompressiveError, match=rf"character 3 \(U\+{ord(surrogate):04X}\) is a lone surrogate"):
        tokenizer.encode(f"abc{surrogate}d")


# --- decoding one by one ---


def decode_one_by_one(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.decoder()
    return "".join(map(decoder, ids)) + decoder.flush()


@lossless
@given(data=st.data())
def test_decoding_one_by_one_equals_decode_for_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    assert decode_one_by_one(tokenizer, ids) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, BPE.vocab_size - 2)))
def test_bpe_decodes_as_the_library_does(ids: list[int]) -> None:
    assert BPE.decode(ids) == tokenizers.Tokenizer.from_str(BPE.to_json()).decode(ids)


@given(text=st.text(alphabet="the <s>az\n😀é"))
def test_decoding_one_by_one_equals_decode_for_a_foreign_tokenizer(text: str) -> None:
    ids = SENTENCEPIECE.encode(text)
    assert decode_one_by_one(SENTENCEPIECE, ids.tolist()) == SENTENCEPIECE.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, SENTENCEPIECE], ids=["bytes", "bpe", "sentencepiece"])
def test_text_is_shown_as_soon_as_its_character_is_complete(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.decoder()
    shown = ""
    for id in tokenizer.encode("the 🜛 q").tolist():
        new = decoder(id)
        assert "\ufffd" not in new
        shown += new
    assert shown == "the 🜛 q"
    assert decoder.flush() == ""


@lossless
def test_a_flush_returns_the_incomplete_rest_and_resets(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.decoder()
    rocket = tokenizer.encode("🜛").tolist()
    assert "".join(map(decoder, rocket[:-1])) == ""
    assert decoder.flush() == "\ufffd"
    assert "".join(map(decoder, rocket)) == "🜛"


@every
@pytest.mark.parametrize("beyond", [-1, 0])
def test_ids_that_do_not_exist_are_refused(tokenizer: Tokenizer, beyond: int) -> None:
    id = tokenizer.vocab_size if beyond == 0 else beyond
    with pytest.raises(CompressiveError, match=f"token id {id} does not exist: ids are 0 to {tokenizer.start}"):
        tokenizer.decode([id])
    with pytest.raises(CompressiveError, match=f"token id {id} does not exist"):
        tokenizer.decoder()(id)


def test_the_start_stands_for_no_text() -> None:
    for tokenizer in (BYTES, BPE, SENTENCEPIECE, WORDS, SOUND):
        assert tokenizer.decode([tokenizer.start]) == ""
        assert tokenizer.decoder()(tokenizer.start) == ""


# --- tokenizers of others ---


def test_a_foreign_tokenizer_adds_and_recognises_no_special_tokens() -> None:
    theirs = tokenizers.Tokenizer.from_str(BPE.to_json())
    theirs.add_special_tokens(["<|endoftext|>"])
    theirs.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", BPE.vocab_size - 1)]
    )
    text = "Alice<|endoftext|>"
    ours = HuggingFaceTokenizer(tokenizers.Tokenizer.from_str(theirs.to_str()))
    assert ours.encode(text).tolist() == BPE.encode(text).tolist()
    assert theirs.encode(text).ids.count(BPE.vocab_size - 1) == 2


def test_a_foreign_tokenizer_neither_cuts_nor_pads() -> None:
    tokenizer = tokenizers.Tokenizer.from_str(SENTENCEPIECE.to_json())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(HuggingFaceTokenizer(tokenizer).encode("abcdefgh")) == 9


def test_an_unknown_character_is_named() -> None:
    tokenizer = HuggingFaceTokenizer(foreign(vocabulary=["<unk>", "▁", *"abc"], decoder=None, unknown="<unk>"))
    assert len(tokenizer.encode("ab c")) == 6 - 1
    with pytest.raises(CompressiveError, match="the tokenizer has no token for 'é'"):
        tokenizer.encode("abé")


def test_a_word_level_tokenizer_names_the_unknown_word() -> None:
    model = models.WordLevel({"hello": 0, "[UNK]": 7}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = HuggingFaceTokenizer(tokenizer)
    assert wrapped.vocab_size == 9  # holes in the vocabulary count, and the start
    with pytest.raises(CompressiveError, match="no token for 'world'"):
        wrapped.encode("hello world")


def test_a_failure_inside_the_library_is_one_clear_line() -> None:
    model = models.WordLevel({"hello": 0}, unk_token="[UNK]")
    with pytest.raises(CompressiveError, match=r"the tokenizer cannot encode the text: .*UNK"):
        HuggingFaceTokenizer(tokenizers.Tokenizer(model)).encode("world")


def test_added_tokens_of_byte_level_tokenizers_decode_as_in_the_library() -> None:
    theirs = tokenizers.Tokenizer.from_str(BPE.to_json())
    theirs.add_special_tokens(["<|start of text|>", "<|é 中|>"])
    ours = HuggingFaceTokenizer(tokenizers.Tokenizer.from_str(theirs.to_str()))
    assert ours.vocab_size == BPE.vocab_size + 2
    ids = [*BPE.encode("Alice ").tolist(), BPE.vocab_size - 1, BPE.vocab_size]
    assert ours.decode(ids) == "Alice <|start of text|><|é 中|>" == theirs.decode(ids, skip_special_tokens=False)


# --- files ---


@every
def test_a_saved_tokenizer_is_the_same_when_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer)
        assert loaded.vocab_size == tokenizer.vocab_size
        assert loaded.to_json() == tokenizer.to_json()
        assert loaded.encode("the cat").tolist() == tokenizer.encode("the cat").tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_our_bpe_is_a_file_that_hugging_face_reads(tmp_path: Path) -> None:
    BPE.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(ALICE).ids == BPE.encode(ALICE).tolist()


def test_saving_where_there_is_no_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(CompressiveError, match=r"cannot write .*none/tokenizer\.json"):
        BYTES.save(tmp_path / "none" / "tokenizer.json")


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokenizer.json"
    BPE.save(file)

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(CompressiveError, match="No space left on device"):
        BYTES.save(file)
    assert isinstance(load_tokenizer(file), HuggingFaceTokenizer)
    assert list(tmp_path.iterdir()) == [file]


UNTRAINED = tokenizers.Tokenizer(models.BPE()).to_str()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a tokenizer.json"),
        (b"{", "is not a tokenizer.json"),
        (b"\x80\x04pickle", "is not a tokenizer.json"),
        (b"[]", "is not a tokenizer.json"),
        (b"3", "is not a tokenizer.json"),
        (b'{"model": {}}', "is not a tokenizer.json"),
        (b"[" * 100_000, "is not a tokenizer.json"),
        (UNTRAINED.encode(), "has no tokens"),
        (json.dumps({"compressive_transformer": "bytes", "version": 2}).encode(), "does not know: update the"),
        (json.dumps({"compressive_transformer": "words", "version": 1}).encode(), "does not know: update the"),
        (json.dumps({"compressive_transformer": "words", "version": 2, "words": ["a"]}).encode(), "does not know"),
        (
            json.dumps({"compressive_transformer": "words", "version": 1, "words": ["a"]}).encode(),
            "<unk> and <eos> must",
        ),
        (json.dumps({"compressive_transformer": "mu-law", "version": 1, "rate": "8k"}).encode(), "does not know"),
        (json.dumps({"compressive_transformer": "mu-law", "version": 1, "rate": 0}).encode(), r"rate \(0\) must be 1"),
    ],
    ids=lambda value: str(value[:24]),
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CompressiveError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(CompressiveError, match=r"no tokenizer at .*tokenizer\.json"):
            load_tokenizer(path)


@settings(max_examples=30)
@given(text=st.text(max_size=30))
def test_a_lossy_tokenizer_is_loaded_and_loses_what_it_loses(text: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(BPE.to_json())
    tokenizer.normalizer = normalizers.Lowercase()
    ours = HuggingFaceTokenizer(tokenizer)
    assert ours.decode(ours.encode(text)) == tokenizer.normalizer.normalize_str(text)


# --- words ---


def test_words_are_ordered_by_frequency_with_the_ends_of_lines_among_them() -> None:
    text = "b a b\nb c a\n\n"
    tokenizer = train_words([text])
    assert [tokenizer.decode([id]) for id in range(tokenizer.start)] == [" b", " \n", " a", " c", " <unk>"]
    assert tokenizer.encode(text).tolist() == [0, 2, 0, 1, 0, 3, 2, 1, 1]
    assert tokenizer.measure(tokenizer.encode(text)) == (9, len(" b a b \n b c a \n \n"))


@given(lines=st.lists(st.lists(st.sampled_from(["the", "cat", "mat", "<unk>"]))))
def test_text_in_the_layout_of_wikitext_comes_back_from_its_words(lines: list[list[str]]) -> None:
    text = "".join("".join(f" {word}" for word in line) + " \n" for line in lines)
    ids = WORDS.encode(text)
    assert WORDS.decode(ids) == text == decode_one_by_one(WORDS, ids.tolist())
    assert len(ids) == sum(map(len, lines)) + len(lines)


def test_an_unknown_word_becomes_unk_and_the_last_line_may_be_open() -> None:
    assert WORDS.decode(WORDS.encode("the dog\nsat")) == " the <unk> \n sat"
    assert WORDS.encode("").tolist() == []


@pytest.mark.parametrize("words", [["a", "<unk>"], ["<eos>"], ["a", "a", "<unk>", "<eos>"]])
def test_a_vocabulary_must_have_the_two_special_words_and_none_twice(words: list[str]) -> None:
    with pytest.raises(CompressiveError, match="the words of a vocabulary must differ, <unk> and <eos> must be"):
        WordTokenizer(words)


# --- sound ---


def test_mu_law_is_the_published_formula_and_each_step_comes_back() -> None:
    steps = np.arange(256)
    samples = mu_law_decode(steps)
    assert mu_law_encode(samples).tolist() == steps.tolist()
    assert samples.tolist() == sorted(samples)
    assert (samples[0], samples[255]) == pytest.approx((-1, 1))
    for x in (-1.0, -0.3, -0.001, 0.0, 0.02, 0.7, 1.0):
        compressed = math.copysign(math.log(1 + 255 * abs(x)) / math.log(256), x)
        step = int(mu_law_encode(np.array([x]))[0])
        assert abs(step - (compressed + 1) / 2 * 255) <= 0.5
    # Finer near silence: the widest step is as wide as 86 of the narrowest ones.
    assert np.diff(samples).max() / np.diff(samples).min() > 80


@given(content=st.binary(max_size=50))
def test_samples_come_back_as_bytes_and_as_characters(content: bytes) -> None:
    ids = SOUND.encode(content)
    assert ids.tolist() == list(content)
    assert SOUND.encode(SOUND.decode(ids)).tolist() == list(content)
    assert decode_one_by_one(SOUND, ids.tolist()) == SOUND.decode(ids)
    assert SOUND.measure(ids) == (0, len(content))


def test_text_is_no_sound() -> None:
    with pytest.raises(CompressiveError, match=r"this tokenizer is for sound, not for text: give a \.wav file"):
        SOUND.encode("猫")


@pytest.mark.parametrize("tokenizer", [BPE, SENTENCEPIECE, WORDS], ids=["bpe", "sentencepiece", "words"])
def test_bytes_are_refused_where_tokens_are_not_bytes(tokenizer: Tokenizer) -> None:
    assert BYTES.encode(b"\xff\x00").tolist() == [255, 0]
    with pytest.raises(CompressiveError, match="bytes are read only by a tokenizer whose tokens are bytes: decode"):
        tokenizer.encode(b"\xff")


def test_bytes_are_measured_exactly_within_a_character() -> None:
    ids = BYTES.encode("猫 é".encode()[1:-1])
    assert BYTES.measure(ids) == (2, 4)
    assert BPE.measure(BPE.encode("two words")) == (2, 9)
