"""The command `inspect`."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from ..apps.inspection import SPREAD, Inspection, InspectionReport, different_texts, inspect_text, require_page
from ..checkpoint import load
from ..data import open_corpus
from ..data.tokenizers import ByteTokenizer, MuLawTokenizer, Tokenizer
from ..errors import CompressiveError
from ..evaluate import BORDERS, ByFrequency
from ..model import CompressiveTransformer
from ..progress import Progress
from ._common import default_device, say

Loaded = tuple[CompressiveTransformer, Tokenizer]


@dataclass(frozen=True)
class Chosen:
    """Tokens whose attention is shown slot by slot."""

    token: tuple[int, ...] = ()
    """Places of tokens in the text, from 0."""
    spread: int = SPREAD
    """Number of further tokens: as many spread evenly over the text, and as many that compressed memory helps most."""


@dataclass(frozen=True)
class Frequency:
    """Buckets of words by frequency."""

    data: Path | None = None
    """Corpus whose training split counts the occurrences of words."""
    borders: tuple[int, ...] = ()
    """Occurrences that separate the buckets, descending; by default 10000 1000 100, as in the paper."""

    def buckets(self) -> ByFrequency | None:
        """Return the buckets, None without a corpus."""
        if self.data is None:
            if self.borders:
                raise CompressiveError("--borders needs a corpus that counts words: add --data CORPUS")
            return None
        return ByFrequency(open_corpus(self.data), self.borders or BORDERS)


DEFAULT_CHOSEN, DEFAULT_FREQUENCY = Chosen(), Frequency()


def inspect(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    document: Annotated[Positional[Path], tyro.conf.arg(metavar="TEXT")],
    /,
    out: Path | None = None,
    against: Path | None = None,
    chosen: OmitArgPrefixes[Chosen] = DEFAULT_CHOSEN,
    frequency: OmitArgPrefixes[Frequency] = DEFAULT_FREQUENCY,
    json: bool = False,
) -> None:
    """Show what a model remembers of a text: surprisal, attention by age, contents of slots, loss of compression and
    gain of compressed memory.

    The text is read from its beginning as one document. The page is a single file that loads nothing else.

    Args:
        run: Folder of a run that `compressive train` wrote.
        document: Text file, "-" for standard input; any bytes for a model whose tokens are bytes.
        out: Page to write, for example report.html; an existing file is replaced.
        against: Another run, shown beside the first on the same text.
        chosen: Tokens whose attention is shown.
        frequency: Buckets of words by frequency.
        json: Print everything as JSON.
    """
    if out is not None:
        require_page(out)
    runs = [run] if against is None else [run, against]
    models = [_load(path) for path in runs]
    by = frequency.buckets()
    content = _read(document, [tokenizer for _, tokenizer in models])
    _require_same_text(models, content)
    try:
        first, *others = _inspect_all(models, content, chosen)
        report = InspectionReport(
            first,
            others[0] if others else None,
            frequency=by,
            name=str(run),
            against_name=str(against),
            text_name=document.name,
        )
        if out is not None:
            report.write(out)
            say(f"the page is in {out}")
    except KeyboardInterrupt:
        raise CompressiveError("interrupted; nothing was written") from None
    print(json_format.dumps(report.to_dict(), ensure_ascii=False) if json else report)


def _load(run: Path) -> Loaded:
    model, tokenizer = load(run)
    if isinstance(tokenizer, MuLawTokenizer):
        raise CompressiveError(f"{run} is a model of sound; choose a model of text")
    return model.to(default_device()), tokenizer


def _read(path: Path, tokenizers: list[Tokenizer]) -> str | bytes:
    """Read a file with line ends as in corpora; as bytes where all models read bytes."""
    content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if not content:
        raise CompressiveError(f"{path}: empty; expected a text to read")
    if all(isinstance(tokenizer, ByteTokenizer) for tokenizer in tokenizers):
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CompressiveError(
            f"{path}: not UTF-8 at byte {error.start}; convert it first, or inspect a model whose tokens are bytes"
        ) from None


def _require_same_text(models: list[Loaded], content: str | bytes) -> None:
    """Raise CompressiveError if two models would not read the same text, before a long reading."""
    if len(models) > 1:
        texts = {tokenizer.decode(tokenizer.encode(content)) for _, tokenizer in models}
        if len(texts) > 1:
            raise different_texts()


def _inspect_all(models: list[Loaded], content: str | bytes, chosen: Chosen) -> list[Inspection]:
    with Progress(sum(len(tokenizer.encode(content)) for _, tokenizer in models)) as progress:
        return [
            inspect_text(*pair, content, tokens=chosen.token, spread=chosen.spread, progress=progress.advance)
            for pair in models
        ]
