"""Scores of an endless text, line by line as it arrives: logs, pipes, raw bytes."""

from __future__ import annotations

import codecs
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ..data.tokenizers import ByteTokenizer
from ..errors import CompressiveError
from .stream import Stream

PIECE_BYTES = 65_536
"""Largest number of bytes that are read at a time, so that a line without end needs no more room."""
SHOWN = 2_000
"""Largest number of characters in `ScoredLine.text`."""


class ByteReader(Protocol):
    """An open binary file or pipe."""

    def readline(self, size: int, /) -> bytes:
        """Return bytes up to and including the next line end, at most `size`; none at the end."""

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, fewer only at the end."""


@dataclass(frozen=True)
class ScoredLine:
    """A line and how well the model predicted it from everything before it."""

    number: int
    """Number of the line, from 1."""
    text: str
    """The first 2,000 characters without the line end, with U+FFFD where bytes are not UTF-8."""
    tokens: int
    """Number of tokens."""
    bytes: int
    """Number of bytes that were read, line end included."""
    bits: float
    """Information content, -log2 p(line | all before)."""
    top: tuple[tuple[str, float], ...]
    """The most surprising tokens, as text, and their bits, in falling order."""

    @property
    def bits_per_byte(self) -> float:
        """Bits divided by bytes."""
        return self.bits / self.bytes


def score_lines(stream: Stream, source: ByteReader, *, top: int = 0, block: int = 0) -> Iterator[ScoredLine]:
    """Read a source into a stream until it ends, and yield the score of each line as soon as it is complete.

    Each line is encoded alone, with its line end; CRLF is read as LF, as `prepare` does. Memory use grows neither with
    the source nor with a line: a line of more than 65,536 bytes is encoded in pieces of that size.

    Args:
        stream: The stream to continue.
        source: An open binary file or pipe.
        top: Number of most surprising tokens to return with each line.
        block: Size in bytes of blocks to score instead of lines, raw, for models whose tokens are bytes; 0 for lines.

    Returns:
        An iterator over the scored lines or blocks.

    Raises:
        CompressiveError: `top` or `block` is negative, blocks are asked of a model whose tokens are not bytes, or a
            line is not UTF-8 and the tokens are not bytes.
    """
    if top < 0 or block < 0:
        raise CompressiveError(f"top ({top}) and block ({block}) must be 0 or more")
    if block and not isinstance(stream.tokenizer, ByteTokenizer):
        raise CompressiveError("blocks need a model whose tokens are bytes; leave `block` out to score lines")
    return _iter_lines(stream, source, top, block)


def _iter_lines(stream: Stream, source: ByteReader, top: int, block: int) -> Iterator[ScoredLine]:
    line = _Line(stream, 1, top)
    while content := source.read(min(block - line.bytes, PIECE_BYTES)) if block else source.readline(PIECE_BYTES):
        line.add(content, raw=bool(block))
        if line.bytes == block or (not block and content.endswith(b"\n")):
            yield line.finish()
            line = _Line(stream, line.number + 1, top)
    if line.bytes:  # the last one has no end
        yield line.finish()


class _Line:
    """The scores of a line that is being read."""

    def __init__(self, stream: Stream, number: int, top: int) -> None:
        self.number, self.bytes = number, 0
        self._stream, self._top = stream, top
        self._tokens, self._nats, self._text = 0, 0.0, ""
        self._best: list[tuple[float, int, int]] = []  # a heap of nats, -place and id
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._shown = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""  # a carriage return, until it is known whether a line feed follows

    def add(self, content: bytes, *, raw: bool) -> None:
        """Score the next piece of the line."""
        self.bytes += len(content)
        if not raw:
            content = self._held + content
            self._held = b"\r" if content.endswith(b"\r") else b""
            content = content.removesuffix(self._held).replace(b"\r\n", b"\n")
        self._score(content)

    def finish(self) -> ScoredLine:
        """Return the score of the whole line."""
        self._score(self._held, final=True)
        decode = self._stream.tokenizer.decode
        top = tuple((decode([token]), nats / math.log(2)) for nats, _, token in sorted(self._best, reverse=True))
        text = self._text.removesuffix("\n")
        return ScoredLine(self.number, text, self._tokens, self.bytes, self._nats / math.log(2), top)

    def _score(self, content: bytes, *, final: bool = False) -> None:
        if len(self._text) < SHOWN:
            self._text = (self._text + self._shown.decode(content, final))[:SHOWN]
        tokens = self._stream.encode(self._decode(content, final))
        nats = self._stream.score_tokens(tokens)
        self._nats += float(nats.sum())
        for place in torch.topk(nats, min(self._top, len(nats))).indices.tolist():
            heapq.heappush(self._best, (float(nats[place]), -(self._tokens + place), int(tokens[place])))
            if len(self._best) > self._top:
                heapq.heappop(self._best)
        self._tokens += len(nats)

    def _decode(self, content: bytes, final: bool) -> str | bytes:
        """Return the text of bytes where tokens are not bytes; an incomplete character waits for the next piece."""
        if isinstance(self._stream.tokenizer, ByteTokenizer):
            return content
        try:
            return self._utf8.decode(content, final)
        except UnicodeDecodeError as error:
            raise CompressiveError(
                f"line {self.number} is not UTF-8 ({error.reason}): convert it first, or use a model whose tokens are "
                "bytes"
            ) from None
