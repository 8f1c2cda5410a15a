"""Scores of a text that never ends, line by line as it comes: logs, pipes, raw bytes."""

from __future__ import annotations

import codecs
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ..data.tokenizers import ByteTokenizer, Tokenizer
from ..errors import CompressiveError
from .stream import Stream

PIECE = 65_536
"""Bytes that are read at a time, at most: a line without end needs no more room than this."""
SHOWN = 2_000
"""Characters of a line that `ScoredLine.text` holds, at most."""


class Source(Protocol):
    """Where bytes come from: an open binary file or pipe."""

    def readline(self, size: int, /) -> bytes:
        """Bytes up to the next line end, that included, at most `size`; none at the end."""

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes, fewer only at the end."""


@dataclass(frozen=True)
class ScoredLine:
    """How well a line was predicted from all that came before it."""

    number: int
    """From 1."""
    text: str
    """The line without its end, U+FFFD where it is not UTF-8; of a longer one the first 2,000 characters."""
    tokens: int
    bytes: int
    """Of the line as it was read, its end included."""
    bits: float
    top: tuple[tuple[str, float], ...]
    """Its most surprising tokens as text, and their bits, falling."""

    @property
    def bits_per_byte(self) -> float:
        """Bits over bytes."""
        return self.bits / self.bytes


def score_lines(stream: Stream, source: Source, *, top: int = 0, block: int = 0) -> Iterator[ScoredLine]:
    """Read `source` into `stream` for as long as it lasts, and give the score of each line as soon as it is there.

    top: give the so many most surprising tokens of each line.
    block: read blocks of so many bytes, as they are, instead of lines; for models whose tokens are bytes.

    A line is encoded by itself, its end included; CRLF is read as LF, as `prepare` does. What is held does not grow
    with the stream or with a line: a line beyond 65,536 bytes is encoded in pieces of these.

    Raises CompressiveError where a line is not UTF-8 and the model's tokens are not bytes.
    """
    if top < 0 or block < 0:
        raise CompressiveError(f"top ({top}) and block ({block}) must be 0 or more")
    if block and not isinstance(stream.tokenizer, ByteTokenizer):
        raise CompressiveError("blocks of bytes need a model whose tokens are bytes; leave block out to read lines")
    return _score_all(stream, source, top, block)


def _score_all(stream: Stream, source: Source, top: int, block: int) -> Iterator[ScoredLine]:
    number, line = 1, _Line(stream.tokenizer, top)
    while content := source.read(min(block - line.bytes, PIECE)) if block else source.readline(PIECE):
        line.add(stream, content, number, raw=bool(block))
        if line.bytes == block or (not block and content.endswith(b"\n")):
            yield line.ended(stream, number)
            number, line = number + 1, _Line(stream.tokenizer, top)
    if line.bytes:  # the last one has no end
        yield line.ended(stream, number)


class _Line:
    """What is known of the line that is being read."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self.tokens, self.bytes, self.nats, self.text = 0, 0, 0.0, ""
        self._tokenizer, self._top = tokenizer, top
        self._best: list[tuple[float, int, int]] = []  # nats, place and id, a heap
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._shown = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""  # a carriage return, until it is known whether a line feed follows

    def add(self, stream: Stream, content: bytes, number: int, *, raw: bool) -> None:
        """Score what was read of the line."""
        self.bytes += len(content)
        if not raw:
            content = self._held + content
            self._held = b"\r" if content.endswith(b"\r") else b""
            content = content.removesuffix(self._held).replace(b"\r\n", b"\n")
        self._score(stream, content, number)

    def ended(self, stream: Stream, number: int) -> ScoredLine:
        """The score of the whole line."""
        self._score(stream, self._held, number, final=True)
        best = sorted(self._best, reverse=True)
        top = tuple((self._tokenizer.decode([token]), nats / math.log(2)) for nats, _, token in best)
        text = self.text.removesuffix("\n")
        return ScoredLine(number, text, self.tokens, self.bytes, self.nats / math.log(2), top)

    def _score(self, stream: Stream, content: bytes, number: int, *, final: bool = False) -> None:
        if len(self.text) < SHOWN:
            self.text = (self.text + self._shown.decode(content, final))[:SHOWN]
        text: str | bytes = content
        if not isinstance(self._tokenizer, ByteTokenizer):
            try:
                text = self._utf8.decode(content, final)
            except UnicodeDecodeError as error:
                raise CompressiveError(
                    f"line {number} is not UTF-8 ({error.reason}); a model whose tokens are bytes reads any"
                ) from None
        tokens = stream.encode(text)
        nats = stream.score_tokens(tokens)
        self.nats += float(nats.sum())
        for place in torch.topk(nats, min(self._top, len(nats))).indices.tolist():
            heapq.heappush(self._best, (float(nats[place]), -(self.tokens + place), int(tokens[place])))
            if len(self._best) > self._top:
                heapq.heappop(self._best)
        self.tokens += len(nats)
