"""`--plugin FILE.py`: a user's own compression functions on the command line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from ..errors import CompressiveError


def take_plugins(arguments: list[str]) -> list[str]:
    """Run the files of each `--plugin FILE` before the command, and give the arguments that are left.

    Raises CompressiveError where a file is missing or fails.
    """
    while arguments and arguments[0].partition("=")[0] == "--plugin":
        first, *rest = arguments
        _, given, file = first.partition("=")
        if not given:
            if not rest:
                raise CompressiveError("--plugin needs the path of a Python file: compressive --plugin FILE.py COMMAND")
            file, *rest = rest
        run_plugin(Path(file))
        arguments = rest
    return arguments


def run_plugin(path: Path) -> None:
    """Run a Python file as a module; what it registers stays."""
    if not path.is_file():
        raise CompressiveError(f"--plugin {path}: no such file; expected a Python file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CompressiveError(f"--plugin {path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f", line {lines[-1]}" if lines else ""
        raise CompressiveError(f"--plugin {path}{place}: {type(error).__name__}: {error}") from error
