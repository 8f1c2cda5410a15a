"""The command `recall`."""

from __future__ import annotations

from ..data import open_corpus
from ..evaluate.recall import recall_accuracy
from ._common import DataArgument, RunArgument, load_model, print_result


def recall(
    run: RunArgument,
    data: DataArgument,
    /,
    split: str = "validation",
    batch_size: int = 32,
    json: bool = False,
) -> None:
    """Measure how often a trained model recalls a key that it read long before, by distance and by kind of memory.

    Args:
        run: Run from `compressive train` on such a corpus.
        data: Corpus from `compressive prepare` with the source recall:MIN-MAX or passkey:SOURCE:MIN-MAX.
        split: Split to score: train, validation or test.
        batch_size: Documents per batch; it does not change the result.
        json: Print everything as JSON, document by document.
    """
    model, _ = load_model(run)
    print_result(recall_accuracy(model, open_corpus(data).split(split), batch_size=batch_size), as_json=json)
