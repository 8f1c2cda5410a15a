"""The command `describe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, UseAppendAction

from ..checkpoint import load_config
from ..config import ModelConfig
from ..config.toml import from_mapping, override, read_settings, to_dict
from ..data.tokenizers import ByteTokenizer
from ..evaluate.cost import describe as describe_model
from ._common import print_result, say


def describe(
    config: Annotated[Positional[Path], tyro.conf.arg(metavar="CONFIG")],
    /,
    settings: Annotated[UseAppendAction[list[str]], tyro.conf.arg(name="set", metavar="model.FIELD=VALUE")],
    json: bool = False,
) -> None:
    """Show the cost and the temporal range of a config, layer by layer and in total, without training.

    Prints attention width, temporal range, parameters, bytes of memory and multiply-adds per token.

    Args:
        config: TOML file with the table [model], or the folder of a run.
        settings: Override a field of the model, for example --set model.memory_length=[0,0,64,128].
        json: Print everything as JSON.
    """
    tables = {"model": to_dict(load_config(config)) if config.is_dir() else read_settings(config)["model"]}
    override(tables, settings)
    if "vocab_size" not in tables["model"]:
        say(f"vocab_size is not given: {ByteTokenizer.vocab_size} assumed, as for bytes")
        tables["model"]["vocab_size"] = ByteTokenizer.vocab_size
    description = describe_model(from_mapping(ModelConfig, tables["model"], "model"))
    print_result(description, as_json=json)
