"""Compression functions trained on one corpus, used in networks trained on another.

    python examples/transfer.py runs/speeches/runs/conv runs/books/runs/conv data/books/ > results/transfer.json

Both folders are settings of experiments; seeds that both have are paired. The networks of the second are scored as in
their experiment, four times: with their own functions, with those of the first, with mean pooling, and with untrained
functions. Nothing is trained here.
"""

import json
import shlex
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import compressive_transformer as ct
from compressive_transformer.evaluate import truncate_split

OWN, OTHER, MEAN, INITIAL = "own f_c", "f_c of the other corpus", "mean pooling", "f_c before training"


def transfer(donors: Path, networks: Path, corpus: ct.Corpus) -> dict[str, Any]:
    """Return bits per byte of the four variants, by seed, and the differences to the networks' own functions."""
    seeds = [path.name for path in sorted(networks.glob("seed-*")) if (donors / path.name / "result.json").exists()]
    if not seeds:
        raise ct.CompressiveError(
            f"{donors} and {networks} have no finished seed in common; expected settings of experiments, OUT/runs/NAME/"
        )
    runs = [json.loads((networks / seed / "result.json").read_text(encoding="utf-8")) for seed in seeds]
    scores: dict[str, list[dict[str, Any]]] = {name: [] for name in (OWN, OTHER, MEAN, INITIAL)}
    for seed, run in zip(seeds, runs, strict=True):
        if run["corpus"] != corpus.fingerprint:
            raise ct.CompressiveError(f"{networks / seed}: was trained on another corpus than {corpus.path}; give that")
        model, tokenizer = ct.load(networks / seed)
        model = ct.with_lengths(model, **_lengths(run["evaluate"]))
        tokens, split = run["evaluate"]["tokens"], corpus.split(run["evaluate"]["split"])
        chosen = truncate_split(split, tokenizer, tokens) if tokens else split
        for name, variant in _variants(model, ct.load(donors / seed)[0], run["seed"]):
            variant.to("cuda" if torch.cuda.is_available() else "cpu")
            scores[name].append(ct.evaluate(variant, chosen, batch_size=run["evaluate"]["batch_size"]).to_dict())
    return {
        "format": 1,
        "transfer": [_row(name, scores[OWN], of_each) for name, of_each in scores.items()],
        "donors": str(donors),
        "networks": str(networks),
        "compression": runs[0]["model"]["compression"],
        "seeds": [run["seed"] for run in runs],
        "evaluate": runs[0]["evaluate"],
        "tokens": round(statistics.fmean(run["training"]["tokens"] for run in runs)),
        "corpus": corpus.fingerprint,
        "commits": sorted({run["commit"] for run in runs if run["commit"]}),
    }


def _lengths(evaluate: dict[str, Any]) -> dict[str, Any]:
    given = {name: evaluate[name] for name in ("memory_length", "compressed_length") if evaluate[name] is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _variants(
    model: ct.CompressiveTransformer, donor: ct.CompressiveTransformer, seed: int
) -> Iterator[tuple[str, ct.CompressiveTransformer]]:
    if not any(block.learns_to_compress for block in donor.blocks):
        raise ct.CompressiveError(f"compression {donor.config.compression!r} has nothing that it learns to transfer")
    torch.manual_seed(seed)
    initial = ct.CompressiveTransformer(model.config)
    mean = ct.CompressiveTransformer(replace(model.config, compression="mean", compression_heads=1))
    yield OWN, model
    # Only the functions of the donor are used, not its memory lengths.
    for name, other in ((OTHER, donor), (MEAN, mean), (INITIAL, initial)):
        yield name, ct.with_compression(model, other)


def _row(name: str, baseline: list[dict[str, Any]], scores: list[dict[str, Any]]) -> dict[str, Any]:
    compared = {} if name == OWN else ct.compare_runs(baseline, scores).to_dict()
    fields = ("difference", "difference_over_runs", "difference_over_documents")
    return {
        "compression": name,
        "bits_per_byte": [score["bits_per_byte"] for score in scores],
        **{key: compared.get(key) for key in fields},
    }


def main(donors: str, networks: str, data: str) -> None:
    """Print the results as JSON, with the command."""
    results = transfer(Path(donors), Path(networks), ct.open_corpus(data))
    command = shlex.join(["python", "examples/transfer.py", donors, networks, data])
    print(json.dumps({"command": command, **results}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
