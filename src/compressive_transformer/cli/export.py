"""The command that gives a trained model to other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from .terminal import say


def export(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")],
    /,
    format: Literal["transformers"] = "transformers",
) -> None:
    """Write a trained model in the format of another library (extra `hf`).

    The folder is what the Hub calls a model repository: config.json, model.safetensors, the tokenizer, a model card,
    and the code to load it where this package is not installed.

    Args:
        run: A run that `compressive train` wrote.
        out: A folder, to be made.
        format: The library that is to load it.
    """
    from ..hf import export_transformers  # takes seconds to import

    export_transformers(run, out)
    say(f"the model is in {out}; AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True) loads it")
