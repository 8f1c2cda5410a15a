"""The server as its clients see it: a real one on loopback, real HTTP, the real OpenAI client."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
pytest.importorskip("httpx", reason="the tests of the server ask it with httpx, of the extra `dev`")

import httpx
from prometheus_client.parser import text_string_to_metric_families

from compressive_transformer.apps.serve import Engine
from compressive_transformer.apps.serve.requests import Completion, Generate
from compressive_transformer.apps.serve.server import bind
from compressive_transformer.apps.serve.server import serve as serve_engine
from compressive_transformer.checkpoint import save
from compressive_transformer.cli.serve import serve
from compressive_transformer.data.tokenizers import ByteTokenizer
from compressive_transformer.errors import CompressiveError
from compressive_transformer.generate import Sampling, Stream
from runs import tiny_model
from serving import Served, events_of, served

BYTES = ByteTokenizer()
BOOK = (files("compressive_transformer.apps.demo") / "sample/test/356.txt").read_text(encoding="utf-8")
TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tiny_model(seed=1), folder=tmp_path_factory.mktemp("sessions"), request_bytes=70_000) as one:
        yield one


def stream() -> Stream:
    return Stream(tiny_model(seed=1).eval(), BYTES)


def measured(server: Served) -> dict[str, float]:
    """Return the metrics but for buckets of histograms, by name and labels."""
    answer = server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    return {" ".join((one.name, *one.labels.values())): one.value for one in samples if "le" not in one.labels}


# --- sessions ---


def test_a_session_equals_a_stream(server: Served) -> None:
    id, alone = server.new(), stream()
    for text in (BOOK[:50], "", "Zwölf 👩‍👧 <b>", BOOK[50:90]):
        answer = server.post(f"/sessions/{id}/append", {"text": text, "pieces": True}).raise_for_status().json()
        nats = alone.score(text)
        size = len(text.encode())
        assert (answer["tokens"], answer["bytes"]) == (len(nats), size)
        assert answer["bits"] == pytest.approx(float(nats.sum()) / math.log(2), rel=1e-5)
        assert answer["bits_per_byte"] == (answer["bits"] / size if size else None)
        assert "".join(piece["text"] for piece in answer["pieces"]) == text
        assert sum(piece["bits"] for piece in answer["pieces"]) == pytest.approx(answer["bits"])
    sampling = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7}
    events = server.events(f"/sessions/{id}/generate", {"tokens": 30, **sampling})
    assert [kind for kind, _ in events] == ["token"] * 30 + ["done"]
    assert "".join(part["text"] for _, part in events) == alone.write(30, **sampling)  # type: ignore[arg-type]
    assert events[-1][1]["reason"] == "length"
    assert events[-1][1]["bits"] == pytest.approx(sum(part["bits"] for _, part in events[:-1]))
    assert server.client.get(f"/sessions/{id}").json() == {"id": id, "tokens": int(alone.memory.seen) - 1}


def test_a_response_that_is_not_streamed_is_the_whole_text(server: Served) -> None:
    id = server.new()
    fork = server.post(f"/sessions/{id}/fork").json()["id"]
    asked = {"tokens": 40, "seed": 3}
    streamed = server.events(f"/sessions/{id}/generate", asked)
    whole = server.post(f"/sessions/{fork}/generate", {**asked, "stream": False}).json()
    assert whole["text"] == "".join(part["text"] for _, part in streamed)
    assert whole == {**streamed[-1][1], "text": whole["text"]}
    stop = whole["text"][10:12]
    again = server.post(f"/sessions/{server.new()}/generate", {**asked, "stop": stop, "stream": False}).json()
    assert (again["text"], again["reason"]) == (whole["text"][: whole["text"].index(stop)], "stop")


def test_all_options_of_sampling_are_fields_of_requests(server: Served) -> None:
    names = {field.name for field in dataclasses.fields(Sampling)}
    for request in (Generate, Completion):
        assert names <= {field.name for field in dataclasses.fields(request)}
    greedy = {"top_k": 1, "seed": 1, "max_tokens": 20}
    answer = server.post("/v1/completions", {"model": "tiny", "prompt": "Call", "n": None, "stop": None, **greedy})
    alone = stream()
    alone.read("Call")
    assert answer.json()["choices"][0]["text"] == alone.write(20, temperature=0)


def test_sessions_are_forked_saved_restored_and_deleted(server: Served) -> None:
    id = server.new()
    assert server.post(f"/sessions/{id}/append", {"text": "one"}).json()["tokens"] == 3
    assert server.post(f"/sessions/{id}/save").json() == {"id": id, "tokens": 3}
    assert server.post(f"/sessions/{id}/append", {"text": "two"}).status_code == 200
    fork = server.post(f"/sessions/{id}/fork")
    assert (fork.status_code, fork.json()["tokens"]) == (201, 6)
    assert server.post(f"/sessions/{id}/restore").json()["tokens"] == 3
    assert server.client.get(f"/sessions/{fork.json()['id']}").json()["tokens"] == 6
    assert server.client.delete(f"/sessions/{id}").status_code == 204
    assert server.client.get(f"/sessions/{id}").status_code == 404
    assert fork.json()["id"] != id


def test_many_clients_at_once_get_what_each_gets_alone(server: Served) -> None:
    def ask(number: int) -> tuple[float, str]:
        id = server.new()
        text = BOOK[number * 20 : number * 20 + 30]
        bits = server.post(f"/sessions/{id}/append", {"text": text}).raise_for_status().json()["bits"]
        asked = {"tokens": 10, "seed": number, "stream": False}
        return bits, server.post(f"/sessions/{id}/generate", asked).raise_for_status().json()["text"]

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(ask, range(8)))
    for number, (bits, text) in enumerate(together):
        alone = stream()
        assert bits == pytest.approx(float(alone.score(BOOK[number * 20 : number * 20 + 30]).sum()) / math.log(2))
        assert text == alone.write(10, seed=number)


def test_the_memory_of_a_session_is_listed_slot_by_slot(server: Served) -> None:
    id = server.new()
    text = "<b onload=x>" + BOOK[:10]
    server.post(f"/sessions/{id}/append", {"text": text})
    shown = server.client.get(f"/sessions/{id}/memory", params={"layer": 1}).json()
    slots = [slot for tier in ("compressed", "recent", "segment") for slot in shown[tier]]
    assert "".join(slot["text"] for slot in slots) == text
    assert sum(slot["attention"] for slot in slots) == pytest.approx(1, abs=1e-5)
    assert server.client.get(f"/sessions/{id}/memory", params={"layer": 2}).status_code == 422


@pytest.mark.parametrize("stream", [True, False])
def test_generation_ends_when_the_client_disconnects(server: Served, stream: bool) -> None:
    id, before, cancelled = (
        server.new(),
        server.engine.worker.tokens_written,
        measured(server)["compressive_cancelled_total"],
    )
    asked = {"tokens": 4096, "stream": stream}
    if stream:
        with server.client.stream("POST", f"/sessions/{id}/generate", json=asked) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.post(f"/sessions/{id}/generate", asked, timeout=0.2)
    deadline = time.monotonic() + 30
    while server.engine.worker.unfinished and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.engine.worker.tokens_written - before < 4000
    assert measured(server)["compressive_cancelled_total"] == cancelled + 1
    assert server.client.get(f"/sessions/{id}").json()["tokens"] == server.engine.worker.tokens_written - before


# --- limits and errors ---


def test_errors_have_one_format(server: Served) -> None:
    id = server.new()
    asked = [
        ("GET", "/nothing", None, 404, "not_found"),
        ("PUT", "/sessions", None, 405, "method_not_allowed"),
        ("GET", "/sessions/" + "0" * 32, None, 404, "no_such_session"),
        ("GET", "/sessions/..%2f..%2fetc%2fpasswd", None, 404, "not_found"),
        ("GET", "/sessions/%2e%2e", None, 404, "no_such_session"),
        ("POST", f"/sessions/{id}/restore", None, 409, "never_saved"),
        ("POST", f"/sessions/{id}/append", {}, 422, "invalid"),
        ("POST", f"/sessions/{id}/append", {"text": 3}, 422, "invalid"),
        ("POST", f"/sessions/{id}/append", {"text": "a", "more": 1}, 422, "invalid"),
        ("POST", f"/sessions/{id}/append", {"text": "a" * 70_000}, 413, "too_large"),
        ("POST", f"/sessions/{id}/append", {"text": "a" * 65_537, "pieces": True}, 413, "too_large"),
        ("POST", f"/sessions/{id}/generate", {"tokens": 5000}, 422, "too_many_tokens"),
        ("POST", f"/sessions/{id}/generate", {"temperature": -1}, 422, "invalid"),
        ("POST", f"/sessions/{id}/generate", {"stop": ["a"] * 5}, 422, "invalid"),
        ("POST", f"/sessions/{id}/generate", {"top_q": 1}, 422, "invalid"),
        ("POST", "/v1/completions", {"prompt": "a"}, 422, "invalid"),
        ("POST", "/v1/completions", {"model": "tiny", "seed": -1}, 400, "invalid"),
        ("POST", f"/sessions/{id}/generate", {"stop": ""}, 422, "invalid"),
    ]
    for method, path, content, status, code in asked:
        answer = server.client.request(method, path, json=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), path
        assert answer.json()["error"]["message"]
    assert server.client.get(f"/sessions/{id}").json()["tokens"] == 0


def test_an_error_names_the_field(server: Served) -> None:
    path = f"/sessions/{server.new()}/"
    error = server.post(path + "append", {"text": "a", "more": 1}).json()["error"]
    assert (error["param"], error["message"]) == ("more", "more: Extra inputs are not permitted")
    error = server.post(path + "generate", {"top_p": 0}).json()["error"]
    assert error["message"] == "top_p (0.0) must be more than 0 and at most 1 (all tokens)"
    raw = {"content": b'{"text": "\\ud800"}', "headers": {"content-type": "application/json"}}
    assert server.client.post(path + "append", **raw).status_code == 422  # a lone surrogate is no text
    raw["content"] = b"[" * 40_000
    assert server.client.post(path + "append", **raw).json()["error"]["code"] == "invalid"


def test_a_body_without_a_length_is_limited_too(server: Served) -> None:
    def parts() -> Iterator[bytes]:
        yield b'{"text": "'
        for _ in range(80):
            yield b"a" * 1000

    path, headers = f"/sessions/{server.new()}/append", {"content-type": "application/json"}
    answer = server.client.post(path, content=parts(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_bodies_that_no_endpoint_reads_are_limited_too(server: Served) -> None:
    id, headers = server.new(), {"content-type": "application/json"}
    sessions = len(server.engine.sessions)
    for path in ("/sessions", f"/sessions/{id}/fork", f"/sessions/{id}/save", "/unknown"):
        for content in (b"a" * 70_001, iter([b"a" * 70_000, b"a"])):  # with and without a length
            answer = server.client.post(path, content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert len(server.engine.sessions) == sessions
    assert server.client.post("/sessions", content=b"a" * 70_000, headers=headers).status_code == 201


def test_a_full_queue_and_a_busy_session_refuse_until_they_are_free() -> None:
    with served(tiny_model(), queue=1) as server:
        id, other = server.new(), server.new()
        with server.client.stream("POST", f"/sessions/{id}/generate", json={"tokens": 4096}) as answer:
            lines = answer.iter_lines()
            next(lines)
            busy = server.client.get(f"/sessions/{id}")
            full = server.post(f"/sessions/{other}/append", {"text": "a"})
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "session_busy")
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert full.headers["retry-after"] == "1"
        while server.engine.worker.unfinished:
            time.sleep(0.02)
        assert server.post(f"/sessions/{other}/append", {"text": "a"}).status_code == 200


# --- access ---


def test_only_the_page_and_health_need_no_token() -> None:
    with served(tiny_model(), token=TOKEN) as server:
        assert server.client.get("/v1/models").status_code == 200
        for path in ("/v1/models", "/metrics", "/sessions/x", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
                answer = httpx.get(server.url + path, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "unauthorized"
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/").status_code == 200


def test_other_origins_and_host_names_are_refused(server: Served) -> None:
    port = server.url.rpartition(":")[2]
    for headers in (
        {"Host": f"evil.example:{port}"},
        {"Host": "127.0.0.1.evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Host": "[::1"},
        {"Origin": "http://127.0.0.1:1"},
    ):
        answer = server.client.post("/sessions", headers=headers)
        assert answer.status_code == 403, headers
        assert answer.json()["error"]["message"].startswith(f"{next(iter(headers))} header not allowed: ")
        assert "access-control-allow-origin" not in answer.headers
    proxied = {"Host": "example.com", "Origin": "https://example.com"}
    for headers in ({"Host": f"localhost:{port}"}, {"Host": f"[::1]:{port}"}, {"Origin": server.url}, proxied):
        assert server.client.post("/sessions", headers=headers).status_code == 201
    form = server.client.post(
        f"/sessions/{server.new()}/append", content="text=a", headers={"content-type": "text/plain"}
    )
    assert (form.status_code, form.json()["error"]["code"]) == (415, "not_json")


def test_responses_have_security_headers(server: Served) -> None:
    for path in ("/health", "/sessions/x", "/v1/models"):
        headers = server.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["cache-control"] == "no-store"
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert server.client.get(path).status_code == 404


# --- other programs ---


def test_the_openai_client_completes_and_streams(server: Served) -> None:
    openai = pytest.importorskip("openai", reason="the real client is in the extra `dev`")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "compressive-transformer"
        alone = stream()
        alone.read(BOOK[:60])
        expected = alone.write(25, temperature=0.7, seed=4)
        asked: dict[str, Any] = {"model": "tiny", "prompt": BOOK[:60], "max_tokens": 25, "temperature": 0.7, "seed": 4}
        whole = client.completions.create(**asked)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "length")
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (60, 25, 85)
        parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(part.choices[0].text for part in parts[:-1]) == expected
        assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 2) + ["length"]
        assert (parts[-1].choices, parts[-1].usage.completion_tokens) == ([], 25)
        stopped = client.completions.create(**asked, stop=[expected[5:7]]).choices[0]
        assert (stopped.text, stopped.finish_reason) == (expected[: expected.index(expected[5:7])], "stop")
        assert len(client.completions.create(model="tiny", prompt=["a"], temperature=0, user="me").choices) == 1
        for changed, error, text in [
            ({"n": 2}, openai.BadRequestError, "n is not supported; leave it out"),
            ({"echo": True}, openai.BadRequestError, "echo is not supported"),
            ({"logprobs": 1}, openai.BadRequestError, "logprobs is not supported"),
            ({"extra_body": {"fast": 1}}, openai.BadRequestError, "unknown field 'fast'"),
            ({"prompt": ["a", "b"]}, openai.BadRequestError, "prompt must be one text, got 2"),
            ({"temperature": -1}, openai.BadRequestError, "temperature"),
            ({"stop": ["a"] * 5}, openai.BadRequestError, "stop must be at most 4 texts, got 5"),
            ({"max_tokens": 0}, openai.UnprocessableEntityError, r"tokens \(0\) must be 1 to 4096"),
            ({"model": "gpt"}, openai.NotFoundError, "no model 'gpt', only 'tiny'"),
        ]:
            with pytest.raises(error, match=text):
                client.completions.create(**{**asked, **changed})
        client.completions.create(**asked, n=1, best_of=1, echo=False, presence_penalty=0, suffix=None)


def test_prometheus_reads_the_metrics(server: Served) -> None:
    before, id = measured(server), server.new()
    server.post(f"/sessions/{id}/append", {"text": "abc"})
    server.events(f"/sessions/{id}/generate", {"tokens": 5})
    after = measured(server)
    assert after["compressive_sessions"] == before["compressive_sessions"] + 1
    assert after["compressive_tokens_read_total"] == before["compressive_tokens_read_total"] + 4  # with the start
    assert after["compressive_tokens_written_total"] == before["compressive_tokens_written_total"] + 5
    assert after["compressive_first_token_seconds_count"] > before["compressive_first_token_seconds_count"]
    route = "compressive_request_seconds_count /sessions/{id}/append 200"
    assert after[route] > before.get(route, 0)
    assert after["compressive_queue"] == 0
    assert not [name for name in after if id in name]  # one line a session would be more and more of them


def test_the_page_runs_no_other_scripts_and_loads_nothing(server: Served) -> None:
    answer = server.client.get("/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].startswith("'sha256-")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert not re.findall(
        r"""(?:src|href)=(?!"data:)|https?://|@import|innerHTML|outerHTML|document\.write|eval\(""", answer.text
    )


