"""Dynamic evaluation: the model goes on learning from the text that it is scored on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..data import Split
from ..data.lanes import Lanes
from ..errors import CompressiveError
from ..model import CompressiveTransformer
from .buckets import Buckets, Tally
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
    """The score of each document of `split` by a model that learns from each segment after it was scored on it.

    Dynamic evaluation (Krause et al. 2018, arXiv 1709.07432; 2019 for Transformer-XL, arXiv 1904.08378), in its
    plainest form: one step of stochastic gradient descent a segment, theta - learning_rate · gradient of the mean
    nats a token. Each document begins with the parameters of `model`, so it does not matter in which order documents
    are read. They are read one after another, since lanes side by side would learn from one another.

    Compression functions stay as they are: only the task loss is learnt from, and it does not reach them. With a
    learning rate of 0 this is `evaluate(model, split, batch_size=1)` to the bit. `model` is not changed; a copy learns.

    Raises CompressiveError as `evaluate` does, and for a learning rate that is negative or no number.
    """
    if not 0 <= learning_rate < math.inf:
        raise CompressiveError(f"learning_rate ({learning_rate}) must be 0 or more, and finite")
    lanes = Lanes(split, batch_size=1, length=model.config.segment_length)
    tallies = [Tally(buckets, split) for buckets in by]
    learner = _Descent(copy.deepcopy(model), learning_rate)
    nats = score_documents(learner.model, split, lanes, tallies=tallies, learner=learner, progress=progress)
    dynamic = {"optimizer": "SGD", "learning_rate": learning_rate, "restored": "at the beginning of each document"}
    return evaluation_of(model, split, nats, tallies, dynamic=dynamic)


class _Descent:
    """Plain gradient descent of a model's network, and the way back to where it started."""

    def __init__(self, model: CompressiveTransformer, learning_rate: float) -> None:
        """Takes `model` over."""
        self.model, self.learning_rate = model, learning_rate
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".compression." not in name)
        self.network = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.trained = [parameter.detach().clone() for parameter in self.network]

    @torch.no_grad()
    def begin(self) -> None:
        """Back to the parameters that training gave."""
        for parameter, trained in zip(self.network, self.trained, strict=True):
            parameter.copy_(trained)

    def learn(self, loss: Tensor) -> None:
        """One step down the gradient of `loss`."""
        gradients = torch.autograd.grad(loss, self.network, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(self.network, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(gradient, alpha=self.learning_rate)
