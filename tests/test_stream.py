"""Reading and writing, however they are cut into calls, are one stream through one model."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressive_transformer.checkpoint import read_metadata
from compressive_transformer.data.tokenizers import ByteTokenizer, train_bpe
from compressive_transformer.errors import CompressiveError
from compressive_transformer.generate.sampling import Sampling, sample
from compressive_transformer.generate.stream import Stream
from compressive_transformer.generate.stream_state import StreamState, fingerprint
from compressive_transformer.model import CompressiveTransformer, with_lengths
from runs import MODEL
from small import assert_close, assert_same_memory, small_model

TEXT = "Call me Ishmael. Zwölf Boxkämpfer; 吾輩は猫である 👩‍👩‍👧 — and so on, line\nby line."
BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def model() -> CompressiveTransformer:
    return small_model(**{"vocab_size": 257, **MODEL}).eval()


@pytest.fixture
def stream(model: CompressiveTransformer) -> Stream:
    stream = Stream(model, BYTES)
    stream.read(TEXT[:40])
    return stream


def read(model: CompressiveTransformer, *pieces: str) -> Stream:
    stream = Stream(model, BYTES)
    for piece in pieces:
        stream.read(piece)
    return stream


def next_logits(stream: Stream) -> Tensor:
    assert stream.state.logits is not None
    return stream.state.logits


# --- reading ---


def test_reading_is_the_model_over_start_and_tokens(model: CompressiveTransformer) -> None:
    stream = read(model, TEXT)
    with torch.no_grad():
        output = model(torch.tensor([[BYTES.start, *BYTES.encode(TEXT)]]))
    assert_same_memory(model, stream.memory, output.memory)
    assert_close(next_logits(stream), output.logits[0, -1])


@pytest.mark.parametrize("seed", range(4))
def test_reading_in_pieces_is_reading_in_one_go(model: CompressiveTransformer, seed: int) -> None:
    rng = random.Random(seed)
    borders = [0, *sorted(rng.randint(0, len(TEXT)) for _ in range(10)), len(TEXT)]
    pieces = [TEXT[a:b] for a, b in itertools.pairwise(borders)]
    one, other = read(model, *pieces), read(model, TEXT)
    assert_same_memory(model, one.memory, other.memory)
    assert_close(next_logits(one), next_logits(other))
    assert one.write(30, temperature=0) == other.write(30, temperature=0)


def test_rotary_positions_stay_right_from_segment_to_segment() -> None:
    model = small_model(**{"vocab_size": 257, **MODEL, "position": "rotary"}).eval()
    one, other = read(model, *TEXT), read(model, TEXT)  # letter by letter
    assert_same_memory(model, one.memory, other.memory)
    text = one.write(30, temperature=0)
    assert text == other.write(30, temperature=0)
    assert_close(next_logits(one), next_logits(other))


def test_reading_nothing_only_begins_a_document(model: CompressiveTransformer) -> None:
    stream = read(model, "", "", TEXT, "")
    assert stream.memory.seen.tolist() == [1 + len(TEXT.encode())]
    assert read(model, "").memory.seen.tolist() == [1]
    assert read(model, "").write(9, seed=3) == Stream(model, BYTES).write(9, seed=3)


def test_memory_can_be_assigned_and_read_on_from(model: CompressiveTransformer, stream: Stream) -> None:
    kept = stream.memory
    first = stream.write(25, seed=1)
    stream.memory = kept
    stream.read("!")
    again = read(model, TEXT[:40], "!")
    assert_same_memory(model, stream.memory, again.memory)
    assert stream.write(25, seed=1) == again.write(25, seed=1)
    assert first


def test_nothing_is_generated_from_assigned_memory_before_a_read(
    model: CompressiveTransformer, stream: Stream, tmp_path: Path
) -> None:
    other = read(model, "Something else, whose next letter is not that of the stream.")
    other.memory = stream.memory
    for call in (lambda: other.write(3), lambda: other.score("abc")):
        with pytest.raises(
            CompressiveError, match=r"no next-token logits after assigning `memory`: call `read\(\)` first"
        ):
            call()
    other.save(tmp_path / "state")
    other = Stream.load(tmp_path / "state", model, BYTES)
    for one in (stream, other):
        one.read("!")  # without another start of a document
    assert_same_memory(model, other.memory, stream.memory)
    assert other.write(25, seed=1) == stream.write(25, seed=1)


def test_generated_text_is_in_memory_as_if_read(model: CompressiveTransformer) -> None:
    # A model that writes ASCII only, so that what it wrote can be read again.
    ascii_only = small_model(model.config).eval()
    with torch.no_grad():
        ascii_only.final_norm.bias.copy_(10 * ascii_only.embedding.weight[ord("a")])
    stream = read(ascii_only, "abc")
    written = stream.write(20, seed=0, top_k=3)
    assert_same_memory(ascii_only, stream.memory, read(ascii_only, "abc" + written).memory)
    both = read(ascii_only, "abc")
    assert both.write(12, temperature=0) + both.write(8, temperature=0) == read(ascii_only, "abc").write(
        20, temperature=0
    )


def test_a_state_set_back_continues_without_reading(model: CompressiveTransformer, stream: Stream) -> None:
    state = stream.state
    first = stream.write(25, seed=1)
    assert stream.state is stream.state is not state
    stream.state = state
    assert stream.write(25, seed=1) == first
    other = Stream(model, BYTES)
    other.state = state
    assert other.write(25, seed=1) == first


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(training: bool) -> None:
    model = small_model(**{"vocab_size": 257, **MODEL, "dropout": 0.5}).train(training)
    texts = {read(model, TEXT).write(10, seed=0) for _ in range(2)}
    assert len(texts) == 1  # nothing is dropped
    assert model.training == training


def test_a_failed_read_leaves_the_model_in_training_mode() -> None:
    stream = Stream(small_model(**{"vocab_size": 257, **MODEL}).train(), BYTES)
    with pytest.raises(CompressiveError, match=r"must be ids of 0 \.\. 256"):
        stream.score_tokens(torch.tensor([999]))
    assert stream.model.training


def test_memory_of_another_model_cannot_be_assigned(model: CompressiveTransformer, stream: Stream) -> None:
    before = stream.state
    for memory in (model.empty_memory(2), small_model(n_layers=3).empty_memory(1)):
        with pytest.raises(CompressiveError, match="memory does not fit"):
            stream.memory = memory
    assert stream.state is before


def test_raw_bytes_are_read_where_tokens_are_bytes(model: CompressiveTransformer) -> None:
    stream = Stream(model, BYTES)
    stream.read(TEXT.encode())
    assert_same_memory(model, stream.memory, read(model, TEXT).memory)
    stream.read(b"\xff\xfe")
    assert stream.memory.seen.tolist() == [3 + len(TEXT.encode())]
    words = train_bpe(["abc"], 258)
    with pytest.raises(CompressiveError, match="bytes are read only by a tokenizer whose tokens are bytes"):
        Stream(small_model(**{**MODEL, "vocab_size": 258}), words).read(b"abc")


# --- scoring ---


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_nats_of_the_model_in_any_pieces(model: CompressiveTransformer, seed: int) -> None:
    rng = random.Random(seed)
    borders = [0, *sorted(rng.randint(0, len(TEXT)) for _ in range(seed * 5)), len(TEXT)]
    stream = Stream(model, BYTES)
    found = torch.cat([stream.score(TEXT[a:b]) for a, b in itertools.pairwise(borders)])
    tokens = torch.tensor([[BYTES.start, *BYTES.encode(TEXT)]])
    with torch.no_grad():
        nats = model(tokens[:, :-1], targets=tokens[:, 1:]).nats[0]
    assert found.dtype == torch.float64
    assert_close(found, nats)
    assert_same_memory(model, stream.memory, read(model, TEXT).memory)
    assert Stream(model, BYTES).score("").shape == (0,)


def test_scores_after_generated_text_are_those_after_reading(model: CompressiveTransformer) -> None:
    written = read(model, TEXT)
    words = written.write(10, temperature=0)
    after = written.score("And then")
    with torch.no_grad():
        tokens = torch.tensor([[BYTES.start, *BYTES.encode(TEXT)]])
        for _ in range(10):
            token = model(tokens).logits[0, -1, :-1].argmax()
            tokens = torch.cat([tokens, token[None, None]], dim=1)
        tokens = torch.cat([tokens, torch.tensor([[*BYTES.encode("And then")]])], dim=1)
        nats = model(tokens[:, :-1], targets=tokens[:, 1:]).nats[0, -8:]
    assert words
    assert_close(after, nats)


# --- files ---


@pytest.mark.parametrize("read_before", [0, 3, 40, 75])
@pytest.mark.parametrize("compression", ["conv-overlap", "most-used"])
def test_a_loaded_stream_continues_exactly(tmp_path: Path, read_before: int, compression: str) -> None:
    model = small_model(**{"vocab_size": 257, **MODEL, "compression": compression}).eval()
    stream = Stream(model, BYTES)
    if read_before:
        stream.read(TEXT[:read_before])
        stream.write(5, seed=3)
    stream.save(tmp_path / "state.safetensors")
    again = Stream.load(tmp_path / "state.safetensors", model, BYTES)
    for one in (stream, again):
        one.read(TEXT[40:])
    assert torch.equal(next_logits(again), next_logits(stream))
    memories = [one.memory.state_dict() for one in (again, stream)]
    assert all(torch.equal(memories[0][name], memories[1][name]) for name in memories[1])
    assert again.write(30, seed=1) == stream.write(30, seed=1)


def test_a_stream_is_loaded_with_its_model_and_tokenizer_only(
    tmp_path: Path, model: CompressiveTransformer, stream: Stream
) -> None:
    path = tmp_path / "state.safetensors"
    stream.save(path)
    other = small_model(model.config, seed=1).eval()
    with pytest.raises(CompressiveError, match="not a stream of this model: its weights differs"):
        Stream.load(path, other, BYTES)
    longer = with_lengths(model, compressed_length=20)
    with pytest.raises(CompressiveError, match="not a stream of this model: its config differs"):
        Stream.load(path, longer, BYTES)
    stream.save(path)
    metadata = read_metadata(path)
    earlier = {name: value for name, value in json.loads(metadata["config"]).items() if name != "adaptive_factor"}
    save_file(load_file(path), path, {**metadata, "config": json.dumps(earlier)})  # of a release without that field
    Stream.load(path, model, BYTES)
    for config in ("", "{", "[]", "5", "null", '{"d_model": []}'):
        save_file(load_file(path), path, {**metadata, "config": config})
        with pytest.raises(CompressiveError, match="not a stream of this model: its config differs"):
            Stream.load(path, model, BYTES)
    bpe = train_bpe(["abc"], 257)
    Stream(model, bpe).save(path)
    assert Stream.load(path, model, bpe).memory.seen.tolist() == [0]
    with pytest.raises(CompressiveError, match="not a stream of this model: its tokenizer differs"):
        Stream.load(path, model, BYTES)


def test_a_state_keeps_its_newest_tokens_in_the_file(
    tmp_path: Path, model: CompressiveTransformer, stream: Stream
) -> None:
    path, model_id = tmp_path / "state.safetensors", fingerprint(model, BYTES)
    replace(stream.state, tail=torch.tensor([3, 1, 4])).save(path, model_id)
    state = StreamState.load(path, model, model_id)
    assert state.tail.tolist() == [3, 1, 4]
    assert state.seen == 1 + len(TEXT[:40].encode())
    assert Stream.load(path, model, BYTES).write(9, seed=1) == stream.write(9, seed=1)
    for tail in ("[[3]]", "3", "{}", "[3", '["a"]', "[1e400]"):
        save_file(load_file(path), path, {**read_metadata(path), "tail": tail})
        with pytest.raises(CompressiveError, match=r"damaged: its last tokens are not a list of ids"):
            StreamState.load(path, model, model_id)


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def with_(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_("logits", lambda logits: logits[1:]), "damaged: logits must be \\[vocab_size = 257\\]"),
        (without("recent.1"), "not the state of a memory"),
        (with_("seen", lambda seen: seen + 1), "damaged: memory does not fit: compressed, recent and pending"),
        (with_("seen", lambda seen: -seen), "seen must be int64"),
        (with_("seen", lambda seen: seen.double()), "seen must be int64"),
        (with_("seen", lambda seen: seen.repeat(2)), "seen must be int64"),
        (with_("recent.0", lambda states: states.long()), "states are torch.int64 on cpu"),
        (with_("compressed.0", lambda states: states[:, 1:]), "compressed, recent and pending states of layer 0"),
        (with_("pending.1", lambda states: states[0]), "compressed, recent and pending states of layer 1"),
        (with_("pending.1", lambda states: states[:, :, 1:]), "compressed, recent and pending states of layer 1"),
    ],
)
def test_a_damaged_state_is_refused_by_name(
    tmp_path: Path,
    model: CompressiveTransformer,
    stream: Stream,
    damage: Callable[[dict[str, Tensor]], object],
    message: str,
) -> None:
    path = tmp_path / "state.safetensors"
    stream.save(path)
    tensors, metadata = load_file(path), read_metadata(path)
    damage(tensors)
    save_file(tensors, path, metadata)
    with pytest.raises(CompressiveError, match=f"state.safetensors: damaged: .*{message}|state.safetensors.*{message}"):
        Stream.load(path, model, BYTES)


def test_a_file_that_is_no_state_is_refused_by_name(
    tmp_path: Path, model: CompressiveTransformer, stream: Stream
) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(CompressiveError, match=r"state.safetensors: no such file"):
        Stream.load(path, model, BYTES)
    stream.save(path)
    whole = path.read_bytes()
    for content in (b"", whole[:9], whole[: len(whole) // 2], whole[:-1], b"\xff" * 8 + whole[8:]):
        path.write_bytes(content)
        with pytest.raises(CompressiveError, match="not a readable safetensors file"):
            Stream.load(path, model, BYTES)
    save_file(model.state_dict(), path)
    with pytest.raises(CompressiveError, match="not a stream of this model: its format differs"):
        Stream.load(path, model, BYTES)


# --- writing ---


def test_the_seed_decides_the_text(model: CompressiveTransformer) -> None:
    texts = [read(model, TEXT).write(30, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    random_texts = {read(model, TEXT).write(30) for _ in range(2)}
    assert len(random_texts) == 2


def test_the_global_rng_state_is_neither_used_nor_changed(model: CompressiveTransformer) -> None:
    torch.manual_seed(0)
    first = read(model, TEXT).write(10, seed=1)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert read(model, TEXT).write(10, seed=1) == first
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_randomness_each_token_is_the_most_likely(model: CompressiveTransformer) -> None:
    tokens = [BYTES.start, *BYTES.encode(TEXT)]
    written: list[int] = []
    for _ in range(12):
        with torch.no_grad():
            logits = model(torch.tensor([[*tokens, *written]])).logits[0, -1]
        written.append(int(logits[:-1].argmax()))
    for options in ({"temperature": 0}, {"top_k": 1, "seed": 5}, {"top_p": 1e-9, "seed": 5}, {"temperature": 1e-310}):
        assert read(model, TEXT).write(12, **options) == BYTES.decode(written)


def test_iter_text_joined_is_write(model: CompressiveTransformer) -> None:
    options = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7}
    texts = list(read(model, TEXT).iter_text(40, **options))
    assert len(texts) > 10
    assert "".join(texts) == read(model, TEXT).write(40, **options)


def test_the_start_of_a_document_is_never_generated(model: CompressiveTransformer) -> None:
    eager = small_model(model.config).eval()
    with torch.no_grad():  # the start is by far the likeliest token, always
        eager.embedding.weight[BYTES.start] = 3.0
        eager.final_norm.bias.copy_(torch.full((16,), 3.0))
    fed: list[int] = []
    eager.embedding.register_forward_pre_hook(lambda module, inputs: fed.extend(inputs[0].flatten().tolist()))
    for options in ({"temperature": 0}, {"seed": 0}, {"seed": 0, "temperature": 5.0, "top_p": 0.5}):
        stream = read(eager, "ab")
        assert int(next_logits(stream).argmax()) == BYTES.start
        fed.clear()
        stream.write(10, **options)
        assert len(fed) == 10
        assert BYTES.start not in fed


def test_a_model_with_another_tokenizer_is_refused(model: CompressiveTransformer) -> None:
    with pytest.raises(CompressiveError, match="the tokenizer has 258 ids, the model 257; use the tokenizer"):
        Stream(model, train_bpe(["abc"], 258))


# --- stopping ---


@pytest.fixture
def scripted(model: CompressiveTransformer, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Writes TEXT, byte by byte."""
    script: Iterator[int] = iter(BYTES.encode(TEXT).tolist())
    monkeypatch.setattr("compressive_transformer.generate.sampling.sample", lambda *_, **__: next(script))
    return Stream(model, BYTES)


