"""Many sessions of one model: each gives what it gives alone, and none is lost, mixed up or blocked."""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from compressive_transformer.apps.serve import Engine, Limits, Refusal
from compressive_transformer.apps.serve.jobs import Event, Failed, Finished, Job, TokensRead, TokenWritten
from compressive_transformer.apps.serve.memory_view import last_attention, pieces_of, slots_of
from compressive_transformer.data.tokenizers import ByteTokenizer, train_bpe
from compressive_transformer.errors import CompressiveError
from compressive_transformer.generate import Sampling, Stream, StreamState
from compressive_transformer.generate.stream_state import fingerprint
from compressive_transformer.memory import Memory
from compressive_transformer.model import CompressiveTransformer
from runs import MODEL, tiny_model
from small import assert_close, assert_same_memory, small_model

BYTES = ByteTokenizer()
BOOK = (files("compressive_transformer.apps.demo") / "sample/test/356.txt").read_text(encoding="utf-8")
SAMPLING = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}


@pytest.fixture(scope="module")
def model() -> CompressiveTransformer:
    return small_model(**{"vocab_size": 257, **MODEL}).eval()


@pytest.fixture
def engine_of(model: CompressiveTransformer) -> Iterator[Callable[..., Engine]]:
    """Return a function that makes engines, of the model in float64 by default; they are stopped at the end."""
    engines = []

    def make(of: CompressiveTransformer = model, folder: Path | None = None, **limits: Any) -> Engine:
        engines.append(Engine(of, BYTES, Limits(**limits), folder))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


def result_of(begin: Callable[[Callable[[Event], None]], Job]) -> list[Event]:
    """Return all events of a job."""
    received: queue.Queue[Event] = queue.Queue()
    begin(received.put)
    events = [received.get(timeout=60)]
    while not isinstance(events[-1], Finished | Failed):
        events.append(received.get(timeout=60))
    return events


def read(engine: Engine, id: str, text: str) -> torch.Tensor:
    """Return the nats of a text that a session reads."""
    events = result_of(lambda on_event: engine.read(id, engine.encode(text), on_event))
    assert events[-1] == Finished("read")
    return torch.cat([torch.zeros(0), *(event.nats for event in events if isinstance(event, TokensRead))])


def write(engine: Engine, id: str, tokens: int, sampling: Sampling) -> tuple[str, str]:
    """Return the text that a session generates, and why it ends."""
    events = result_of(lambda on_event: engine.write(id, tokens, sampling, on_event))
    assert isinstance(events[-1], Finished)
    return "".join(event.text for event in events if isinstance(event, TokenWritten | Finished)), events[-1].reason


def memory_of(engine: Engine, id: str) -> Memory:
    return engine.state(id).memory


class Alone:
    """Requests of one session, and the results of a stream for them."""

    def __init__(self, number: int, model: CompressiveTransformer) -> None:
        rng = random.Random(number)
        self.requests: list[tuple[str, int, int]] = []  # a text, tokens to write, a seed
        for _ in range(2):
            begin = rng.randrange(len(BOOK) - 100)
            self.requests.append((BOOK[begin : begin + rng.randint(0, 24)], rng.randint(1, 8), rng.randrange(1000)))
        stream = Stream(model, BYTES)
        self.nats, self.texts = [], []
        for text, tokens, seed in self.requests:
            self.nats.append(stream.score(text))
            self.texts.append(stream.write(tokens, seed=seed, **SAMPLING))
        self.memory = stream.memory

    def run(self, engine: Engine, id: str) -> tuple[list[torch.Tensor], list[str]]:
        nats, texts = [], []
        for text, tokens, seed in self.requests:
            nats.append(read(engine, id, text))
            texts.append(write(engine, id, tokens, Sampling(seed=seed, **SAMPLING))[0])
        return nats, texts


def run_at_once(
    engine: Engine, sessions: list[Alone], threads: int = 64
) -> list[tuple[str, list[torch.Tensor], list[str]]]:
    ids = [engine.create() for _ in sessions]
    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(lambda session, id: session.run(engine, id), sessions, ids)
    return [(id, *result) for id, result in zip(ids, results, strict=True)]


