"""The package's files in the form in which transformers loads code from a model's folder: without sub-folders."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

# Names that transformers expects.
NAMES: dict[tuple[str, ...], str] = {
    ("hf", "configuration"): "configuration_compressive_transformer",
    ("hf", "modeling"): "modeling_compressive_transformer",
}
AUTO_MAP = {
    "AutoConfig": f"{NAMES['hf', 'configuration']}.CompressiveTransformerConfig",
    "AutoModelForCausalLM": f"{NAMES['hf', 'modeling']}.CompressiveTransformerForCausalLM",
}


def modeling_files() -> dict[str, str]:
    """Return name and text of each file that the model needs besides transformers and PyTorch."""
    texts: dict[str, str] = {}
    waiting = list(NAMES)
    while waiting:
        module = waiting.pop()
        if f"{_flat(module)}.py" not in texts:
            texts[f"{_flat(module)}.py"], needed = _flattened(module)
            waiting += needed
    return texts


def _flattened(module: tuple[str, ...]) -> tuple[str, list[tuple[str, ...]]]:
    """Return the text of a module with imports from the same folder only, and the modules that it imports from."""
    path = PACKAGE.joinpath(*module)
    is_folder = path.is_dir()
    text = (path / "__init__.py" if is_folder else path.with_name(f"{module[-1]}.py")).read_text(encoding="utf-8")
    folder = module if is_folder else module[:-1]
    lines, needed = text.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            imported = (*folder[: len(folder) + 1 - node.level], *(node.module or "").split("."))
            written = f"from {'.' * node.level}{node.module} import"
            line = node.lineno - 1
            assert lines[line].lstrip().startswith(written), f"{module}: {lines[line]}"
            lines[line] = lines[line].replace(written, f"from .{_flat(imported)} import", 1)
            needed.append(imported)
    return "".join(lines), needed


def _flat(module: tuple[str, ...]) -> str:
    return NAMES.get(module, "_".join(module))
