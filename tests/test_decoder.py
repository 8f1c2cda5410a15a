"""Decoding token by token with cached projections is the model, in float64 to the last digits."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from compressive_transformer import Memory, Stream, evaluate, load, open_corpus, save
from compressive_transformer.config import ModelConfig
from compressive_transformer.data import prepare
from compressive_transformer.data.tokenizers import ByteTokenizer
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import truncate_split
from compressive_transformer.generate import CachedDecoder, Precision
from compressive_transformer.model import CompressiveTransformer
from runs import tiny_model, write_books
from small import (
    assert_close,
    assert_same_memory,
    configs,
    each_position,
    lanes_of,
    layered,
    random_tokens,
    small_config,
    small_model,
)

LAW = settings(max_examples=20, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def no_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


def memory_after(model: CompressiveTransformer, *lengths: int) -> Memory:
    """Lanes that have read `lengths` tokens."""
    tokens = random_tokens(len(lengths), max(1, *lengths), seed=9)
    return model(tokens, model.empty_memory(len(lengths)), torch.tensor(lengths)).memory


def assert_decodes(model: CompressiveTransformer, memory: Memory, steps: int) -> None:
    """The decoder gives the logits and the memory of the model, step by step."""
    decoder = CachedDecoder(model, memory)
    assert_same_memory(model, decoder.memory, memory)
    for step, tokens in enumerate(random_tokens(memory.batch_size, steps, seed=3).T.contiguous()):
        output = model(tokens[:, None], memory)
        memory = output.memory
        assert_close(decoder.step(tokens), output.logits[:, 0])
        if step % 3 == 0:
            assert_same_memory(model, decoder.memory, memory)
    assert_same_memory(model, decoder.memory, memory)


@LAW
@given(configs, st.lists(st.integers(0, 30), min_size=1, max_size=3), st.booleans())
@pytest.mark.filterwarnings("ignore::compressive_transformer.CompressiveWarning")
def test_decoding_is_the_model_from_any_memory_in_every_variant(
    config: ModelConfig, lengths: list[int], one_age: bool
) -> None:
    model = small_model(config).eval()
    assert_decodes(model, memory_after(model, *(lengths[:1] * len(lengths) if one_age else lengths)), 14)


@layered
@each_position
def test_decoding_is_the_model_where_layers_differ(fields: dict[str, object], position: dict[str, str]) -> None:
    model = small_model(**{**fields, **position}).eval()
    assert_decodes(model, memory_after(model, 17), 15)


@pytest.mark.parametrize("fields", [{"memory_length": 0}, {"memory_length": (5, 0)}, {"compressed_length": (0, 3)}])
def test_usage_is_that_of_the_model_for_lanes_of_several_ages(
    fields: dict[str, object],
) -> None:
    model = small_model(compression="most-used", **fields).eval()
    for lengths in ((8, 8), (8, 17), (0, 3, 17)):
        assert_decodes(model, memory_after(model, *lengths), 9)


def test_decoding_is_the_model_with_an_adaptive_vocabulary() -> None:
    model = small_model(adaptive_cutoffs=(3, 6), adaptive_factor=2).eval()
    assert_decodes(model, memory_after(model, 6, 6), 12)


def test_decoding_is_the_paper_s_algorithm_in_plain_loops() -> None:
    model = small_model().eval()
    tokens = random_tokens(1, 30)
    (lane,) = lanes_of(model, 1)
    decoder = CachedDecoder(model, model.empty_memory(1))
    decoded = torch.cat([decoder.step(tokens[:, at]) for at in range(30)])
    assert isinstance(lane, reference.Lane)
    assert_close(decoded, lane.read(tokens[0]))


def test_lanes_of_other_ages_change_nothing_for_a_lane() -> None:
    model = small_model().eval()
    memory, tokens = memory_after(model, 9, 4, 0, 9), random_tokens(4, 12)
    together = CachedDecoder(model, memory)
    logits = torch.stack([together.step(column) for column in tokens.T])
    for lane in range(4):
        alone = CachedDecoder(model, memory.select(torch.tensor([lane])))
        assert_close(torch.stack([alone.step(column[lane : lane + 1]) for column in tokens.T])[:, 0], logits[:, lane])


def test_memory_that_was_handed_out_does_not_change_and_can_be_gone_on_from() -> None:
    model = small_model().eval()
    decoder = CachedDecoder(model, memory_after(model, 6))
    kept = decoder.memory
    before = {name: states.clone() for name, states in kept.state_dict().items()}
    tokens = random_tokens(1, 11)[0].split(1)
    first = [decoder.step(token) for token in tokens]
    assert all(torch.equal(states, before[name]) for name, states in kept.state_dict().items())
    decoder.restart(kept)
    for token, logits in zip(tokens, first, strict=True):
        assert torch.equal(decoder.step(token), logits)


@pytest.mark.parametrize("compression", ["conv", "most-used"])
@each_position
def test_lanes_that_are_selected_go_on_as_those_of_the_model(compression: str, position: dict[str, str]) -> None:
    model = small_model(compression=compression, **position).eval()
    tokens = random_tokens(4, 20)
    # Each place keeps its age, as in a beam search; ages change places; fewer lanes; more.
    for indices in ([1, 0, 2], [1, 1, 2], [2, 0, 0], [1], [0, 2, 2, 1]):
        decoder = CachedDecoder(model, memory_after(model, 9, 9, 4))
        for column in tokens[:3, :5].T:  # commits of the first two lanes and of the third
            decoder.step(column)
        kept = decoder.memory
        before = {name: states.clone() for name, states in kept.state_dict().items()}
        decoder.select(torch.tensor(indices))
        memory = kept.select(torch.tensor(indices))
        assert decoder.seen.tolist() == memory.seen.tolist()
        for column in tokens[: len(indices), 5:].T:
            output = model(column[:, None], memory)
            memory = output.memory
            assert_close(decoder.step(column), output.logits[:, 0])
        assert_same_memory(model, decoder.memory, memory)
        assert all(torch.equal(states, before[name]) for name, states in kept.state_dict().items())


def test_nothing_is_dropped_and_the_model_stays_in_its_mode() -> None:
    model = small_model(dropout=0.5).train()
    decoder = CachedDecoder(model, model.empty_memory(1))
    logits = torch.cat([decoder.step(token) for token in random_tokens(1, 9)[0].split(1)])
    assert model.training
    assert_close(logits, model.eval()(random_tokens(1, 9)).logits[0])


# --- lanes that join and leave ---


@torch.no_grad()
def assert_lanes_decode(model: CompressiveTransformer, lengths: list[int], steps: int, *, seed: int = 0) -> None:
    """Lanes that have read `lengths` tokens come, step and go at random; each gives what the model gives it alone."""
    rng, decoder = random.Random(seed), CachedDecoder(model)
    lanes: list[Memory] = []  # as the model has it, in the order of places
    waiting = [
        model(random_tokens(1, max(1, length), seed=length), None, torch.tensor([length])).memory for length in lengths
    ]
    for step in range(steps):
        while waiting and (not lanes or rng.random() < 0.7):
            lanes.append(waiting.pop())
            assert decoder.join(lanes[-1]) == len(lanes) - 1
        tokens = random_tokens(1, len(lanes), seed=step)[0]
        logits = decoder.step(tokens)
        for place, token in enumerate(tokens):
            output = model(token[None, None], lanes[place])
            assert_close(logits[place], output.logits[0, 0])
            lanes[place] = output.memory
        if rng.random() < 0.3:
            place = rng.randrange(len(lanes))
            assert_same_memory(model, decoder.leave(place), lanes[place])
            waiting.append(lanes[place])
            lanes[place] = lanes[-1]
            lanes.pop()
        assert decoder.batch_size == len(lanes)
    for place, memory in enumerate(lanes):
        assert_same_memory(model, decoder.lane(place), memory)


@settings(LAW, max_examples=10)
@pytest.mark.filterwarnings("ignore::compressive_transformer.CompressiveWarning")
@given(configs, st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 99))
def test_lanes_join_and_leave_and_decode_as_each_alone(config: ModelConfig, lengths: list[int], seed: int) -> None:
    assert_lanes_decode(small_model(config).eval(), lengths, 12, seed=seed)


@layered
@each_position
def test_lanes_decode_together_where_layers_differ(fields: dict[str, object], position: dict[str, str]) -> None:
    assert_lanes_decode(small_model(**{**fields, **position}).eval(), [17, 4, 0], 12)


def test_usage_is_counted_for_lanes_that_join_and_leave() -> None:
    for fields in ({}, {"memory_length": 0}, {"memory_length": (5, 0)}, {"compressed_length": (0, 3)}):
        assert_lanes_decode(small_model(compression="most-used", **fields).eval(), [8, 17, 3], 10)


def test_lanes_decode_together_with_an_adaptive_vocabulary() -> None:
    assert_lanes_decode(small_model(adaptive_cutoffs=(3, 6), adaptive_factor=2).eval(), [6, 1], 8)


def test_the_memory_of_a_lane_does_not_change_later() -> None:
    model = small_model().eval()
    decoder = CachedDecoder(model)
    decoder.join(model.empty_memory(1))
    for token in random_tokens(1, 7)[0]:
        decoder.step(token[None])
    kept = decoder.lane(0)
    before = {name: states.clone() for name, states in kept.state_dict().items()}
    for token in random_tokens(1, 9)[0]:
        decoder.step(token[None])
    for name, states in kept.state_dict().items():
        assert torch.equal(states, before[name])


def test_lanes_that_do_not_fit_are_refused() -> None:
    decoder = CachedDecoder(small_model().eval())
    with pytest.raises(CompressiveError, match=r"tokens must be integers \[batch = 0\], got"):
        decoder.step(torch.tensor([1]))
    with pytest.raises(CompressiveError, match=r"place \(0\) must be that of one of the 0 lanes"):
        decoder.leave(0)
    with pytest.raises(CompressiveError, match="memory does not fit"):
        decoder.join(small_model(small_config(d_model=4)).empty_memory(1))


@torch.no_grad()
@each_position
def test_a_lane_is_not_touched_by_what_an_earlier_one_left_in_its_place(position: dict[str, str]) -> None:
    model = small_model(**position).eval()
    broken, healthy = model(random_tokens(1, 23)).memory, model(random_tokens(1, 9, seed=1)).memory
    broken = broken._map(lambda states: torch.full_like(states, torch.nan))
    decoder = CachedDecoder(model, broken)
    for token in random_tokens(1, 3)[0]:  # NaN in the places of the segment, too
        decoder.step(token[None])
    decoder.leave(0)
    memories = [healthy, model(random_tokens(1, 10, seed=2)).memory]
    assert [decoder.join(memory) for memory in memories] == [0, 1]
    for step in range(6):
        tokens = random_tokens(1, 2, seed=step)[0]
        for place, logits in enumerate(decoder.step(tokens)):
            output = model(tokens[place][None, None], memories[place])
            memories[place] = output.memory
            assert_close(logits, output.logits[0, 0])


# --- cost ---


def test_a_token_projects_itself_and_a_commit_only_what_it_compresses(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two layers; segments of 4, so that each commit evicts 4 states: two groups of 2.
    model = small_model(compression_rate=2, memory_length=4, compressed_length=6).eval()
    decoder = CachedDecoder(model, memory_after(model, 24))
    projected: list[int] = []
    for block in model.blocks:
        block.attention.key_value.register_forward_hook(lambda module, inputs, _: projected.append(inputs[0].shape[1]))
    monkeypatch.setattr(CompressiveTransformer, "forward", None)  # the model reads nothing
    for count in (0, 2, 4):
        assert projected == [2] * count
        for token in random_tokens(1, 4)[0].split(1):
            decoder.step(token)


def test_buffers_do_not_grow_with_the_stream() -> None:
    model = small_model().eval()
    decoder = CachedDecoder(model, model.empty_memory(2))

    def held() -> int:
        states = [decoder._pending, *(states for layer in decoder._layers for states in layer.tensors().values())]
        rows = [table.rows for tables in decoder._packed._tables.values() for table in tables]
        views = [len(cache._views) for cache in decoder._caches]
        return sum(map(torch.numel, [*states, *(cache.buffer for cache in decoder._caches), *rows])) + sum(views)

    sizes = []
    for tokens in random_tokens(2, 120).T:
        decoder.step(tokens)
        sizes.append(held())
    assert len(set(sizes[40:])) == 1


# --- precision ---


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("int8", 0.04)])
@each_position
def test_rounded_weights_stay_close(precision: Precision, tolerance: float, position: dict[str, str]) -> None:
    # d_ff = 20 is no multiple of what the kernel reads at a time.
    model = tiny_model(d_ff=20, **position).eval()
    memory, tokens = model.empty_memory(3), random_tokens(3, 60)
    wanted = model(tokens, memory).logits
    decoder = CachedDecoder(model, memory, precision)
    found = torch.stack([decoder.step(column) for column in tokens.T], dim=1)
    error = float((found - wanted).norm() / wanted.norm())
    assert 1e-5 < error < tolerance
    assert found.dtype == wanted.dtype


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("decoding")
    corpus = prepare(str(write_books(folder / "books")), folder / "data", tokenizer="bytes")
    save(folder / "run", tiny_model(), corpus.tokenizer)
    return folder / "run", folder / "data"


def test_the_cost_of_rounding_is_measured_on_held_out_text_and_labelled(finished: tuple[Path, Path]) -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "quantised.py"
    specification = importlib.util.spec_from_file_location("quantised", path)
    assert specification is not None
    assert specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    (model, tokenizer), corpus = load(finished[0]), open_corpus(finished[1])
    part = truncate_split(corpus.test, tokenizer, 80)
    rows = [line.split() for line in script.table_of(model, tokenizer, corpus.test, 80).splitlines()[1:]]
    assert [row[0] for row in rows] == ["full", "bf16", "int8"]
    assert float(rows[0][1]) == pytest.approx(evaluate(model, part).total.bits_per_byte, abs=1e-4)
    assert all(abs(float(row[2])) < 0.01 for row in rows)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_stream_writes_with_the_weights_it_is_told_to(precision: Precision) -> None:
    model = tiny_model().eval()
    streams = [Stream(model, ByteTokenizer(), wanted) for wanted in ("full", precision)]  # type: ignore[arg-type]
    for stream in streams:
        stream.read("Call me Ishmael.")
        stream.write(20, temperature=0)
    full, rounded = (stream._logits for stream in streams)
    assert full is not None
    assert rounded is not None
    assert not torch.equal(full, rounded)


# --- mistakes ---


def test_what_cannot_be_decoded_is_refused() -> None:
    model = small_model().eval()
    memory = model.empty_memory(2)
    with pytest.raises(CompressiveError, match=r"precision \('fp8'\) must be 'full' or 'bf16' or 'int8'"):
        CachedDecoder(model, memory, "fp8")  # type: ignore[arg-type]
    with pytest.raises(CompressiveError, match="memory does not fit"):
        CachedDecoder(small_model(compressed_length=2).eval(), memory)
    decoder = CachedDecoder(model, memory)
    with pytest.raises(CompressiveError, match=r"indices must lie in 0 .. 1, got \[0, 2\]"):
        decoder.select(torch.tensor([0, 2]))
    for tokens in (torch.zeros(3, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2)):
        with pytest.raises(CompressiveError, match=r"tokens must be integers \[batch = 2\], got"):
            decoder.step(tokens)


class Scaled(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("place", ["attention.query", "feed_forward.2"])
def test_layers_that_compute_with_more_than_their_weights_are_refused(place: str) -> None:
    model = small_model().eval()
    linear = model.blocks[1].get_submodule(place)
    model.blocks[1].set_submodule(place, Scaled(linear.in_features, linear.out_features))
    with pytest.raises(CompressiveError, match=r"more than its weights .*, which decoding would leave out: merge"):
        CachedDecoder(model.double(), model.empty_memory(1))


def test_integer_weights_need_a_cpu() -> None:
    with torch.device("meta"):
        model = CompressiveTransformer(small_config())
    with pytest.raises(CompressiveError, match="precision 'int8' needs a model on the CPU, this one is on meta; use"):
        CachedDecoder(model, model.empty_memory(1), "int8")
