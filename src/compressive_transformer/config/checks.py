"""Validation of config fields."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any

from ..errors import CompressiveError


def check_types(config: Any) -> None:
    """Raise CompressiveError if a field of a dataclass does not have the type of its annotation."""
    for name, expected in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if isinstance(expected, types.UnionType):
            continue  # a number, or one per layer: see `_check_per_layer`
        choices = typing.get_args(expected)
        if typing.get_origin(expected) is tuple:
            if not isinstance(value, list | tuple) or any(type(number) is not choices[0] for number in value):
                raise CompressiveError(f"{name} ({shortened(value)}) must be a list of {choices[0].__name__}")
            object.__setattr__(config, name, tuple(value))
        elif choices:
            if value not in choices:
                allowed = " or ".join(repr(choice) for choice in choices)
                raise CompressiveError(f"{name} ({shortened(value)}) must be {allowed}")
        elif expected is float and type(value) is int and abs(value) < 2**63:
            object.__setattr__(config, name, float(value))
        elif type(value) is not expected:
            raise CompressiveError(f"{name} ({shortened(value)}) must be of type {expected.__name__}")


def check_range(config: Any, names: Sequence[str], *, low: float, high: float = float("inf")) -> None:
    """Raise CompressiveError if one of the named fields is not a finite number in `low` .. `high`."""
    for name in names:
        value = getattr(config, name)
        if not low <= value < float("inf"):
            raise CompressiveError(f"{name} ({shortened(value)}) must be {low} or more")
        if value > high:
            raise CompressiveError(f"{name} ({shortened(value)}) must be at most {high}")


def shortened(value: object) -> str:
    """Return the representation of a value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]} ... ({len(text)} characters)"
