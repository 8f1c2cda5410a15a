"""Malformed files are read or refused with a one-line error: no traceback, no hang, no code run."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compressive_transformer as ct
from compressive_transformer.apps.experiment.plan import read_plan
from compressive_transformer.checkpoint import save
from compressive_transformer.config import ModelConfig, TrainConfig
from compressive_transformer.config.toml import from_mapping, read_settings
from compressive_transformer.data.tokenizers import ByteTokenizer, load_tokenizer, train_bpe
from compressive_transformer.data.writer import CorpusFiles, Encoded
from compressive_transformer.train.log import read_log
from runs import TRAINING, tiny_model, write_books

# Damage is random. `make test-all` tries more; HOSTILE_EXAMPLES=10000 pytest tests/test_hostile.py takes hours.
EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "10"))
often = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


def write_files(folder: Path) -> Path:
    """A corpus, a run with a checkpoint, a stream that was kept, all small."""
    corpus = ct.prepare(write_books(folder / "books"), folder / "data")
    ct.train(tiny_model(), corpus, TrainConfig(**{**TRAINING, "steps": 3}), folder / "run")
    (folder / "run/resume/step-000000003/SHA256SUMS").unlink()  # which would find any change first
    model, tokenizer = ct.load(folder / "run")
    stream = ct.Stream(model, tokenizer)
    stream.read("Call me Ishmael.")
    stream.save(folder / "stream.safetensors")
    prepare_in_part(folder / "books", folder / "part")
    train_bpe(["the cat sat on the mat"] * 3, 262).save(folder / "bpe.json")
    (folder / "recipe.toml").write_text(
        "[model]\nd_model = 16\nn_heads = 2\n[train]\nsteps = 3\nlearning_rate = 1e-3\n"
    )
    (folder / "plan.toml").write_text(
        'seeds = [0, 1]\nbaseline = "a"\n[model]\nd_model = 16\n[train]\nsteps = 3\nwarmup = 1\n'
        '[evaluate]\nsplit = "test"\n'
        "[settings.a]\n[settings.b]\nmodel = { n_layers = 3 }\n"
    )
    return folder


def prepare_in_part(source: Path, out: Path) -> None:
    """What a preparing leaves that ended after two documents."""

    def end(self: CorpusFiles, encoded: Encoded) -> None:
        if self.documents == 2:
            raise KeyboardInterrupt
        add(self, encoded)

    add = CorpusFiles.add
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CorpusFiles, "add", end)
        patched.setattr(importlib.import_module("compressive_transformer.data.prepare"), "SECONDS_BETWEEN_SAVES", 0.0)
        with pytest.raises(KeyboardInterrupt):
            ct.prepare(source, out)


def go_on(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as copy:  # going on changes what is there
        shutil.copytree(folder / "part.unfinished", Path(copy, "part.unfinished"))
        ct.prepare(folder / "books", Path(copy, "part"))


def read_run(folder: Path) -> None:
    ct.load(folder / "run")


def read_stream(folder: Path) -> None:
    ct.Stream.load(folder / "stream.safetensors", *ct.load(folder / "run")).read("Call")


def read_corpus(folder: Path) -> None:
    corpus = ct.open_corpus(folder / "data")
    for split in corpus.splits.values():
        for segment in ct.lanes(split, batch_size=2, length=8):
            assert segment.tokens.shape == (2, 8)


def resume(folder: Path) -> None:
    config = TrainConfig(**{**TRAINING, "steps": 3})
    with tempfile.TemporaryDirectory() as copy:  # going on changes the run
        shutil.copytree(folder / "run", copy, dirs_exist_ok=True)
        ct.train(tiny_model(), ct.open_corpus(folder / "data"), config, copy, resume="latest")


FILES: dict[str, Callable[[Path], object]] = {
    "run/config.json": read_run,
    "run/tokenizer.json": read_run,
    "run/model.safetensors": read_run,
    "run/log.jsonl": lambda folder: read_log(folder / "run" / "log.jsonl"),
    "run/resume/step-000000003/state.json": resume,
    "run/resume/step-000000003/process-0.safetensors": resume,
    "run/resume/step-000000003/training.safetensors": resume,
    "stream.safetensors": read_stream,
    "bpe.json": lambda folder: load_tokenizer(folder / "bpe.json"),
    "part.unfinished/unfinished.json": go_on,
    "part.unfinished/documents.jsonl": go_on,
    "part.unfinished/tokenizer.json": go_on,
    "data/documents.json": read_corpus,
    "data/tokenizer.json": read_corpus,
    "data/train.bin": read_corpus,
    "recipe.toml": lambda folder: read_settings(folder / "recipe.toml"),
    "plan.toml": lambda folder: read_plan(folder / "plan.toml", ct.open_corpus(folder / "data")),
}
each_file = pytest.mark.parametrize("name", FILES)


def assert_read_or_refused(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    original = path.read_bytes()
    path.write_bytes(content)
    refused = None
    try:
        FILES[name](folder)
    except ct.CompressiveError as error:
        refused = str(error)
    finally:
        path.write_bytes(original)
    assert refused is None or (refused.strip() and "\n" not in refused)


@each_file
def test_an_undamaged_file_is_read(folder: Path, name: str) -> None:
    FILES[name](folder)


@each_file
@often
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(folder: Path, name: str, data: st.DataObject) -> None:
    content = bytearray((folder / name).read_bytes())
    # Most of what says how to read a file is at its beginning.
    for _ in range(data.draw(st.integers(1, 4), "changes")):
        last = min(len(content), data.draw(st.sampled_from([16, 200, 2000, len(content)]), "within"))
        at = data.draw(st.integers(0, last), "at")
        taken = data.draw(st.integers(0, 12), "taken out")
        put = data.draw(st.binary(max_size=12), "put in")
        content[at : at + taken] = put
    if data.draw(st.booleans(), "cut"):
        del content[data.draw(st.integers(0, len(content)), "after") :]
    assert_read_or_refused(folder, name, bytes(content))


numbers = st.integers() | st.sampled_from([-1, 0, 2**31, 2**60, 2**63, 10**12, 10**400]) | st.floats()
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container inside of a value with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


JSON = [name for name in FILES if name.endswith(".json")]


@pytest.mark.parametrize("name", JSON)
@often
@given(data=st.data())
def test_changed_json_is_read_or_refused(folder: Path, name: str, data: st.DataObject) -> None:
    description = json.loads((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        found = list(places(description))
        if not found:
            break
        container, key = found[data.draw(st.integers(0, len(found) - 1), "which")]
        if data.draw(st.booleans(), "remove"):
            del container[key]
        else:
            others = [copy.deepcopy(inside[at]) for inside, at in found[:50]]
            container[key] = data.draw(values | st.sampled_from(others), "value")
    content = json.dumps(description).encode("utf-8", "surrogatepass")
    assert_read_or_refused(folder, name, content)


SAFETENSORS = [name for name in FILES if name.endswith(".safetensors")]


@pytest.mark.parametrize("name", SAFETENSORS)
@often
@given(data=st.data())
def test_changed_safetensors_headers_are_read_or_refused(folder: Path, name: str, data: st.DataObject) -> None:
    original = (folder / name).read_bytes()
    (length,) = struct.unpack("<Q", original[:8])
    header = json.loads(original[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        container, key = data.draw(st.sampled_from(list(places(header))), "which")
        container[key] = data.draw(values | st.sampled_from(["F64", "I64", "BF16", "BOOL", [2**60], [1, 1]]), "value")
    written = json.dumps(header).encode("utf-8", "surrogatepass")
    claimed = data.draw(st.sampled_from([len(written), len(written), len(written) + 1, 2**60, 2**64 - 1, 0]), "length")
    assert_read_or_refused(folder, name, struct.pack("<Q", claimed) + written + original[8 + length :])


kinds = st.sampled_from([ModelConfig, TrainConfig])


@often
@given(kind=kinds, data=st.data())
def test_any_fields_make_a_config_or_are_refused(kind: type, data: st.DataObject) -> None:
    known = sorted(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    table = data.draw(st.dictionaries(st.sampled_from(known) | st.text(max_size=5), values, max_size=5))
    with contextlib.suppress(ct.CompressiveError):
        from_mapping(kind, {"vocab_size": 257, **table} if kind is ModelConfig else table, "table")


@pytest.mark.parametrize("field", ["d_model", "n_layers", "n_heads", "d_ff", "vocab_size", "segment_length"])
@pytest.mark.parametrize("size", [10**12, 2**63, 10**400])
def test_absurd_sizes_are_refused_before_allocation(field: str, size: int) -> None:
    with pytest.raises(ct.CompressiveError, match=rf"{field} \(.*\) must be at most"):
        ModelConfig(**{"vocab_size": 257, "d_model": 16, "n_heads": 2, field: size})


def test_memory_too_large_for_any_machine_is_refused() -> None:
    model = ct.CompressiveTransformer(ModelConfig(257, d_model=1024, n_layers=1, memory_length=2**31 - 1))
    with pytest.raises(ct.CompressiveError, match=r"memory of 64 lanes cannot be held: .* shorter memories or fewer"):
        model.empty_memory(64)


def test_deep_nesting_is_refused(folder: Path) -> None:
    deep = b"[" * 100_000
    for name in JSON:
        assert_read_or_refused(folder, name, b'{"model": ' + deep)
    for name in ("recipe.toml", "plan.toml"):
        assert_read_or_refused(folder, name, b"a = " + deep)
    assert read_settings(folder / "recipe.toml", ["model.d_model=" + "[" * 100_000])["model"]["d_model"][0] == "["


def test_a_tokenizer_with_a_huge_id_is_refused(folder: Path, tmp_path: Path) -> None:
    description = json.loads((folder / "bpe.json").read_bytes())
    description["model"]["vocab"]["the"] = 2**32 - 1  # the library would walk through all ids below
    (tmp_path / "bpe.json").write_text(json.dumps(description))
    with pytest.raises(ct.CompressiveError, match="token id 4294967295 must be less than 16777215"):
        load_tokenizer(tmp_path / "bpe.json")


PICKLE = b"\x80\x04cbuiltins\nexec\n(S'raise SystemExit(77)'\ntR."


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith((".bin", ".jsonl"))])
def test_a_pickle_instead_of_a_file_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / name).write_bytes(PICKLE)
    with pytest.raises(ct.CompressiveError):
        FILES[name](tmp_path / "copy")


def test_a_pickle_of_pytorch_is_refused_under_any_name(tmp_path: Path) -> None:
    save(tmp_path / "run", tiny_model(), ByteTokenizer())
    buffer = io.BytesIO()
    torch.save(tiny_model().state_dict(), buffer)
    (tmp_path / "run" / "model.safetensors").write_bytes(buffer.getvalue())
    with pytest.raises(ct.CompressiveError, match="not a readable safetensors file"):
        ct.load(tmp_path / "run")
    for ending in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
        (tmp_path / f"run{ending}").write_bytes(buffer.getvalue())
        with pytest.raises(ct.CompressiveError, match="pickled weights are never loaded"):
            ct.load(tmp_path / f"run{ending}")


def test_names_of_splits_cannot_leave_the_folder(folder: Path) -> None:
    index = json.loads((folder / "data" / "documents.json").read_bytes())
    index["splits"]["../../books/train/11"] = index["splits"]["test"]
    assert_read_or_refused(folder, "data/documents.json", json.dumps(index).encode())
    (folder / "data2").mkdir(exist_ok=True)
    for file in (folder / "data").iterdir():
        shutil.copy(file, folder / "data2")
    (folder / "data2" / "documents.json").write_text(json.dumps(index))
    with pytest.raises(ct.CompressiveError, match="splits must be train and maybe validation and test"):
        ct.open_corpus(folder / "data2")
