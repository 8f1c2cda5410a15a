"""Code that commands share: arguments, output, models, and `--plugin FILE.py`."""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from tyro.conf import Positional

from ..checkpoint import load
from ..data.tokenizers import Tokenizer
from ..errors import CompressiveError
from ..files import import_file
from ..model import CompressiveTransformer

RunArgument = Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
DataArgument = Annotated[Positional[Path], tyro.conf.arg(metavar="DATA")]


def say(text: str) -> None:
    """Print a line of progress on stderr; stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def print_result(result: Any, *, as_json: bool) -> None:
    """Print a result on stdout, as text or as what its `to_dict` returns."""
    print(json.dumps(result.to_dict(), indent=1, ensure_ascii=False) if as_json else result)


def default_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(run: Path) -> tuple[CompressiveTransformer, Tokenizer]:
    """Load the model of a run, on the default device, and its tokenizer."""
    model, tokenizer = load(run)
    return model.to(default_device()), tokenizer


def checked(kind: type[Any]) -> Any:
    """Return the tyro argument of a dataclass of options whose `__post_init__` raises CompressiveError.

    tyro reports a ValueError of a constructor as wrong usage of an option that the user never typed, so the message is
    passed on as that of any other failure.
    """

    def check(self: Any) -> None:
        try:
            kind.__post_init__(self)
        except CompressiveError as error:
            sys.exit(f"compressive: {error}")

    namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__post_init__": check}
    return tyro.conf.arg(constructor=dataclass(frozen=True)(type(kind.__name__, (kind,), namespace)))


def run_plugins(arguments: list[str]) -> list[str]:
    """Run the file of each leading `--plugin FILE`, and return the remaining arguments.

    Raises CompressiveError if a file is missing or fails.
    """
    while arguments and arguments[0].partition("=")[0] == "--plugin":
        first, *rest = arguments
        _, equals, file = first.partition("=")
        if not equals:
            if not rest:
                raise CompressiveError("--plugin needs the path of a Python file: compressive --plugin FILE.py COMMAND")
            file, *rest = rest
        _run_plugin(Path(file))
        arguments = rest
    return arguments


def _run_plugin(path: Path) -> None:
    """Run a Python file as a module; what it registers stays."""
    if not path.is_file():
        raise CompressiveError(f"--plugin {path}: no such file; expected a Python file")
    if path.suffix != ".py":
        raise CompressiveError(f"--plugin {path}: not a Python file; its name must end in .py")
    try:
        import_file(path)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f", line {lines[-1]}" if lines else ""
        raise CompressiveError(f"--plugin {path}{place}: {type(error).__name__}: {error}") from error
