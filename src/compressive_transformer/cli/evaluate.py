"""The command `evaluate`, and options that it shares with `sweep`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import OmitArgPrefixes
from tyro.constructors import PrimitiveConstructorSpec

from ..config import PerLayer
from ..data import Corpus, Split, open_corpus
from ..data.tokenizers import Tokenizer
from ..errors import CompressiveError
from ..evaluate import BORDERS, Buckets, ByFrequency, ByPosition, dynamic_evaluate, truncate_split
from ..evaluate import evaluate as evaluate_model
from ..model import with_lengths
from ..progress import Progress
from ._common import DataArgument, RunArgument, load_model, print_result


def _one_or_per_layer(texts: list[str]) -> PerLayer:
    """Return one number, or a tuple of several that are separated by commas."""
    numbers = tuple(map(int, texts[0].split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


LengthOption = Annotated[
    PerLayer,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT[,INT,...]",
        instance_from_str=_one_or_per_layer,
        is_instance=lambda value: isinstance(value, int | tuple),
        str_from_instance=lambda value: [str(value)],
    ),
]


@dataclass(frozen=True)
class SplitOptions:
    """Part of a corpus to score."""

    split: str = "validation"
    """Split to score: train, validation or test."""
    tokens: int = 0
    """Score about N tokens only, from the beginnings of documents; 0 for all."""
    batch_size: int = 8
    """Documents per batch; it does not change the result."""

    def select(self, corpus: Corpus, tokenizer: Tokenizer) -> Split:
        """Return that part of a corpus."""
        split = corpus.split(self.split)
        return truncate_split(split, tokenizer, self.tokens) if self.tokens else split


@dataclass(frozen=True)
class MetricOptions:
    """Metrics beside the total and the score of each document."""

    by_position: bool = False
    """Also score by position in the document."""
    by_frequency: bool = False
    """Also score by word frequency in the training split."""
    borders: tuple[int, ...] = ()
    """Word counts that divide --by-frequency, in falling order; by default 10000 1000 100, as in the paper."""
    dynamic: float | None = None
    """Dynamic evaluation: after each segment is scored, train on it by SGD at this learning rate. Documents are read
    one at a time, whatever --batch-size says."""

    def buckets(self, corpus: Corpus) -> list[Buckets]:
        """Return the buckets of tokens to score separately."""
        if self.borders and not self.by_frequency:
            raise CompressiveError("--borders divide words by frequency: give --by-frequency too")
        position: list[Buckets] = [ByPosition(corpus)] if self.by_position else []
        return position + ([ByFrequency(corpus, self.borders or BORDERS)] if self.by_frequency else [])


DEFAULT_SPLIT, DEFAULT_METRICS = SplitOptions(), MetricOptions()


def evaluate(
    run: RunArgument,
    data: DataArgument,
    /,
    split: OmitArgPrefixes[SplitOptions] = DEFAULT_SPLIT,
    metrics: OmitArgPrefixes[MetricOptions] = DEFAULT_METRICS,
    memory_length: LengthOption | None = None,
    compressed_length: LengthOption | None = None,
    json: bool = False,
) -> None:
    """Score a trained model on a split of a corpus: bits per byte, word perplexity, nats.

    Each document is read from its beginning and each token is predicted once.

    Args:
        run: Run from `compressive train`.
        data: Corpus with the same tokenizer.
        split: Part of the corpus to score.
        metrics: Additional metrics.
        memory_length: Slots of recent memory, if not as in training; one number, or one per layer.
        compressed_length: Slots of compressed memory, if not as in training; one number, or one per layer.
        json: Print everything as JSON, document by document, with all settings needed to reproduce it.
    """
    model, tokenizer = load_model(run)
    lengths = {"memory_length": memory_length, "compressed_length": compressed_length}
    if changed := {name: length for name, length in lengths.items() if length is not None}:
        model = with_lengths(model, **changed)
    corpus = open_corpus(data)
    part, by = split.select(corpus, tokenizer), metrics.buckets(corpus)
    with progress_of(part) as progress:
        if metrics.dynamic is None:
            result = evaluate_model(model, part, batch_size=split.batch_size, by=by, progress=progress.advance)
        else:
            result = dynamic_evaluate(model, part, learning_rate=metrics.dynamic, by=by, progress=progress.advance)
    print_result(result, as_json=json)


def progress_of(split: Split, *, times: int = 1) -> Progress:
    """Return a progress display for scoring a split `times` times."""
    return Progress(times * sum(map(split.count_targets, range(len(split.documents)))))
