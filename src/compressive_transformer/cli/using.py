"""Commands that use a trained model: scoring text, writing text."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional
from tyro.constructors import PrimitiveConstructorSpec

from ..checkpoint import load
from ..config import PerLayer
from ..corpus import open_corpus
from ..errors import CompressiveError
from ..evaluate import beginnings
from ..evaluate import evaluate as evaluate_model
from ..model import with_lengths
from ..stream import Stream
from .terminal import default_device, say_over


def _one_or_each(texts: list[str]) -> PerLayer:
    """One number, or several with commas between, one for each layer."""
    numbers = tuple(map(int, texts[0].split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


LengthOption = Annotated[
    PerLayer,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT[,INT,...]",
        instance_from_str=_one_or_each,
        is_instance=lambda value: isinstance(value, int | tuple),
        str_from_instance=lambda value: [str(value)],
    ),
]


def evaluate(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    data: Annotated[Positional[Path], tyro.conf.arg(metavar="DATA")],
    /,
    split: str = "validation",
    batch: int = 8,
    memory_length: LengthOption | None = None,
    compressed_length: LengthOption | None = None,
    tokens: int = 0,
    json: bool = False,
) -> None:
    """Score a trained model on a split of a corpus: bits per byte, word perplexity, nats.

    Each document is read from its beginning, each token predicted once; the result does not depend on --batch.

    Args:
        run: A run that `compressive train` wrote.
        data: A corpus made with the same tokenizer.
        split: train, validation or test.
        batch: Documents that are read side by side.
        memory_length: Slots of recent memory, if other than in training; with commas, one number for each layer.
        compressed_length: Slots of compressed memory, if other than in training; likewise.
        tokens: Score about this many tokens only, in beginnings of documents; 0 for all.
        json: Print everything as JSON, document by document, with all that is needed to repeat it.
    """
    model, tokenizer = load(run)
    lengths = {"memory_length": memory_length, "compressed_length": compressed_length}
    if changed := {name: length for name, length in lengths.items() if length is not None}:
        model = with_lengths(model, **changed)
    chosen = open_corpus(data).split(split)
    if tokens:
        chosen = beginnings(chosen, tokenizer, tokens)
    total, done = sum(document.tokens for document in chosen.documents), 0

    def progress(tokens: int) -> None:
        nonlocal done
        done += tokens
        say_over(f"{done:,} of {total:,} tokens")

    result = evaluate_model(model.to(default_device()), chosen, batch=batch, progress=progress)
    say_over("")
    print(json_format.dumps(result.table(), indent=1, ensure_ascii=False) if json else result)


def generate(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    prompt: Path | None = None,
    tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: str | None = None,
) -> None:
    """Read a text with memory and write on from it, printed as it is produced.

    Args:
        run: A run that `compressive train` wrote.
        prompt: A file with the text to read first, "-" for standard input; without it a new document begins.
        tokens: Tokens to write.
        temperature: 0 takes the likeliest token each time, 1 samples from the model's own distribution.
        top_k: Sample among the k likeliest tokens only; 0 for all.
        top_p: Sample among the fewest tokens that have this probability together.
        seed: The same seed gives the same text.
        stop: End before this text appears.
    """
    model, tokenizer = load(run)
    stream = Stream(model.to(default_device()), tokenizer)
    if prompt is not None:
        stream.read(_read_prompt(prompt))
    pieces = stream.pieces(tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _read_prompt(path: Path) -> str:
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CompressiveError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as corpora are read
