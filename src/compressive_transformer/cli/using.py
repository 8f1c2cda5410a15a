"""Commands that use a trained model: scoring text, writing text."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction
from tyro.constructors import PrimitiveConstructorSpec

from ..checkpoint import load
from ..config import PerLayer
from ..data import Corpus, Split, open_corpus
from ..data.sources.audio import read_wav, wav_of
from ..data.tokenizers import MuLawTokenizer, Tokenizer, mu_law_encode
from ..errors import CompressiveError
from ..evaluate import BORDERS, Buckets, ByFrequency, ByPosition, dynamic_evaluate, truncate_split
from ..evaluate import evaluate as evaluate_model
from ..evaluate import sweep as sweep_lengths
from ..generate import Precision, Sampling
from ..generate.sampling import DEFAULT_SAMPLING
from ..generate.stream import Stream
from ..model import with_lengths
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


@dataclass(frozen=True)
class Text:
    """What is scored."""

    split: str = "validation"
    """train, validation or test."""
    tokens: int = 0
    """About this many tokens only, in beginnings of documents; 0 for all."""
    batch_size: int = 8
    """Documents that are read side by side."""

    def of(self, corpus: Corpus, tokenizer: Tokenizer) -> Split:
        """That part of a corpus."""
        split = corpus.split(self.split)
        return truncate_split(split, tokenizer, self.tokens) if self.tokens else split


@dataclass(frozen=True)
class Measures:
    """What is measured beside the total and the score of each document."""

    by_position: bool = False
    """Scores by the place of tokens in their documents."""
    by_frequency: bool = False
    """Scores by how often words occur in the training split."""
    borders: tuple[int, ...] = ()
    """Occurrences of a word that divide --by-frequency, falling; without any 10000 1000 100, as in the paper."""
    dynamic: float | None = None
    """Learn from each segment after it was scored, by gradient descent at this learning rate; documents are then
    read one at a time, whatever --batch-size says."""

    def by(self, corpus: Corpus) -> list[Buckets]:
        """The buckets that are asked for."""
        if self.borders and not self.by_frequency:
            raise CompressiveError("--borders divide words by frequency: give --by-frequency too")
        position: list[Buckets] = [ByPosition(corpus)] if self.by_position else []
        frequency = [ByFrequency(corpus, self.borders or BORDERS)] if self.by_frequency else []
        return position + frequency


DEFAULT_TEXT, DEFAULT_MEASURES = Text(), Measures()


def evaluate(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    data: Annotated[Positional[Path], tyro.conf.arg(metavar="DATA")],
    /,
    text: OmitArgPrefixes[Text] = DEFAULT_TEXT,
    measures: OmitArgPrefixes[Measures] = DEFAULT_MEASURES,
    memory_length: LengthOption | None = None,
    compressed_length: LengthOption | None = None,
    json: bool = False,
) -> None:
    """Score a trained model on a split of a corpus: bits per byte, word perplexity, nats.

    Each document is read from its beginning, each token predicted once; the result does not depend on --batch-size.

    Args:
        run: A run that `compressive train` wrote.
        data: A corpus made with the same tokenizer.
        text: What is scored.
        measures: What is measured.
        memory_length: Slots of recent memory, if other than in training; with commas, one number for each layer.
        compressed_length: Slots of compressed memory, if other than in training; likewise.
        json: Print everything as JSON, document by document, with all that is needed to repeat it.
    """
    model, tokenizer = load(run)
    lengths = {"memory_length": memory_length, "compressed_length": compressed_length}
    if changed := {name: length for name, length in lengths.items() if length is not None}:
        model = with_lengths(model, **changed)
    corpus = open_corpus(data)
    chosen = text.of(corpus, tokenizer)
    model, by, progress = model.to(default_device()), measures.by(corpus), _told(chosen)
    if measures.dynamic is None:
        result = evaluate_model(model, chosen, batch_size=text.batch_size, by=by, progress=progress)
    else:
        result = dynamic_evaluate(model, chosen, learning_rate=measures.dynamic, by=by, progress=progress)
    say_over("")
    print(json_format.dumps(result.to_dict(), indent=1, ensure_ascii=False) if json else result)


def sweep(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    data: Annotated[Positional[Path], tyro.conf.arg(metavar="DATA")],
    /,
    text: OmitArgPrefixes[Text] = DEFAULT_TEXT,
    recent: tuple[LengthOption, ...] = (),
    compressed: tuple[LengthOption, ...] = (),
    json: bool = False,
) -> None:
    """Score a trained model with other memory lengths than it was trained with, each with each.

    Args:
        run: A run that `compressive train` wrote.
        data: A corpus made with the same tokenizer.
        text: What is scored.
        recent: Slots of recent memory to try; with commas, one number for each layer; without any, as in training.
        compressed: Slots of compressed memory to try; likewise.
        json: Print a JSON list of what `compressive evaluate --json` prints.
    """
    model, tokenizer = load(run)
    chosen = text.of(open_corpus(data), tokenizer)
    progress = _told(chosen, times=max(1, len(recent)) * max(1, len(compressed)))
    results = sweep_lengths(
        model.to(default_device()),
        chosen,
        memory_lengths=recent,
        compressed_lengths=compressed,
        batch_size=text.batch_size,
        progress=progress,
    )
    say_over("")
    if json:
        print(json_format.dumps([result.to_dict() for result in results], indent=1, ensure_ascii=False))
        return
    print(f"{'recent':>10}{'compressed':>12}{'bits per byte':>15}{'word perplexity':>17}{'nats per token':>16}")
    for result in results:
        memory, total = result.conditions["model"], result.total
        print(
            f"{memory['memory_length']!s:>10}{memory['compressed_length']!s:>12}{total.bits_per_byte:>15.4f}"
            f"{total.word_perplexity:>17.2f}{total.nats_per_token:>16.4f}"
        )


def generate(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    prompt: Path | None = None,
    tokens: int = 200,
    sampling: OmitArgPrefixes[UseAppendAction[Sampling]] = DEFAULT_SAMPLING,
    precision: Precision = "full",
) -> None:
    """Read a text with memory and write on from it, printed as it is produced.

    What a model of sound writes is a WAV file: compressive generate RUN --tokens 16000 > sound.wav

    Args:
        run: A run that `compressive train` wrote.
        prompt: A file with the text to read first, "-" for standard input; without it a new document begins. For
            a model of sound, a .wav file.
        tokens: Tokens to write.
        sampling: How tokens are chosen.
        precision: Weights while writing: as the model has them, or rounded to bf16 or int8 (CPU only), which is
            faster and writes another text.
    """
    model, tokenizer = load(run)
    stream = Stream(model.to(default_device()), tokenizer, precision)
    if isinstance(tokenizer, MuLawTokenizer) and sys.stdout.isatty():
        raise CompressiveError(f"{run} writes sound: send it to a file, compressive generate {run} > sound.wav")
    if prompt is not None:
        stream.read(_read_sound(prompt, tokenizer) if isinstance(tokenizer, MuLawTokenizer) else _read_prompt(prompt))
    pieces = stream.iter_text(tokens, sampling)
    if isinstance(tokenizer, MuLawTokenizer):
        sys.stdout.buffer.write(wav_of(tokenizer.encode("".join(pieces)), tokenizer.rate))
        return
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _told(split: Split, *, times: int = 1) -> Callable[[int], None]:
    """Shows how many of the tokens of a split, scored `times` times, are done."""
    total, done = times * sum(map(split.count_targets, range(len(split.documents)))), 0

    def progress(tokens: int) -> None:
        nonlocal done
        done += tokens
        say_over(f"{done:,} of {total:,} tokens")

    return progress


def _read_sound(path: Path, tokenizer: MuLawTokenizer) -> str:
    rate, samples = read_wav(path)
    if rate != tokenizer.rate:
        raise CompressiveError(f"{path} has {rate} samples a second, the run's data {tokenizer.rate}: convert it first")
    return tokenizer.decode(mu_law_encode(samples))


def _read_prompt(path: Path) -> str:
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CompressiveError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as corpora are read
