"""A run in the format of transformers, as the Hub takes it."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint import load
from ..errors import CompressiveError
from ..files import atomic_folder
from ..model import CompressiveTransformer
from .card import card
from .code import AUTO_MAP, modeling_files
from .modeling import CompressiveTransformerForCausalLM
from .tokens import to_transformers


def export_transformers(run: str | Path, out: str | Path) -> None:
    """Write the model of `run` into the new folder `out`, whole or not at all.

    It gets config.json, generation_config.json, model.safetensors, the files of the tokenizer, a model card, and the
    code with which `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)` loads it where this package is
    not installed.

    Raises CompressiveError where the run cannot be loaded or has a part that transformers could not load: a
    compression function of your own, or a tokenizer for words or sound.
    """
    run, out = Path(run), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CompressiveError(f"{out}: exists already; choose another folder")
    model, tokenizer = load(run)
    _check_compression(model)
    library_tokenizer = to_transformers(tokenizer)
    exported = CompressiveTransformerForCausalLM.of(model)
    exported.config.auto_map = AUTO_MAP
    name = out.absolute().name
    with atomic_folder(out) as folder:
        exported.save_pretrained(folder)
        library_tokenizer.save_pretrained(folder)
        texts = {**modeling_files(), "README.md": card(run, name, model.config, exported.num_parameters())}
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8", newline="\n")


def _check_compression(model: CompressiveTransformer) -> None:
    for block in model.blocks:
        function = block.compression
        if function is not None and not type(function).__module__.startswith(
            f"{CompressiveTransformer.__module__.rpartition('.')[0]}."
        ):
            raise CompressiveError(
                f"compression ({model.config.compression!r}) is a function of your own, {type(function).__name__}, "
                "whose code an export does not hold; train with one of the package's to export"
            )
