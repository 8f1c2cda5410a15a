"""A run that is stopped and resumed is the run without the stop, to the bit, and lanes keep their memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compressive_transformer.data import Corpus
from compressive_transformer.errors import CompressiveError
from compressive_transformer.memory import Memory, join
from compressive_transformer.train import Trainer
from compressive_transformer.train.resume import memories_from, named_memories, reshard
from runs import TRAINING, assert_same_run, assert_same_tensors, log_of, tiny_model, tiny_run

pytestmark = pytest.mark.usefixtures("cpu")

STEPS = TRAINING["steps"]


@pytest.fixture(scope="module")
def begun(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after its first step; only to be copied."""
    run = tmp_path_factory.mktemp("begun") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        tiny_run(corpus, run, stop_at=1)
    return run


@pytest.fixture(scope="module")
def long(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `finished`, stopped after step 9, with three checkpoints; only to be copied."""
    run = tmp_path_factory.mktemp("long") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        tiny_run(corpus, run, model={"dropout": 0.1}, keep_checkpoints=3, stop_at=9)
    return run


@pytest.mark.parametrize("stops", [(5, 10), (1, 4, 7, 10)])
def test_a_run_in_parts_is_the_run_in_one_go_to_the_bit(
    corpus: Corpus, finished: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    for number, stop in enumerate(stops):
        last = tiny_run(
            corpus,
            tmp_path / "run",
            model={"dropout": 0.1, "seed": number},
            resume="latest" if number else None,
            stop_at=stop,
        )
        assert [file.name for file in (tmp_path / "run/resume").iterdir()] == [f"step-{stop:09}"]
    assert_same_run(tmp_path / "run", finished)
    shared = load_file(finished / f"resume/step-{STEPS:09}/training.safetensors")
    assert_same_tensors(
        {f"model.{k}": v for k, v in last.state_dict().items()},
        {name: value for name, value in shared.items() if name.startswith("model.")},
    )


def test_if_any_resumes_a_run_or_starts_it(corpus: Corpus, finished: Path, tmp_path: Path) -> None:
    model = {"dropout": 0.1}
    tiny_run(corpus, tmp_path / "run", model=model, resume="if-any", stop_at=4)
    tiny_run(corpus, tmp_path / "run", model=model, resume="if-any")
    assert_same_run(tmp_path / "run", finished)
    # A run that ended before its first checkpoint has a log only.
    (tmp_path / "early").mkdir()
    (tmp_path / "early/log.jsonl").write_text('{"step": 2, "loss": 1.0}\n')
    tiny_run(corpus, tmp_path / "early", model=model, resume="if-any")
    assert_same_run(tmp_path / "early", finished)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").write_text("mine")
    with pytest.raises(CompressiveError, match="exists already; choose another folder"):
        tiny_run(corpus, tmp_path / "other", resume="if-any")


def test_the_latest_checkpoints_are_kept_with_their_checksums(corpus: Corpus, tmp_path: Path) -> None:
    for kept in (3, 9):
        tiny_run(corpus, tmp_path / f"run-{kept}", keep_checkpoints=kept)
        points = sorted((tmp_path / f"run-{kept}" / "resume").iterdir())
        assert [int(point.name[5:]) for point in points] == [3, 6, 9, 10][-kept:]
        for point in points:
            sums = [line.split("  ") for line in (point / "SHA256SUMS").read_text().splitlines()]
            assert {name for _, name in sums} == {path.name for path in point.iterdir()} - {"SHA256SUMS"}
            assert all(hashlib.sha256((point / name).read_bytes()).hexdigest() == found for found, name in sums)


def test_a_copy_of_a_checkpoint_is_ignored(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", stop_at=3)
    points = tmp_path / "run/resume"
    shutil.copytree(points / "step-000000003", points / "step-000000003-mine")
    (points / "step-000000003-mine/state.json").write_text("{}")
    tiny_run(corpus, tmp_path / "run", resume="latest")
    assert sorted(path.name for path in points.iterdir()) == ["step-000000003-mine", "step-000000010"]


@pytest.mark.parametrize("name", ["state.json", "training.safetensors", "process-0.safetensors"])
def test_the_checkpoint_before_a_damaged_one_gives_the_same_run(
    corpus: Corpus, finished: Path, long: Path, tmp_path: Path, name: str
) -> None:
    options = {"model": {"dropout": 0.1}, "keep_checkpoints": 3}
    shutil.copytree(long, tmp_path / "run")
    damaged = tmp_path / "run/resume/step-000000009" / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1  # one bit, which may well be a number that can be
    damaged.write_bytes(content)
    for content_now in (bytes(content), b""):
        damaged.write_bytes(content_now)
        with pytest.raises(CompressiveError, match=rf"000009/{name}: damaged, .*; resume from .* --resume 6$"):
            tiny_run(corpus, tmp_path / "run", resume="latest", **options)
    damaged.unlink()
    with pytest.raises(CompressiveError, match=rf"000009/{name}: damaged"):
        tiny_run(corpus, tmp_path / "run", resume="latest", **options)
    with pytest.raises(CompressiveError, match="no checkpoint of step 5; there are those of steps 3, 6, 9"):
        tiny_run(corpus, tmp_path / "run", resume=5, **options)
    tiny_run(corpus, tmp_path / "run", resume=6, **options)
    points = sorted((tmp_path / "run/resume").iterdir())
    assert [int(point.name[5:]) for point in points] == [6, 9, 10]
    whole = finished / "resume" / points[-1].name
    for file in ("training.safetensors", "process-0.safetensors"):
        assert_same_tensors(load_file(points[-1] / file), load_file(whole / file))
    assert log_of(tmp_path / "run") == log_of(finished)


def test_a_checkpoint_without_checksums_can_be_resumed(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", stop_at=4)
    (tmp_path / "run/resume/step-000000004/SHA256SUMS").unlink()
    tiny_run(corpus, tmp_path / "run", resume="latest", stop_at=5)
    (tmp_path / "run/resume/step-000000005/SHA256SUMS").write_text("no checksum\n")
    with pytest.raises(
        CompressiveError, match="damaged, its checksum differs from that in SHA256SUMS; there is none before"
    ):
        tiny_run(corpus, tmp_path / "run", resume="latest")


def test_a_run_over_pieces_of_documents_resumes_to_the_bit(corpus: Corpus, tmp_path: Path) -> None:
    for stop in (3, 7, 10):
        tiny_run(
            corpus, tmp_path / "parts", max_document_length=24, resume="latest" if stop > 3 else None, stop_at=stop
        )
        own = load_file(tmp_path / f"parts/resume/step-{stop:09}/process-0.safetensors")
        # No piece ends early in these steps, so that all lanes begin a new one every third step.
        assert own["memory-0.seen"].tolist() == [24 if stop % 3 == 0 else 8] * 4
    tiny_run(corpus, tmp_path / "whole", max_document_length=24)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_checkpoint_in_the_middle_of_an_update_holds_its_gradients(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", stop_at=5)
    own = load_file(tmp_path / "run/resume/step-000000005/process-0.safetensors")
    assert sum(name.startswith("gradient.") for name in own) == len(list(tiny_model().parameters()))
    tiny_run(corpus, tmp_path / "run", resume="latest", stop_at=6)
    own = load_file(tmp_path / "run/resume/step-000000006/process-0.safetensors")
    assert not any(name.startswith("gradient.") for name in own)


def test_a_killed_run_resumes_from_its_last_checkpoint(
    corpus: Corpus, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def killed(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.counters.step == 8:
            raise KeyboardInterrupt
        return step(trainer, *arguments)

    run = tmp_path / "run"
    monkeypatch.setattr(Trainer, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(corpus, run, model={"dropout": 0.1})
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert log_of(run)[-1]["step"] == 8
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 9, "lo')  # and power went while a line was written
    tiny_run(corpus, run, model={"dropout": 0.1}, resume="latest")
    assert_same_run(run, finished)


def test_a_finished_run_has_nothing_left_to_do(corpus: Corpus, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", steps=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    tiny_run(corpus, tmp_path / "run", steps=3, resume="latest")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        ({}, {"learning_rate": 0.02}, r"train\.learning_rate was 0\.01 and is 0\.02 now"),
        ({}, {"batch_size": 2}, r"train\.batch_size was 4 and is 2 now"),
        ({}, {"max_document_length": 8}, r"train\.max_document_length was 0 and is 8 now"),
        ({"memory_length": 10}, {}, r"model\.memory_length was 9 and is 10 now"),
    ],
)
def test_a_run_never_resumes_with_other_settings(
    corpus: Corpus, begun: Path, tmp_path: Path, model: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    before = (tmp_path / "run/log.jsonl").read_bytes()
    with pytest.raises(CompressiveError, match=f"step-000000001: cannot resume, {message}; set it back"):
        tiny_run(corpus, tmp_path / "run", model=model, resume="latest", **training)
    assert (tmp_path / "run/log.jsonl").read_bytes() == before


@pytest.mark.parametrize("file", ["training.safetensors", "process-0.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "of another kind"])
def test_a_damaged_checkpoint_is_named_in_one_line(
    corpus: Corpus, begun: Path, tmp_path: Path, file: str, damage: str
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    path = tmp_path / "run/resume/step-000000001" / file
    path.with_name("SHA256SUMS").unlink()  # which would find the damage first
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "of another kind":
        empty = b'{"format": 1}' if file == "state.json" else (2).to_bytes(8, "little") + b"{}"
        path.write_bytes(empty)
    with pytest.raises(CompressiveError, match="step-000000001") as caught:
        tiny_run(corpus, tmp_path / "run", resume="latest")
    assert "\n" not in str(caught.value)


def test_a_run_of_an_earlier_version_resumes_with_default_settings(corpus: Corpus, begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "run")
    path = tmp_path / "run/resume/step-000000001/state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    for name in ("optimizer", "gradient_checkpointing", "compile"):
        del state["train"][name]
    del state["model"]["compression_heads"]
    path.write_text(json.dumps(state), encoding="utf-8")
    path.with_name("SHA256SUMS").unlink()  # they wrote none
    with pytest.raises(CompressiveError, match=r"train\.optimizer was 'adamw' and is 'muon' now"):
        tiny_run(corpus, tmp_path / "run", resume="latest", optimizer="muon")
    tiny_run(corpus, tmp_path / "run", resume="latest", stop_at=2)
    tiny_run(corpus, tmp_path / "whole", stop_at=2)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_run_with_muon_resumes_to_the_bit(corpus: Corpus, tmp_path: Path) -> None:
    start = dict(tiny_model().named_parameters())
    whole = tiny_run(corpus, tmp_path / "whole", optimizer="muon", stop_at=7)
    tiny_run(corpus, tmp_path / "parts", optimizer="muon", stop_at=4)
    tiny_run(corpus, tmp_path / "parts", optimizer="muon", resume="latest", stop_at=7)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert all(parameter.ne(start[name]).any() for name, parameter in whole.named_parameters())


@pytest.mark.parametrize(
    "fields",
    [
        {"compression_loss": "bptt"},
        {"compression_loss": "auto-encoding"},
        {"compression": "dilated"},
        {"compression": "most-used"},
        {"compression": "attention", "compression_heads": 2},
    ],
    ids=str,
)
def test_every_function_and_loss_trains_and_resumes_to_the_bit(
    corpus: Corpus, tmp_path: Path, fields: dict[str, Any]
) -> None:
    whole = tiny_run(corpus, tmp_path / "whole", model=fields, stop_at=7)
    tiny_run(corpus, tmp_path / "parts", model=fields, stop_at=4)  # in the middle of an update
    tiny_run(corpus, tmp_path / "parts", model=fields, resume="latest", stop_at=7)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    start = dict(tiny_model(**fields).named_parameters())
    for name, parameter in whole.named_parameters():
        assert parameter.ne(start[name]).any(), name
        assert parameter.isfinite().all(), name


@pytest.mark.filterwarnings("ignore::compressive_transformer.CompressiveWarning")
@pytest.mark.parametrize(
    "fields",
    [
        {"compression": "mean"},
        {"compression_loss": "none"},
        {"compressed_length": 0},
        {"compressed_length": 0, "memory_length": 0},
        {"compressed_length": (0, 4), "memory_length": (9, 0), "compression": "max"},
    ],
)
def test_models_without_a_compression_that_learns_are_trained_too(
    corpus: Corpus, tmp_path: Path, fields: dict[str, Any]
) -> None:
    tiny_run(corpus, tmp_path / "parts", model=fields, stop_at=4)
    tiny_run(corpus, tmp_path / "parts", model=fields, resume="latest", stop_at=7)
    tiny_run(corpus, tmp_path / "whole", model=fields, stop_at=7)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert all(line["compression_loss"] == 0 for line in log_of(tmp_path / "whole") if "loss" in line)


def test_what_exists_is_never_overwritten(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("mine")
    for out in (tmp_path / "run", tmp_path / "run/mine.txt"):
        with pytest.raises(CompressiveError, match="exists already; choose another folder"):
            tiny_run(corpus, out)
    assert [file.name for file in tmp_path.rglob("*")] == ["run", "mine.txt"]
    (tmp_path / "empty").mkdir()
    tiny_run(corpus, tmp_path / "empty", stop_at=1)
    assert (tmp_path / "empty/model.safetensors").is_file()


# --- another number of processes ---

LANES = 12


def owns_of(whole: Memory, *, world: int, parts: int) -> list[dict[str, Tensor]]:
    """What processes hold when each has its share of the lanes, in parts; of f_c only the first has a gradient."""
    size, owns = LANES // (world * parts), []
    for rank in range(world):
        firsts = [(rank * parts + part) * size for part in range(parts)]
        own = named_memories([whole.select(torch.arange(first, first + size)) for first in firsts])
        own["gradient.a"] = torch.full((2,), float(rank))
        if rank == 0:
            own["gradient.b"] = torch.full((3,), 6.0)
        owns.append(own)
    return owns


@pytest.mark.parametrize("compression", ["mean", "most-used"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_every_lane_keeps_its_memory_and_its_place(before: int, after: int, parts: int, compression: str) -> None:
    model = tiny_model(compression=compression).eval()
    lengths = 5 + torch.arange(LANES)  # some in the midst of a segment
    tokens = torch.arange(LANES * 20).view(LANES, 20) % 256
    whole = model(tokens, None, lengths).memory
    owns = owns_of(whole, world=before, parts=parts)
    shares = [reshard(owns, micro_batches=parts, rank=rank, world=after) for rank in range(after)]
    again = join([memory for share in shares for memory in memories_from(share, parts)])
    assert again.state_dict().keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    for share in shares:
        # An update averages over processes: of equal shares that is the mean over those that were before.
        assert share["gradient.a"].tolist() == [(before - 1) / 2] * 2
        assert share["gradient.b"].tolist() == [6.0 / before] * 3
        assert {memory.batch_size for memory in memories_from(share, parts)} == {LANES // (after * parts)}


def test_lanes_that_cannot_be_split_evenly_are_refused() -> None:
    owns = owns_of(tiny_model().empty_memory(LANES), world=1, parts=1)
    with pytest.raises(CompressiveError, match="its 12 lanes cannot be split into 5 equal parts"):
        reshard(owns, micro_batches=1, rank=4, world=5)
