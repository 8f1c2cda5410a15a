"""A run on disk: config.json, model.safetensors, tokenizer.json, and resume/ to go on from.

Weights are safetensors and the rest is JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import ModelConfig
from .config.toml import from_mapping, to_dict
from .data.tokenizers import Tokenizer, load_tokenizer
from .errors import CompressiveError
from .files import atomic_file
from .model import CompressiveTransformer

FORMAT = 1
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
FLOATS = {"F64", "F32", "F16", "BF16"}


def save(run: str | Path, model: CompressiveTransformer, tokenizer: Tokenizer) -> None:
    """Write what `load` reads into the folder `run`, each file whole or not at all."""
    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    tokenizer.save(run / "tokenizer.json")
    write_json(run / "config.json", {"format": FORMAT, "model": to_dict(model.config)})
    save_tensors(run / "model.safetensors", model.state_dict())


def load(run: str | Path) -> tuple[CompressiveTransformer, Tokenizer]:
    """The model, in evaluation mode on the CPU, and the tokenizer that a run holds.

    Raises CompressiveError where files are missing, damaged, pickled or do not fit the config, and where the run
    needs a compression function that is not registered.
    """
    run = Path(run)
    if run.suffix in PICKLED:
        raise CompressiveError(
            f"{run}: pickled weights are never loaded, since they can run code; expected the folder of a run "
            "with config.json, model.safetensors and tokenizer.json"
        )
    if not run.is_dir():
        raise CompressiveError(f"{run}: no such folder; expected a run that `compressive train` wrote")
    config = load_config(run)
    tokenizer = load_tokenizer(run / "tokenizer.json")
    if tokenizer.vocab_size != config.vocab_size:
        raise CompressiveError(
            f"{run}: tokenizer.json has {tokenizer.vocab_size} ids, the model {config.vocab_size}; "
            "these files do not belong together"
        )
    try:
        with torch.device("meta"):
            model = CompressiveTransformer(config)
    except CompressiveError as error:  # a compression function that nobody has registered
        raise CompressiveError(f"{run / 'config.json'}: {error}") from None
    model.load_state_dict(load_tensors(run / "model.safetensors", like=model.state_dict()), assign=True)
    return model.requires_grad_(True).eval(), tokenizer


def load_config(run: str | Path) -> ModelConfig:
    """The config of the model that a run holds. Raises CompressiveError where it is missing or damaged."""
    path = Path(run) / "config.json"
    table = read_json(path)
    check_format(path, table)
    if not isinstance(table.get("model"), dict):
        raise CompressiveError(f"{path}: expected a table 'model' with the model's sizes")
    return from_mapping(ModelConfig, table["model"], str(path))


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors as safetensors, whole or not at all, with `metadata` in the header."""
    own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        try:
            save_file(own, temporary, None if metadata is None else dict(metadata))
        except SafetensorError as error:  # a full disk, for example
            raise CompressiveError(f"{path}: cannot be written: {error}") from None


def load_tensors(path: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    With `like`, names and shapes are compared with the file's header before anything is read, and all tensors
    must have one floating-point dtype. Raises CompressiveError for a missing or damaged file and for the first
    tensor that does not fit.
    """
    with _opened(path) as file:
        if like is not None:
            _compare(path, file, like)
        # Clones are aligned as PyTorch aligns; sums over tensors mapped from the file round in another order.
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in the header of a safetensors file. Raises CompressiveError for a missing or damaged file."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise CompressiveError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CompressiveError(f"{path}: not a readable safetensors file, it may be damaged: {error}") from None


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and values: whether tensors are the same to the bit."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def sha256(path: Path) -> str:
    """The checksum of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file. Raises CompressiveError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CompressiveError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CompressiveError(f"{path}: not a readable JSON file, it may be damaged: {error}") from None
    if not isinstance(value, dict):
        raise CompressiveError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def check_format(path: Path, table: Mapping[str, Any]) -> None:
    """Raise CompressiveError unless the file says that it has the format that this version reads."""
    if table.get("format") != FORMAT:
        raise CompressiveError(
            f"{path}: format {table.get('format')!r} is unknown to this version, which reads format {FORMAT}"
        )


def _compare(path: Path, file: Any, like: Mapping[str, Tensor]) -> None:
    names = set(file.keys())
    if missing := sorted(set(like) - names):
        raise CompressiveError(f"{path}: tensor {missing[0]!r} is missing; the file belongs to another model")
    if extra := sorted(names - set(like)):
        raise CompressiveError(f"{path}: unknown tensor {extra[0]!r}; the file belongs to another model")
    for name, expected in like.items():
        shape = list(file.get_slice(name).get_shape())
        if shape != list(expected.shape):
            raise CompressiveError(
                f"{path}: tensor {name!r} has shape {shape}, the config says {list(expected.shape)}; "
                "the file belongs to another model"
            )
    dtypes = {file.get_slice(name).get_dtype() for name in like}
    if len(dtypes) != 1 or not dtypes <= FLOATS:
        raise CompressiveError(
            f"{path}: tensors are {', '.join(sorted(dtypes))}; a model's are all of one of {', '.join(sorted(FLOATS))}"
        )
