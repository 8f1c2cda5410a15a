"""Files of every release are read for ever: a run, its checkpoint, its corpus and a stream that was kept.

    python tests/test_kept.py tests/kept/VERSION

writes those of today, once for each release.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import compressive_transformer as ct
from compressive_transformer.config import ModelConfig, TrainConfig
from compressive_transformer.config.toml import from_mapping
from compressive_transformer.train.resume import ResumePoint
from runs import TRAINING, tiny_model, write_books

KEPT = Path(__file__).parent / "kept"
TEXT = "Call me Ishmael."
RELEASES = sorted(path for path in KEPT.iterdir() if path.is_dir()) if KEPT.exists() else []
each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
pytestmark = pytest.mark.usefixtures("cpu")


def told(release: Path) -> dict[str, list[float]]:
    """Numbers that files stand for."""
    model, tokenizer = ct.load(release / "run")
    stream = ct.Stream(model, tokenizer)
    corpus = ct.open_corpus(release / "data")
    return {
        "nats": stream.score(TEXT).tolist(),
        "nats after the stream that was kept": ct.Stream.load(release / "stream", model, tokenizer)
        .score(TEXT)
        .tolist(),
        "bits per byte of test": [ct.evaluate(model, corpus.test).total.bits_per_byte],
    }


def write(release: Path) -> None:
    """What later releases must read."""
    books = write_books(release / "books")
    corpus = ct.prepare(books, release / "data")
    shutil.rmtree(books)
    model = tiny_model(compression="conv-overlap")
    ct.train(model, corpus, TrainConfig(**TRAINING), release / "run", stop_at=5)
    stream = ct.Stream(*ct.load(release / "run"))
    stream.read(TEXT * 3)
    stream.save(release / "stream")
    (release / "expected.json").write_text(json.dumps(told(release), indent=1) + "\n", encoding="utf-8")


def test_there_is_one_of_this_release() -> None:
    assert RELEASES


@each_release
def test_files_of_a_release_say_what_they_said_then(release: Path) -> None:
    expected = json.loads((release / "expected.json").read_text(encoding="utf-8"))
    found = told(release)
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, rel=1e-4), name  # another processor rounds in another order


@each_release
def test_a_checkpoint_of_a_release_can_be_resumed(release: Path, tmp_path: Path) -> None:
    shutil.copytree(release / "run", tmp_path / "run")
    (point,) = ResumePoint.find_all(tmp_path / "run")
    state = point.state()
    model = ct.CompressiveTransformer(from_mapping(ModelConfig, state["model"], "state"))
    config = from_mapping(TrainConfig, state["train"], "state")
    ct.train(model, ct.open_corpus(release / "data"), config, tmp_path / "run", resume="latest", stop_at=7)
    (point,) = ResumePoint.find_all(tmp_path / "run")
    assert point.step == 7
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