@pytest.mark.parametrize(
    "stop",
    ["C", "me", " Ishmael. Z", "ölf", "👩‍👧", "Call me", "l me Q", "line\nby line.", "so on; no", "line", "l", "ll"],
)
def test_text_ends_before_a_stop_string(scripted: Stream, stop: str) -> None:
    pieces = list(scripted.iter_text(len(TEXT.encode()), stop=stop))
    assert "".join(pieces) == TEXT.split(stop)[0]
    # It stops as soon as it can know, and the stop has been read.
    end = TEXT.find(stop)
    upto = TEXT if end < 0 else TEXT[: end + len(stop)]
    assert scripted.memory.seen.tolist() == [1 + len(upto.encode())]


def test_an_incomplete_stop_string_is_part_of_the_text(
    model: CompressiveTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = iter(b"aabaaab!aa")
    monkeypatch.setattr("compressive_transformer.generate.sampling.sample", lambda *_, **__: next(script))
    pieces = Stream(model, BYTES).iter_text(10, stop="aaab?")
    assert "".join(pieces) == "aabaaab!aa"
    script = iter(b"aaaab...")
    assert Stream(model, BYTES).write(8, stop="aab") == "aa"


def test_text_without_the_stop_string_is_complete(model: CompressiveTransformer) -> None:
    assert read(model, TEXT).write(30, seed=1, stop="never written") == read(model, TEXT).write(30, seed=1)


# --- sampling ---

LOGITS = torch.tensor([1.0, -1.0, 2.0, 0.0, float("-inf"), 1.5], dtype=torch.float64)


def draws(count: int = 5000, **options: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(**options)  # type: ignore[arg-type]
    tokens = [sample(LOGITS, sampling, generator) for _ in range(count)]
    return torch.tensor(tokens).bincount(minlength=6)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, [0, 1, 2, 3, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 5]),
        ({"temperature": 3.0}, [0, 1, 2, 3, 5]),
        ({"top_k": 2}, [2, 5]),
        ({"top_k": 3}, [0, 2, 5]),
        ({"top_k": 99}, [0, 1, 2, 3, 5]),
        # Probabilities in order: 0.469 (2), 0.285 (5), 0.173 (0), 0.064 (3), 0.023 (1).
        ({"top_p": 0.4}, [2]),
        ({"top_p": 0.5}, [2, 5]),
        ({"top_p": 0.9}, [0, 2, 5]),
        ({"top_p": 0.95, "top_k": 2}, [2, 5]),
        ({"top_p": 0.6, "top_k": 2}, [2]),  # 0.62 of what top_k left
    ],
)
def test_token_frequencies_are_those_of_the_distribution(options: dict[str, float], allowed: list[int]) -> None:
    kept = torch.full_like(LOGITS, float("-inf"))
    kept[allowed] = LOGITS[allowed]
    expected = torch.softmax(kept / options.get("temperature", 1.0), dim=0)
    found = draws(**options)
    assert found[expected == 0].sum() == 0
    deviation = (expected * (1 - expected) * 5000).sqrt()
    assert ((found - 5000 * expected).abs() <= 3 * deviation + 1e-9).all(), found.tolist()


