"""The command `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from ._common import RunArgument, say


def export(
    run: RunArgument,
    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")],
    /,
    format: Literal["transformers"] = "transformers",
) -> None:
    """Write a trained model in the format of another library (extra `hf`).

    The folder is a model repository as on the Hub: config.json, model.safetensors, the tokenizer, a model card, and
    the code that loads the model where this package is not installed.

    Args:
        run: Run from `compressive train`.
        out: Folder to write, which must not exist.
        format: Library that will load the model.
    """
    from ..hf import export_transformers  # takes seconds to import

    export_transformers(run, out)
    say(f"the model is in {out}; AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True) loads it")
