"""The command that says what a configuration means."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, UseAppendAction

from ..checkpoint import load_config
from ..config import ModelConfig
from ..config.toml import from_mapping, override, read_settings, to_dict
from ..evaluate.cost import describe as describe_model
from .terminal import say

BYTES = 257
"""Token ids of text as bytes: 256 values and the start of a document."""


def describe(
    config: Annotated[Positional[Path], tyro.conf.arg(metavar="CONFIG")],
    /,
    settings: Annotated[UseAppendAction[list[str]], tyro.conf.arg(name="set", metavar="model.FIELD=VALUE")],
    json: bool = False,
) -> None:
    """Show what a configuration costs and how far it remembers, layer by layer and in total.

    Attention width, temporal range, parameters, bytes of memory and multiply-adds per token; nothing is trained.

    Args:
        config: A TOML file with the table [model], or the folder of a run.
        settings: Override a field of the model, for example --set model.memory_length=[0,0,64,128]; may be repeated.
        json: Print all values as JSON.
    """
    tables = {"model": to_dict(load_config(config)) if config.is_dir() else read_settings(config)["model"]}
    override(tables, settings)
    if "vocab_size" not in tables["model"]:
        say(f"vocab_size is not given: {BYTES} assumed, as for bytes")
        tables["model"]["vocab_size"] = BYTES
    description = describe_model(from_mapping(ModelConfig, tables["model"], "model"))
    print(json_format.dumps(description.to_dict(), indent=1) if json else description)