def test_top_k_keeps_the_first_of_equally_likely_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    even = torch.zeros(8, dtype=torch.float64)
    found = {sample(even, Sampling(top_k=3), generator) for _ in range(200)}
    assert found == {0, 1, 2}


def test_options_can_be_a_sampling_keywords_or_both(model: CompressiveTransformer) -> None:
    sampling = Sampling(temperature=0.8, top_k=50, seed=7)
    text = read(model, TEXT).write(20, temperature=0.8, top_k=50, seed=7)
    assert read(model, TEXT).write(20, sampling) == text
    assert read(model, TEXT).write(20, Sampling(top_k=50), temperature=0.8, seed=7) == text
    assert Sampling(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="min_q"):
        read(model, TEXT).write(20, min_q=1)


# --- mistakes ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, r"tokens \(0\) must be 1 or more"),
        ({"tokens": -3}, r"tokens \(-3\) must be 1 or more"),
        ({"temperature": -0.1}, r"temperature \(-0\.1\) must be 0 .* or more"),
        ({"temperature": float("inf")}, r"temperature \(inf\) must be"),
        ({"temperature": float("nan")}, r"temperature \(nan\) must be"),
        ({"top_k": -1}, r"top_k \(-1\) must be 0 .* or more"),
        ({"top_p": 0.0}, r"top_p \(0\.0\) must be more than 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p \(1\.1\) must be"),
        ({"top_p": float("nan")}, r"top_p \(nan\) must be"),
        ({"seed": -1}, r"seed \(-1\) must be 0 or more"),
        ({"seed": 2**63}, r"seed \(\d+\) must be 0 or more, and less than 2\*\*63"),
        ({"stop": ""}, "stop must have at least one character"),
    ],
)
def test_invalid_options_are_refused_before_generation(stream: Stream, options: dict[str, float], message: str) -> None:
    before = stream.memory
    arguments = {"tokens": 5, **options}
    with pytest.raises(CompressiveError, match=message):
        stream.write(**arguments)
    with pytest.raises(CompressiveError, match=message):
        stream.iter_text(**arguments)
    assert stream.memory is before


def test_a_lone_surrogate_is_refused_and_nothing_is_read(stream: Stream) -> None:
    before = stream.memory
    with pytest.raises(CompressiveError, match=r"character 2 \(U\+D800\) is a lone surrogate"):
        stream.read("ab\ud800")
    assert stream.memory is before
