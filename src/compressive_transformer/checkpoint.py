"""Runs on disk: config.json, model.safetensors, tokenizer.json, and the checkpoints in resume/.

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
    """Save a model and its tokenizer to a folder; each file is written atomically.

    Args:
        run: The folder, created if missing. It gets config.json, model.safetensors and tokenizer.json.
        model: The model; parameters on any device, in any floating-point dtype.
        tokenizer: The tokenizer of the corpus that the model was trained on.

    Raises:
        CompressiveError: If the file system refuses.
    """
    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    tokenizer.save(run / "tokenizer.json")
    write_json(run / "config.json", {"format": FORMAT, "model": to_dict(model.config)})
    save_tensors(run / "model.safetensors", model.state_dict())


def load(run: str | Path) -> tuple[CompressiveTransformer, Tokenizer]:
    """Load the model and the tokenizer of a run.

    Args:
        run: Folder of a run, written by `train` or `save`.

    Returns:
        The model, on the CPU and in evaluation mode, and the tokenizer.

    Raises:
        CompressiveError: If files are missing, damaged, pickled or do not fit the config, or if the run needs a
            compression function that is not registered.
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
    except CompressiveError as error:  # a compression function that is not registered
        raise CompressiveError(f"{run / 'config.json'}: {error}") from None
    model.load_state_dict(load_tensors(run / "model.safetensors", like=model.state_dict()), assign=True)
    return model.requires_grad_(True).eval(), tokenizer


def load_config(run: str | Path) -> ModelConfig:
    """Load the model config of a run. Raises CompressiveError if it is missing or damaged."""
    path = Path(run) / "config.json"
    table = read_json(path)
    check_format(path, table)
    if not isinstance(table.get("model"), dict):
        raise CompressiveError(f"{path}: expected a table 'model' with the model's sizes")
    return from_mapping(ModelConfig, table["model"], str(path))


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a safetensors file atomically, with `metadata` in its header."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        try:
            save_file(contiguous, temporary, None if metadata is None else dict(metadata))
        except SafetensorError as error:  # a full disk, for example
            raise CompressiveError(f"{path}: cannot be written: {error}") from None


def load_tensors(path: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, on the CPU.

    With `like`, names and shapes are checked against the header of the file before tensors are read, and all tensors
    must have the same floating-point dtype. Raises CompressiveError if the file is missing or damaged, and for the
    first tensor that does not fit.
    """
    with _open(path) as file:
        if like is not None:
            _compare(path, file, like)
        # Clones are aligned as PyTorch aligns; sums over tensors mapped from the file round in another order.
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file. Raises CompressiveError if the file is missing or damaged."""
    with _open(path) as file:
        return dict(file.metadata() or {})


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise CompressiveError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CompressiveError(f"{path}: not a readable safetensors file, it may be damaged: {error}") from None


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names, dtypes, shapes and values: equal if and only if the tensors are bitwise equal."""
    result = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        result.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return result.hexdigest()


def sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises CompressiveError if there is none."""
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
    """Raise CompressiveError unless a file has the format that this version reads."""
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