# --- the command ---


def started(run: Path, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """`compressive serve` in a process of its own, and its address."""
    command = [sys.executable, "-m", "compressive_transformer.cli", "serve", str(run), "--port", "0"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COMPRESSIVE_TOKEN": TOKEN}
    process = subprocess.Popen(
        [*command, "--sessions", str(folder)], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    found = re.search(r"tiny-run at (http://127\.0\.0\.1:\d+)/; Ctrl-C stops it", process.stderr.readline())
    assert found
    return process, found[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_and_saves_sessions(number: int, tmp_path: Path) -> None:
    engine, before = Engine(tiny_model(seed=1), BYTES, folder=tmp_path), signal.getsignal(number)
    id = engine.create()

    def generate(url: str) -> list[tuple[str, Any]]:
        with httpx.stream("POST", f"{url}/sessions/{id}/generate", json={"tokens": 4096, "seed": 1}) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            os.kill(os.getpid(), number)
            return events_of("\n".join([first, *lines]))

    with bind("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        events = pool.submit(generate, f"http://127.0.0.1:{listener.getsockname()[1]}")
        serve_engine(engine, "tiny", listener)
    (*_, (kind, end)) = events.result()
    assert (kind, end["reason"]) == ("done", "stopping")
    assert "".join(part["text"] for _, part in events.result()) == stream().write(end["tokens"], seed=1)
    assert signal.getsignal(number) is before
    again = Engine(tiny_model(seed=1), BYTES, folder=tmp_path)
    assert again.state(id).seen == end["tokens"] + 1
    again.stop()


@pytest.mark.slow
def test_a_restarted_server_resumes_its_sessions(tmp_path: Path) -> None:
    save(tmp_path / "tiny-run", tiny_model(seed=1), BYTES)
    headers, alone = {"Authorization": f"Bearer {TOKEN}"}, stream()
    alone.read(BOOK[:40])
    id, count = "", 0
    for number in (signal.SIGTERM, signal.SIGINT):
        process, url = started(tmp_path / "tiny-run", tmp_path / "sessions")
        with process, httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            if not id:
                id = client.post("/sessions").json()["id"]
                client.post(f"/sessions/{id}/append", json={"text": BOOK[:40]})
            else:
                assert client.get(f"/sessions/{id}").json()["tokens"] == 40 + count
            with client.stream("POST", f"/sessions/{id}/generate", json={"tokens": 4096, "seed": 1}) as answer:
                lines = answer.iter_lines()
                text = next(lines)
                process.send_signal(number)
                events = events_of("\n".join([text, *lines]))
            assert process.wait(30) == 0
            assert process.stderr is not None
            assert process.stderr.read() == f"stopped; 1 sessions are in {tmp_path / 'sessions'}\n"
        assert events[-1][1]["reason"] == "stopping"
        if not count:
            count = events[-1][1]["tokens"]
            assert "".join(part["text"] for _, part in events) == alone.write(count, seed=1)


def test_the_command_reports_why_it_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(CompressiveError, match=r"cannot serve at 127\.0\.0\.1 port"):
        serve(tmp_path, port=taken.getsockname()[1])
    with pytest.raises(CompressiveError, match=r"port \(70000\) must be 0 \(any free port\) to 65535"):
        serve(tmp_path, port=70000)
    (tmp_path / "token").write_text("short\n", encoding="utf-8")
    with pytest.raises(
        CompressiveError, match="token: a token must be one line of 16 or more printable ASCII characters"
    ):
        serve(tmp_path, token_file=tmp_path / "token")
    monkeypatch.setenv("COMPRESSIVE_TOKEN", "")
    with pytest.raises(CompressiveError, match="COMPRESSIVE_TOKEN: a token must be one line of 16 or more"):
        serve(tmp_path)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(
        CompressiveError, match=r"needs the library uvicorn: pip install 'compressive-transformer\[serve\]'"
    ):
        serve(tmp_path)
