"""What several files of tests use and is made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compressive_transformer.data import Corpus, prepare
from runs import tiny_run, write_books

# Models as small as these gain nothing from threads, which wait for one another where cores are busy.
torch.set_num_threads(1)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU even where there is a GPU: these tests compare numbers to the bit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def double() -> Iterator[None]:
    """Models in float64: AdamW makes what rounding leaves of a gradient that cancels as large as any other."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A few kilobytes of sample books as bytes, in three splits."""
    folder = tmp_path_factory.mktemp("corpus")
    return prepare(write_books(folder / "books"), folder / "data")


@pytest.fixture(scope="session")
def finished(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of ten steps, dropout included; only to be read."""
    run = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        tiny_run(corpus, run, model={"dropout": 0.1})
    return run
