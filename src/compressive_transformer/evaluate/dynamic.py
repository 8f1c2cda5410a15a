"""Dynamic evaluation: the model keeps learning from the text that it is scored on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from ..data import Segment, Split
from ..data.lanes import Lanes
from ..errors import CompressiveError
from ..model import CompressiveTransformer
from .buckets import Buckets, Tally
from .reading import ReadSegment, read_segments
from .result import Evaluation
from .run import evaluation_of, score_documents


def dynamic_evaluate(
    model: CompressiveTransformer,
    split: Split,
    *,
    learning_rate: float,
    by: Sequence[Buckets] = (),
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Score each document of a split with a model that learns from each segment after it was scored on it.

    Dynamic evaluation (Krause et al. 2018, arXiv 1709.07432; 2019 for Transformer-XL, arXiv 1904.08378) in its
    simplest form: one step of SGD per segment, theta - learning_rate · gradient of the mean nats per token. Each
    document starts from the weights of `model`, so the order of documents does not matter. Documents are read one
    after another, since lanes side by side would learn from one another. Compression functions do not change: the
    task loss does not reach them.

    Args:
        model: The model; a copy learns.
        split: The documents.
        learning_rate: Step size; 0 gives exactly `evaluate(model, split, batch_size=1)`.
        by: Parts of the text to score too, see `ByPosition` and `ByFrequency`.
        progress: Called after each segment with the number of tokens that were scored.

    Returns:
        Scores as `evaluate` returns them, with the learning rate among the conditions.

    Raises:
        CompressiveError: The learning rate is negative or not finite, or as `evaluate`.
    """
    if not 0 <= learning_rate < math.inf:
        raise CompressiveError(f"learning_rate ({learning_rate}) must be 0 or more, and finite")
    split.check_token_ids(model.config.vocab_size)
    learner = _Learner(copy.deepcopy(model), learning_rate)
    tallies = [Tally(buckets, split) for buckets in by]
    nats = score_documents(split, learner.read(split), tallies=tallies, progress=progress)
    dynamic = {"optimizer": "SGD", "learning_rate": learning_rate, "restored": "at the beginning of each document"}
    return evaluation_of(model, split, nats, tallies, dynamic=dynamic)


class _Learner:
    """A model that learns from each segment after it was read, and is restored where a document starts."""

    def __init__(self, model: CompressiveTransformer, learning_rate: float) -> None:
        """Take `model` over."""
        self._model, self._learning_rate = model, learning_rate
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".compression." not in name)
        self._network = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._trained = [parameter.detach().clone() for parameter in self._network]

    def read(self, split: Split) -> Generator[ReadSegment, None, None]:
        """Read the documents of a split one after another; learn from each segment once it was yielded."""
        lanes = Lanes(split, batch_size=1, length=self._model.config.segment_length)
        for read in read_segments(self._model, self._restored(lanes), with_targets=True, gradient=True):
            yield read
            self._descend(read)

    def _restored(self, lanes: Lanes) -> Iterator[Segment]:
        """Yield the segments; before each that starts a document restore the weights that training gave."""
        for segment in lanes:
            if bool(segment.starts):
                with torch.no_grad():
                    for parameter, trained in zip(self._network, self._trained, strict=True):
                        parameter.copy_(trained)
            yield segment

    def _descend(self, read: ReadSegment) -> None:
        """Take one step down the gradient of the mean nats of a segment."""
        assert read.output.nats is not None
        with torch.enable_grad():
            loss = read.output.nats.sum() / max(read.segment.total_targets, 1)
        gradients = torch.autograd.grad(loss, self._network, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(self._network, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(gradient, alpha=self._learning_rate)
