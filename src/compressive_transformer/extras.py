"""Optional libraries: imported where they are used, each named with the command that installs it."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import CompressiveError


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
