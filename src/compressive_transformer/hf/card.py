"""The model card of an export, made from the files of the run."""

from __future__ import annotations

from pathlib import Path

from ..config import ModelConfig
from ..train.log import read_log
from ..train.resume import ResumePoint

USE = """\
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{name}"  # this folder, or where it was pushed to
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
prompt = tokenizer("It was a dark and stormy night", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=100, do_sample=True)[0], skip_special_tokens=True))
```

The code of the model is next to this file, so transformers and PyTorch are all that is needed. With
`compressive-transformer[hf]` installed, `import compressive_transformer.hf` replaces `trust_remote_code`.

The tokenizer puts `<|start|>` before a text, as in training; for later pieces of the same text use
`add_special_tokens=False` and the cache of the earlier ones. There is no end-of-document token.
"""


def card(run: Path, name: str, config: ModelConfig, parameters: int) -> str:
    """Return README.md for the export of a run.

    Args:
        run: Folder of the run, whose log and last checkpoint are read.
        name: Name of the model.
        config: Config of the model.
        parameters: Number of parameters.
    """
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- compressive-transformer",
        "- long-context",
        "---",
        f"# {name}",
        "",
        "A [Compressive Transformer](https://arxiv.org/abs/1911.05507) (Rae et al. 2019): a language model that reads "
        f"segments of {config.segment_length} tokens and remembers in two tiers, recent hidden states and compressed "
        f"ones. Up to {config.temporal_range:,} tokens can reach a prediction through memory; memory has one size, "
        "however long the text is.",
        "",
        "## Model",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {parameters:,} |",
        *(f"| {field} | {value} |" for field, value in vars(config).items()),
        "",
        "## Training",
        "",
        *_training(run),
        "",
        USE.format(name=name),
    ]
    return "\n".join(lines)


def _training(run: Path) -> list[str]:
    """Return the lines about training, from log.jsonl and the last checkpoint."""
    entries = read_log(run / "log.jsonl")
    steps = [entry for entry in entries if "loss" in entry]
    scores = [entry for entry in entries if (entry.get("validation") or {}).get("bits_per_byte") is not None]
    if not steps and not scores:
        return ["The run has no log of its training."]
    lines = [f"- {steps[-1]['step']:,} steps, {steps[-1]['tokens']:,} tokens"] if steps else []
    if scores:
        best = min(scores, key=lambda entry: float(entry["validation"]["bits_per_byte"]))
        score = best["validation"]
        lines.append(
            f"- best validation, with these weights: {score['bits_per_byte']:.4f} bits per byte, "
            f"{score['nats_per_token']:.4f} nats per token, over {score['tokens']:,} tokens, at step {best['step']:,}"
        )
    for point in ResumePoint.find_all(run)[-1:]:
        settings = point.state().get("train") or {}
        lines += ["", "| setting | |", "|---|---|", *(f"| {name} | {value} |" for name, value in settings.items())]
    return lines
