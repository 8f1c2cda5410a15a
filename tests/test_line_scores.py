"""A live stream's lines have the nats that the model gives them, however they arrive."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from compressive_transformer.checkpoint import save
from compressive_transformer.data.tokenizers import ByteTokenizer, train_bpe
from compressive_transformer.errors import CompressiveError
from compressive_transformer.generate import line_scores
from compressive_transformer.generate.line_scores import ScoredLine, score_lines
from compressive_transformer.generate.stream import Stream
from compressive_transformer.model import CompressiveTransformer
from runs import MODEL, program
from small import assert_close, small_model

BYTES = ByteTokenizer()
TEXT = (
    "Call me Ishmael.\n\nZwölf Boxkämpfer 吾輩は猫である 👩‍👩‍👧\nSome years ago--never mind how long\nprecisely--having"
).encode()


@pytest.fixture(scope="module")
def model() -> CompressiveTransformer:
    return small_model(**{"vocab_size": 257, **MODEL}).eval()


def nats_of(model: CompressiveTransformer, content: bytes) -> torch.Tensor:
    tokens = torch.tensor([[BYTES.start, *content]])
    with torch.no_grad():
        nats: torch.Tensor = model(tokens[:, :-1], targets=tokens[:, 1:]).nats[0]
    return nats


def scored(model: CompressiveTransformer, content: bytes, **options: int) -> list[ScoredLine]:
    return list(score_lines(Stream(model, BYTES), io.BytesIO(content), **options))


def test_each_line_has_the_bits_of_its_tokens(model: CompressiveTransformer) -> None:
    nats, at = nats_of(model, TEXT), 0
    lines = scored(model, TEXT)
    assert [line.number for line in lines] == [1, 2, 3, 4, 5]
    for line, content in zip(lines, TEXT.splitlines(keepends=True), strict=True):
        assert line.text == content.decode().removesuffix("\n")
        assert line.tokens == line.bytes == len(content)
        assert line.bits == pytest.approx(float(nats[at : at + len(content)].sum()) / math.log(2), abs=1e-9)
        assert line.bits_per_byte == line.bits / len(content)
        at += len(content)


@pytest.mark.parametrize("piece", [1, 3, 17])
def test_a_line_read_in_pieces_has_the_same_score(
    model: CompressiveTransformer, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    expected = scored(model, TEXT, top=3)
    monkeypatch.setattr(line_scores, "PIECE_BYTES", piece)
    found = scored(model, TEXT, top=3)
    assert_close(torch.tensor([line.bits for line in found]), torch.tensor([line.bits for line in expected]), 1e-9)
    for one, other in zip(found, expected, strict=True):
        assert (one.text, one.bytes, one.tokens) == (other.text, other.bytes, other.tokens)
        assert [text for text, _ in one.top] == [text for text, _ in other.top]


@pytest.mark.parametrize("piece", [1, 2, 65_536])
def test_crlf_is_read_as_lf(model: CompressiveTransformer, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(line_scores, "PIECE_BYTES", piece)
    lines = scored(model, b"one\r\n\r\nt\rwo\r\nlast\r")
    expected = scored(model, b"one\n\nt\rwo\nlast\r")
    assert [line.text for line in lines] == ["one", "", "t\rwo", "last\r"]
    assert [line.bytes for line in lines] == [5, 2, 6, 5]
    assert [line.tokens for line in lines] == [4, 1, 5, 5]
    assert_close(torch.tensor([line.bits for line in lines]), torch.tensor([line.bits for line in expected]), 1e-9)


def test_top_are_the_most_surprising_tokens_in_order(model: CompressiveTransformer) -> None:
    nats, content = nats_of(model, TEXT), TEXT.splitlines(keepends=True)[0]
    first = scored(model, TEXT, top=4)[0]
    order = nats[: len(content)].argsort(descending=True)[:4].tolist()
    assert [text for text, _ in first.top] == [chr(content[place]) for place in order]
    assert [bits for _, bits in first.top] == pytest.approx([float(nats[at]) / math.log(2) for at in order], abs=1e-9)
    assert len(scored(model, TEXT, top=99)[1].top) == 1  # the line end alone


@pytest.mark.parametrize("block", [1, 50, 1000])
def test_blocks_are_raw_bytes(model: CompressiveTransformer, block: int) -> None:
    content = b"\xff\x00\r\n" + TEXT
    nats, blocks = nats_of(model, content), scored(model, content, block=block)
    assert [part.bytes for part in blocks] == [len(content[at : at + block]) for at in range(0, len(content), block)]
    for part, own in zip(blocks, nats.split(block), strict=True):
        assert part.bits == pytest.approx(float(own.sum()) / math.log(2), abs=1e-9)


def test_only_a_model_of_bytes_scores_bytes_that_are_not_text(model: CompressiveTransformer) -> None:
    assert [line.text for line in scored(model, b"ok\n\xff\xfe\n\xe5")] == [
        "ok",
        "\N{REPLACEMENT CHARACTER}" * 2,
        "\N{REPLACEMENT CHARACTER}",
    ]
    tokenizer = train_bpe(["abc"], 258)
    words = small_model(**{**MODEL, "vocab_size": 258}).eval()
    for content, number in ((b"ok\n\xff\xfe\n", 2), (b"\xe5", 1), (b"\xe5\n", 1)):
        with pytest.raises(
            CompressiveError, match=rf"line {number} is not UTF-8 \(.*\): convert it first, or use a model whose tokens"
        ):
            list(score_lines(Stream(words, tokenizer), io.BytesIO(content)))
    with pytest.raises(CompressiveError, match="blocks need a model whose tokens are bytes"):
        score_lines(Stream(words, tokenizer), io.BytesIO(b""), block=3)
    with pytest.raises(CompressiveError, match=r"top \(-1\) and block \(0\) must be 0 or more"):
        score_lines(Stream(model, BYTES), io.BytesIO(b""), top=-1)


def test_each_line_is_encoded_alone() -> None:
    tokenizer = train_bpe([TEXT.decode()] * 3, 280)
    model = small_model(**{**MODEL, "vocab_size": tokenizer.vocab_size}).eval()
    stream, again = Stream(model, tokenizer), Stream(model, tokenizer)
    for line, content in zip(score_lines(stream, io.BytesIO(TEXT)), TEXT.splitlines(keepends=True), strict=True):
        nats = again.score(content.decode())
        assert (line.tokens, line.bits) == (len(nats), float(nats.sum()) / math.log(2))


def test_the_text_of_a_long_line_is_cut(model: CompressiveTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert line_scores.SHOWN == 2000
    monkeypatch.setattr(line_scores, "SHOWN", 20)
    line = scored(model, b"a" * 30 + b"\n")[0]
    assert (line.text, line.bytes) == ("a" * 20, 31)


def test_empty_input_has_no_lines(model: CompressiveTransformer) -> None:
    assert scored(model, b"") == []


# --- the command ---


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: CompressiveTransformer) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save(folder, model, BYTES)
    return folder


def test_a_live_stream_is_scored_line_by_line_and_resumed_after_signals(
    run: Path, tmp_path: Path, model: CompressiveTransformer
) -> None:
    state, lines, results = tmp_path / "state", TEXT.splitlines(keepends=True), []
    for part, stop in ((lines[:2], signal.SIGTERM), (lines[2:3], signal.SIGINT), (lines[3:], None)):
        with program("score", run, "--json", "--state", state) as scoring:
            for line in part:
                scoring.stdin.write(line)
                if line.endswith(b"\n"):  # each is scored before the next one comes
                    results.append(json.loads(scoring.stdout.readline()))
            if stop:
                os.kill(scoring.process.pid or 0, stop)
            else:
                scoring.stdin.close()
            results += [json.loads(line) for line in scoring.stdout.read().splitlines()]
            assert scoring.wait() == 0
            assert f"{len(part)} lines, {sum(map(len, part))} bytes, ".encode() in scoring.stderr.read()
    expected = scored(model, TEXT)
    assert [line["text"] for line in results] == [line.text for line in expected]
    assert [line["bits"] for line in results] == pytest.approx([line.bits for line in expected], abs=1e-9)
    assert [line["number"] for line in results] == [1, 2, 1, 1, 2]
