"""The one exception for mistakes that the user can mend, the one warning, and what imports optional libraries."""

from __future__ import annotations

import importlib
from typing import Any


class CompressiveError(ValueError):
    """What was wrong, what was expected and what to do, in one line.

    Raised for every mistake that comes from outside: a configuration, a file, a prompt, a call with
    tensors that do not fit. The command line prints the message without a traceback and exits with 1.
    """


class CompressiveWarning(UserWarning):
    """Something that is allowed but hardly meant: what it is and what to do instead."""


def optional(module: str, *, extra: str, purpose: str) -> Any:
    """The module of an optional library that `purpose` needs.

    Raises CompressiveError, with the command that installs `extra` of this package, where it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CompressiveError(
            f"{purpose} needs the library {module}: pip install 'compressive-transformer[{extra}]'"
        ) from error