@pytest.mark.parametrize("count", [12, pytest.param(64, marks=pytest.mark.slow)])
def test_sessions_at_once_give_what_each_gives_alone(
    model: CompressiveTransformer, engine_of: Callable[..., Engine], count: int
) -> None:
    sessions = [Alone(number, model) for number in range(count)]
    engine = engine_of(batch_size=7)
    for session, (id, nats, texts) in zip(sessions, run_at_once(engine, sessions), strict=True):
        assert texts == session.texts
        for own, expected in zip(nats, session.nats, strict=True):
            assert_close(own.double(), expected)
        assert_same_memory(model, memory_of(engine, id), session.memory)
    assert engine.worker.unfinished == 0


def test_sessions_in_float32_write_the_tokens_that_each_writes_alone(
    engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    model = tiny_model(seed=1).eval()
    sessions = [Alone(number, model) for number in range(10)]
    engine = engine_of(model, tmp_path, resident=8, batch_size=5)  # the others are on disk in between
    for session, (_, nats, texts) in zip(sessions, run_at_once(engine, sessions, 7), strict=True):
        assert texts == session.texts
        for own, expected in zip(nats, session.nats, strict=True):
            assert_close(own.double(), expected, 1e-4)
    assert engine.sessions.offloads >= 2
    assert engine.sessions.resident <= 8


def test_a_fork_is_independent(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    first = engine.create()
    read(engine, first, BOOK[:50])
    second = engine.fork(first)
    before = memory_of(engine, first).state_dict()
    read(engine, second, BOOK[100:130])
    assert int(memory_of(engine, second).seen) == 81
    assert all(torch.equal(states, before[name]) for name, states in memory_of(engine, first).state_dict().items())
    third = engine.fork(first)
    same = Sampling(seed=3)
    assert write(engine, first, 20, same) == write(engine, third, 20, same)


def test_generated_tokens_are_read_with_the_nats_of_the_model(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    one, other = engine.create(), engine.create()
    events = result_of(lambda on_event: engine.write(one, 30, Sampling(seed=1, temperature=2.0), on_event))
    written = [event for event in events if isinstance(event, TokenWritten)]
    tokens = torch.tensor([event.token for event in written])
    nats = [
        event.nats
        for event in result_of(lambda on_event: engine.read(other, tokens, on_event))
        if isinstance(event, TokensRead)
    ]
    assert_close(torch.tensor([event.nats for event in written], dtype=torch.float64), torch.cat(nats), 1e-9)
    assert_same_memory(engine.model, memory_of(engine, one), memory_of(engine, other))
    assert engine.state(one).tail.tolist() == [BYTES.start, *tokens.tolist()]


def test_a_completion_equals_a_new_session_and_leaves_nothing(engine_of: Callable[..., Engine]) -> None:
    engine, sampling = engine_of(), Sampling(seed=5)
    events = result_of(lambda on_event: engine.complete(engine.encode(BOOK[:30]), 10, sampling, on_event))
    assert len(engine.sessions) == 0
    id = engine.create()
    read(engine, id, BOOK[:30])
    assert write(engine, id, 10, sampling)[0] == "".join(
        event.text for event in events if isinstance(event, TokenWritten | Finished)
    )


def test_generation_ends_before_the_first_stop(engine_of: Callable[..., Engine], model: CompressiveTransformer) -> None:
    engine = engine_of()
    whole = Stream(model, BYTES).write(60, seed=2)
    stops = (whole[31:33], whole[20:24])
    text, reason = write(engine, engine.create(), 60, Sampling(seed=2, stop=stops))
    assert (text, reason) == (whole[: min(whole.index(stop) for stop in stops)], "stop")


def test_a_long_text_does_not_block_others(engine_of: Callable[..., Engine]) -> None:
    engine, received = engine_of(batch_size=1), queue.SimpleQueue[tuple[str, Event]]()
    long, short = engine.create(), engine.create()
    engine.read(long, engine.encode(BOOK[:600]), lambda event: received.put(("long", event)))
    engine.read(short, engine.encode(BOOK[:20]), lambda event: received.put(("short", event)))
    engine.complete(engine.encode(""), 3, Sampling(), lambda event: received.put(("written", event)))
    ends: list[str] = []
    while len(ends) < 3:
        who, event = received.get(timeout=60)
        if isinstance(event, Finished):
            ends.append(who)
    assert ends[-1] == "long"


def test_long_generations_take_turns_and_change_no_text(
    engine_of: Callable[..., Engine], model: CompressiveTransformer
) -> None:
    engine, received = engine_of(batch_size=2), queue.SimpleQueue[tuple[int, Event]]()
    counts, texts, ends = (70, 60, 50, 9), [""] * 4, []
    for number, count in enumerate(counts):
        engine.write(engine.create(), count, Sampling(seed=number), lambda event, n=number: received.put((n, event)))
    while len(ends) < 4:
        number, event = received.get(timeout=60)
        assert isinstance(event, TokenWritten | Finished)
        texts[number] += event.text
        ends += [number] * isinstance(event, Finished)
    assert ends[0] == 3  # though it came last, and two write at once
    assert texts == [Stream(model, BYTES).write(count, seed=number) for number, count in enumerate(counts)]


def test_cancelled_generation_ends_and_is_kept(engine_of: Callable[..., Engine]) -> None:
    engine, received = engine_of(), queue.SimpleQueue[Event]()
    id = engine.create()
    job = engine.write(id, 4096, Sampling(seed=0), received.put)
    written = [received.get(timeout=60)]
    with pytest.raises(Refusal, match="is in use by another request") as refused:
        engine.state(id)
    assert refused.value.status == 409
    job.cancelled = True
    while isinstance(written[-1], TokenWritten):
        written.append(received.get(timeout=60))
    assert written[-1].reason == "cancelled"  # type: ignore[union-attr]
    assert int(memory_of(engine, id).seen) == len(written) < 4097  # the start, and all but the last event


def test_cancelled_reading_changes_nothing(engine_of: Callable[..., Engine]) -> None:
    engine, received = engine_of(), queue.SimpleQueue[Event]()
    id = engine.create()
    job = engine.read(id, engine.encode(BOOK[:20_000]), received.put)
    event = received.get(timeout=60)
    job.cancelled = True
    while isinstance(event, TokensRead):
        event = received.get(timeout=60)
    assert isinstance(event, Failed)
    assert engine.state(id).seen == 0


def test_an_error_ends_its_requests_only_and_changes_no_session(
    engine_of: Callable[..., Engine], model: CompressiveTransformer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    id = engine.create()
    read(engine, id, BOOK[:20])
    hook = model.embedding.register_forward_pre_hook(fail)
    try:
        for begin in (
            lambda on_event: engine.read(id, engine.encode("abc"), on_event),
            lambda on_event: engine.write(id, 5, Sampling(), on_event),
        ):
            (failed,) = result_of(begin)
            assert isinstance(failed, Failed)
            assert failed.refusal.status == 500
            assert "out of memory" not in str(failed.refusal)  # that is for the log
            assert engine.state(id).seen == 21
    finally:
        hook.remove()
    assert caplog.text.count("RuntimeError: out of memory") == 2
    alone = Stream(model, BYTES)
    alone.read(BOOK[:20])
    assert write(engine, id, 12, Sampling(seed=1))[0] == alone.write(12, seed=1)
    assert engine.worker.unfinished == 0


def test_a_full_queue_refuses_requests(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(queue=1)
    id, other = engine.create(), engine.create()
    job = engine.write(id, 4096, Sampling(), lambda event: None)
    with pytest.raises(Refusal, match="the queue is full: 1 requests are waiting or running") as refused:
        engine.read(other, engine.encode("a"), lambda event: None)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (429, "queue_full", 1)
    job.cancelled = True
    assert engine.state(other).seen == 0  # free, and where it was


def test_tokens_beyond_the_limit_and_limits_of_0_are_refused(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(max_tokens=5)
    for tokens in (0, 6):
        with pytest.raises(Refusal, match=rf"tokens \({tokens}\) must be 1 to 5, the server's --max-tokens") as refused:
            engine.write(engine.create(), tokens, Sampling(), print)
        assert refused.value.status == 422
    with pytest.raises(CompressiveError, match=r"queue \(0\) must be more than 0"):
        Limits(queue=0)
    with pytest.raises(CompressiveError, match="the tokenizer has 11 ids, the model 257"):
        Engine(tiny_model(), _tokenizer_of_11_ids())


def _tokenizer_of_11_ids() -> ByteTokenizer:
    class Small(ByteTokenizer):
        vocab_size = 11

    return Small()


def test_a_busy_session_has_a_current_state(engine_of: Callable[..., Engine], model: CompressiveTransformer) -> None:
    engine, received = engine_of(), queue.SimpleQueue[Event]()
    id = engine.create()
    job = engine.read(id, engine.encode(BOOK[:20_000]), received.put)
    received.get(timeout=60)
    reading = engine.current_state(id)
    job.cancelled = True
    assert 8 <= reading.seen < 20_000
    assert reading.tail.tolist() == [BYTES.start, *BYTES.encode(BOOK)][reading.seen - len(reading.tail) : reading.seen]
    while isinstance(received.get(timeout=60), TokensRead):
        pass
    job = engine.write(id, 4096, Sampling(seed=0), received.put)
    events = [received.get(timeout=60) for _ in range(20)]
    looked = engine.current_state(id)
    job.cancelled = True
    while isinstance(events[-1], TokenWritten):
        events.append(received.get(timeout=60))
    whole = [BYTES.start, *(event.token for event in events if isinstance(event, TokenWritten))]
    assert looked.tail.tolist() == whole[looked.seen - len(looked.tail) : looked.seen]
    with torch.no_grad():
        assert_same_memory(model, looked.memory, model(torch.tensor([whole[: looked.seen]])).memory)


# --- on disk ---


def test_the_least_recently_used_are_offloaded_and_loaded_unchanged(
    engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = engine_of(folder=tmp_path / "sessions", resident=2)
    ids = [engine.create() for _ in range(2)]
    for at, id in enumerate(ids):
        read(engine, id, BOOK[at : at + 30])
    before = memory_of(engine, ids[0]).state_dict()
    state = engine.state(ids[0])
    memory_of(engine, ids[1])
    ids.append(engine.create())  # the first was used least recently
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == [f"{ids[0]}.safetensors"]
    assert engine.sessions.resident == 2
    again = engine.state(ids[0])
    assert all(torch.equal(states, before[name]) for name, states in again.memory.state_dict().items())
    assert torch.equal(again.logits, state.logits)
    assert again.tail.tolist() == state.tail.tolist()
    assert engine.sessions.resident == 2


def test_a_session_on_disk_is_a_stream(engine_of: Callable[..., Engine], tmp_path: Path) -> None:
    engine = engine_of(folder=tmp_path)
    id = engine.create()
    read(engine, id, BOOK[:40])
    engine.sessions.save(id)
    stream = Stream.load(tmp_path / f"{id}.saved.safetensors", engine.model, BYTES)
    assert stream.write(12, seed=1) == write(engine, id, 12, Sampling(seed=1))[0]


def test_restore_returns_to_the_saved_state(engine_of: Callable[..., Engine], tmp_path: Path) -> None:
    engine = engine_of(folder=tmp_path, resident=1)
    id = engine.create()
    with pytest.raises(Refusal, match="was never saved") as refused:
        engine.sessions.restore(id)
    assert refused.value.status == 409
    read(engine, id, BOOK[:30])
    assert engine.sessions.save(id).seen == 31
    read(engine, id, BOOK[30:50])
    other = engine.create()  # the session goes to disk as it is now
    assert engine.state(id).seen == 51
    assert engine.sessions.restore(id).seen == 31
    assert engine.state(other).seen == 0  # which puts the restored one away
    assert engine.state(id).seen == 31
    engine.sessions.delete(id)
    assert not list(tmp_path.glob(f"{id}*"))


def test_sessions_resume_after_a_restart_and_a_crash(engine_of: Callable[..., Engine], tmp_path: Path) -> None:
    engine = engine_of(folder=tmp_path)
    id, saved = engine.create(), engine.create()
    read(engine, id, BOOK[:30])
    read(engine, saved, BOOK[:20])
    engine.sessions.save(saved)
    read(engine, saved, BOOK[20:25])
    crashed = engine_of(folder=tmp_path)  # beside one that has put nothing away
    assert crashed.state(saved).seen == 21
    with pytest.raises(Refusal, match="no such session"):
        crashed.state(id)
    engine.stop()
    again = engine_of(folder=tmp_path)
    assert len(again.sessions) == 2
    assert again.state(id).seen == 31
    assert again.state(saved).seen == 26


def test_wrong_and_damaged_files_are_refused_without_their_path(
    engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = engine_of(folder=tmp_path)
    id = engine.create()
    engine.stop()
    with pytest.raises(Refusal, match="cannot be loaded: not a stream of this model: its config differs") as refused:
        engine_of(tiny_model(d_model=8).eval(), tmp_path).state(id)
    assert str(tmp_path) not in str(refused.value)
    other = Engine(engine.model, BYTES)
    read(other, session := other.create(), BOOK[:20])
    incomplete = StreamState(memory_of(other, session))
    other.stop()
    incomplete.save(tmp_path / f"{id}.safetensors", fingerprint(engine.model, BYTES))
    with pytest.raises(Refusal, match="corrupt session file: next-token logits missing"):
        engine_of(folder=tmp_path).state(id)
    (tmp_path / f"{id}.safetensors").write_bytes(b"nothing")
    with pytest.raises(Refusal, match="cannot be loaded: not a readable safetensors file") as refused:
        engine_of(folder=tmp_path).state(id)
    assert (refused.value.status, refused.value.code) == (409, "session_unreadable")


def test_an_id_that_the_server_did_not_make_reaches_no_file(engine_of: Callable[..., Engine], tmp_path: Path) -> None:
    engine = engine_of(folder=tmp_path / "sessions")
    (tmp_path / "secret.safetensors").write_bytes(b"")
    (tmp_path / "sessions" / ("A" * 32 + ".safetensors")).write_bytes(b"")  # not one of the server
    again = engine_of(folder=tmp_path / "sessions")
    ids = ("..", "../secret", "a" * 31 + "/", "", "A" * 32, "0" * 32, "0" * 32 + ".saved", "\0")
    asks = (
        again.state,
        again.current_state,
        again.fork,
        again.sessions.save,
        again.sessions.restore,
        again.sessions.delete,
    )
    for id, ask in itertools.product(ids, asks):
        with pytest.raises(Refusal, match="no such session") as refused:
            ask(id)
        assert refused.value.status == 404
    assert len(engine.sessions) == 0
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_idle_sessions_are_offloaded_or_dropped(engine_of: Callable[..., Engine], tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        engine, now = engine_of(folder=folder, idle=60), 0.0
        engine.sessions.clock = lambda: now  # noqa: B023
        idle = engine.create()
        now = 50.0
        used = engine.create()
        now = 61.0
        engine.sessions.offload_idle()
        assert engine.sessions.resident == 1
        assert engine.state(used).seen == 0
        if folder:
            assert engine.state(idle).seen == 0
        else:
            assert engine.sessions.drops == 1
            with pytest.raises(Refusal, match="no such session"):
                engine.state(idle)


def test_sessions_beyond_the_limits_are_refused(engine_of: Callable[..., Engine], tmp_path: Path) -> None:
    engine = engine_of(resident=1)
    engine.create()
    with pytest.raises(Refusal, match="there are 1 sessions, the limit of a server without --sessions DIR") as refused:
        engine.create()
    assert refused.value.status == 429
    for ask in (engine.sessions.save, engine.sessions.restore):
        with pytest.raises(Refusal, match="the server was started without --sessions DIR"):
            ask("0" * 32)
    engine = engine_of(folder=tmp_path, resident=1, stored=2)
    busy = engine.create()
    job = engine.write(busy, 4096, Sampling(), lambda event: None)
    with pytest.raises(Refusal, match="all 1 sessions in main memory are in use") as refused:
        engine.create()
    assert refused.value.retry_after == 1
    job.cancelled = True
    while engine.worker.unfinished:
        time.sleep(0.01)
    engine.create()
    with pytest.raises(Refusal, match="there are 2 sessions, the limit of this server; delete some"):
        engine.create()


def test_an_unusable_folder_is_an_error(model: CompressiveTransformer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CompressiveError, match="cannot hold sessions: "):
        Engine(model, BYTES, folder=tmp_path / "file")


@pytest.mark.parametrize("end", ["stopping", "cancelled"])
def test_stopping_ends_all_jobs_and_keeps_generated_text(
    engine_of: Callable[..., Engine], tmp_path: Path, end: str
) -> None:
    engine = engine_of(folder=tmp_path, batch_size=1)  # of two who write, one waits for its turn
    received = [queue.SimpleQueue[Event]() for _ in range(3)]
    ids = [engine.create() for _ in received]
    jobs = [engine.write(id, 4096, Sampling(), one.put) for id, one in zip(ids[:2], received, strict=False)]
    jobs.append(engine.read(ids[2], engine.encode(BOOK[:50_000]), received[2].put))
    counts = []
    for one in received:
        one.get(timeout=60)  # each has had a turn
    if end == "stopping":
        engine.stop()
        with pytest.raises(Refusal, match="the server is stopping"):
            engine.read(ids[2], engine.encode("a"), print)
    for job in jobs:
        job.cancelled = True
    for one in received[:2]:
        counts.append(1)
        while isinstance(event := one.get(timeout=60), TokenWritten):
            counts[-1] += 1
        assert event == Finished(end, event.text)  # type: ignore[union-attr]
    while isinstance(event := received[2].get(timeout=60), TokensRead):
        pass
    assert isinstance(event, Failed)
    assert event.refusal.code == end
    engine.stop()
    again = engine_of(folder=tmp_path)
    assert [again.state(id).seen for id in ids] == [counts[0] + 1, counts[1] + 1, 0]


# --- memory view ---


@pytest.mark.parametrize("fields", [{}, {"position": "rotary"}, {"compressed_position": "unit"}, {"norm": "post"}])
def test_the_memory_view_shows_the_attention_of_the_last_token(fields: dict[str, str]) -> None:
    model = small_model(**{"vocab_size": 257, **MODEL, **fields}).eval()
    received: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def observe(layer: int) -> Callable[..., Any]:
        return lambda _, arguments: (*arguments[:2], received[layer].append)

    stream, blocks = Stream(model, BYTES), cast(Any, model.blocks)
    for size in (5, 20, 30, 9, 7):
        stream.read(BOOK[:size])
        hooks = [block.attention.register_forward_pre_hook(observe(at)) for at, block in enumerate(blocks)]
        stream.read("x")
        for hook in hooks:
            hook.remove()
        for layer, weights in received.items():
            shown, mean = last_attention(model, stream.memory, layer), torch.cat(weights).mean(0)[0]
            weights.clear()
            if int(stream.memory.seen) % 8:
                assert shown is not None
                assert_close(shown, mean)
            else:
                assert shown is None


def test_the_memory_view_shows_the_text_of_each_slot(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    id = engine.create()
    for size in (3, 17, 40, 40, 40):
        text = BOOK[:140]
        seen = engine.state(id).seen
        at = max(0, seen - 1)
        read(engine, id, text[at : at + size])
        state = engine.state(id)
        for layer in range(2):
            slots = slots_of(engine.model, BYTES, state, layer)
            assert slots["tokens"] == at + len(text[at : at + size])
            shown = [slot for tier in ("compressed", "recent", "segment") for slot in slots[tier]]
            for slot in shown:
                assert slot["text"] == text[max(0, slot["first"]) : slot["stop"]]
                assert slot["age"] == slots["tokens"] - (slot["first"] + slot["stop"] + 1) / 2
            # Nothing between the oldest and the newest is left out or there twice.
            assert [slot["first"] for slot in shown[1:]] == [slot["stop"] for slot in shown[:-1]]
            assert shown[-1]["stop"] == slots["tokens"]
            if shown[-1]["attention"] is not None:
                assert sum(slot["attention"] for slot in shown) == pytest.approx(1)
    with pytest.raises(CompressiveError, match=r"layer \(2\) must be 0 to 1"):
        slots_of(engine.model, BYTES, state, 2)


def test_pieces_add_up_to_the_text_and_its_nats() -> None:
    text = "Zwölf 👩‍👧 naïve"
    ids = BYTES.encode(text).tolist()
    pieces = pieces_of(BYTES, ids, [1.0] * len(ids))
    assert "".join(piece for piece, _ in pieces) == text
    assert [nats for _, nats in pieces] == [len(piece.encode()) for piece, _ in pieces]
    assert pieces_of(BYTES, ids[:3], [1.0] * 3) == [("Z", 1.0), ("w", 1.0), ("\ufffd", 1.0)]
    bpe = train_bpe([BOOK[:3000]], 300)
    ids = bpe.encode(BOOK[:200]).tolist()
    assert "".join(piece for piece, _ in pieces_of(bpe, ids, [0.5] * len(ids))) == BOOK[:200]
