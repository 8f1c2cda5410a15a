"""Exception and warning of the package, and the import of optional libraries."""

from __future__ import annotations

import importlib
from typing import Any


class CompressiveError(ValueError):
    """Invalid input: a config, a file, a prompt, or tensors that do not fit.

    The message is one line: what was wrong, what was expected and what to do. The command line prints it without a
    traceback and exits with 1.
    """


class CompressiveWarning(UserWarning):
    """Valid input that is probably a mistake; the message says what to do instead."""


def optional(module: str, *, extra: str, purpose: str) -> Any:
    """Import a module of an optional library that `purpose` needs.

    Raises CompressiveError, with the command that installs `extra` of this package, if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CompressiveError(
            f"{purpose} needs the library {module}: pip install 'compressive-transformer[{extra}]'"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of the message of another library's error, or its type where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]
