"""Configs from TOML files and the command line, and as plain values for JSON."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CompressiveError

C = TypeVar("C")

RENAMED = {
    "accumulation": "micro_batches",
    "batch": "batch_size",
    "checkpoints_kept": "keep_checkpoints",
    "clip": "max_grad_norm",
    "compression_clip": "compression_max_grad_norm",
    "late_update_period": "late_steps_per_update",
    "learning_rate_edge": "min_learning_rate",
    "longest_document": "max_document_length",
    "optimiser": "optimizer",
    "skips_in_a_row": "max_skipped_updates",
    "update_period": "steps_per_update",
    "warmup": "warmup_steps",
}
"""Old names of config fields, in files written before 0.1.0."""


def upgrade(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with their current names and values.

    This is the only place that knows earlier versions of config files.
    """
    upgraded = {RENAMED.get(name, name): value for name, value in values.items()}
    if upgraded.get("compressed_scale") == "matched":
        upgraded["compressed_scale"] = "rms"
    return upgraded


def from_mapping(kind: type[C], values: Mapping[str, Any], where: str) -> C:
    """Return the config of class `kind` with the given values; `where` names their source in messages.

    Raises CompressiveError for unknown and missing fields, and for invalid values.
    """
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    values = upgrade(values)
    for name in values:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(fields)}"
            raise CompressiveError(f"{where}: unknown field {name!r}; {hint}")
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    for name in required:
        if name not in values:
            raise CompressiveError(f"{where}: field {name!r} is missing")
    try:
        return kind(**values)
    except CompressiveError as error:
        raise CompressiveError(f"{where}: {error}") from None


def read_settings(path: Path, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Read the tables `model` and `train` of a TOML file, and apply `section.field=value` overrides.

    Raises CompressiveError for an unreadable file, an unknown table or a malformed override.
    """
    tables = read_toml(path)
    for name, table in tables.items():
        if name not in ("model", "train") or not isinstance(table, dict):
            raise CompressiveError(f"{path}: unknown table or field {name!r}; expected tables [model] and [train]")
    settings: dict[str, dict[str, Any]] = {"model": {}, "train": {}, **tables}
    override(settings, overrides)
    return settings


def override(settings: dict[str, dict[str, Any]], overrides: Sequence[str]) -> None:
    """Apply `section.field=value` overrides to tables. Raises CompressiveError for a malformed override."""
    for text in overrides:
        target, equals, value = text.partition("=")
        section, dot, name = target.partition(".")
        if not (equals and dot and section in settings):
            expected = " or ".join(f"{section}.FIELD=VALUE" for section in settings)
            raise CompressiveError(f"--set {text}: expected {expected}, for example model.compression=mean")
        settings[section][name] = _parse_value(value)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises CompressiveError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise CompressiveError(f"{path}: not a readable TOML file: {error}") from None


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def to_dict(config: Any) -> dict[str, Any]:
    """Return the fields of a config as plain values for JSON; `from_mapping` is the inverse."""
    fields = dataclasses.asdict(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def with_defaults(config: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored values of a config under current names; newer fields get their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return {**{name: value for name, value in plain.items() if value is not dataclasses.MISSING}, **upgrade(stored)}
