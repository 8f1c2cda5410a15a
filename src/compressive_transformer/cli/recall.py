"""The command that measures distant recall."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from ..checkpoint import load
from ..data import open_corpus
from ..evaluate.recall import recall_accuracy
from .terminal import default_device


def recall(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    data: Annotated[Positional[Path], tyro.conf.arg(metavar="DATA")],
    /,
    split: str = "validation",
    batch_size: int = 32,
    json: bool = False,
) -> None:
    """Measure how often a trained model knows again what it read far back, by distance and by memory.

    Args:
        run: A run that `compressive train` wrote, trained on such a corpus.
        data: A corpus that `compressive prepare` made from recall:MIN-MAX or from
            passkey:SOURCE:MIN-MAX.
        split: train, validation or test.
        batch: Documents that are read side by side; the result does not depend on it.
        json: Print everything as JSON, document by document.
    """
    model, _ = load(run)
    result = recall_accuracy(model.to(default_device()), open_corpus(data).split(split), batch_size=batch_size)
    print(json_format.dumps(result.to_dict(), indent=1, ensure_ascii=False) if json else result)
