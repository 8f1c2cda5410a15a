"""Export of a run as a model folder of transformers, ready for the Hub."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint import load
from ..compression import Compression
from ..errors import CompressiveError
from ..files import atomic_folder
from ..model import CompressiveTransformer
from .card import card
from .code import AUTO_MAP, modeling_files
from .modeling import CompressiveTransformerForCausalLM
from .tokens import to_transformers


def export_transformers(run: str | Path, out: str | Path) -> None:
    """Write the model of a run into a new folder, in the format of transformers.

    The folder has config.json, generation_config.json, model.safetensors, the files of the tokenizer, a model card, and
    the code with which `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)` loads the model without this
    package. It is written completely or not at all.

    Args:
        run: Folder of a run.
        out: Folder to write, which must be empty or missing.

    Raises:
        CompressiveError: `out` has files, the run cannot be loaded, or transformers could not load a part of it: a
            compression function from outside the package, or a tokenizer for words or sound.
    """
    run, out = Path(run), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CompressiveError(f"{out}: exists already; choose another folder")
    model, tokenizer = load(run)
    _check_compression(model)
    library_tokenizer = to_transformers(tokenizer)
    exported = CompressiveTransformerForCausalLM.from_core(model)
    exported.config.auto_map = AUTO_MAP
    name = out.absolute().name
    with atomic_folder(out) as folder:
        exported.save_pretrained(folder)
        library_tokenizer.save_pretrained(folder)
        texts = {**modeling_files(), "README.md": card(run, name, model.config, exported.num_parameters())}
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8", newline="\n")


def _check_compression(model: CompressiveTransformer) -> None:
    """Raise CompressiveError for a compression function from outside the package."""
    package = Compression.__module__.rpartition(".")[0]
    for block in model.blocks:
        function = block.compression
        if function is not None and not type(function).__module__.startswith(f"{package}."):
            raise CompressiveError(
                f"compression ({model.config.compression!r}) is {type(function).__name__}, a function from outside the "
                "package, whose code is not part of an export; train with a compression function of the package"
            )
