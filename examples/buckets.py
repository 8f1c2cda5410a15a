"""Difference between two settings of an experiment by word frequency (Table 7 of the paper) and by position.

    python examples/buckets.py runs/books/runs/Transformer-XL runs/books/runs/conv data/books/ > results/buckets.json

Both folders are settings of an experiment; seeds that both have are paired. All networks are scored on the text
that their experiment scored.
"""

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import compressive_transformer as ct
from compressive_transformer.evaluate import truncate_split
from compressive_transformer.evaluate.compare import student_interval


def scored(run: Path, corpus: ct.Corpus) -> ct.Evaluation:
    """Return the score of a finished run, in buckets, on the text that its experiment scored."""
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    if result["corpus"] != corpus.fingerprint:
        raise ct.CompressiveError(f"{run}: was trained on another corpus than {corpus.path}; give that")
    model, tokenizer = ct.load(run)
    evaluate = result["evaluate"]
    lengths = ("memory_length", "compressed_length")
    model = ct.with_lengths(model, **{name: evaluate[name] for name in lengths if evaluate[name] is not None})
    split = corpus.split(evaluate["split"])
    chosen = truncate_split(split, tokenizer, evaluate["tokens"]) if evaluate["tokens"] else split
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return ct.evaluate(
        model, chosen, batch_size=evaluate["batch_size"], by=[ct.ByFrequency(corpus), ct.ByPosition(corpus)]
    )


def rows(name: str, baseline: list[ct.Evaluation], setting: list[ct.Evaluation]) -> list[dict[str, Any]]:
    """Return a row per bucket: nats of both settings, by seed, and their difference with its interval over seeds."""
    result = []
    for number, (label, score) in enumerate(baseline[0].buckets[name]):
        if not score.bytes:
            continue
        nats = [[run.buckets[name][number][1].nats for run in side] for side in (baseline, setting)]
        bits = [(second - first) / math.log(2) / score.bytes for first, second in zip(*nats, strict=True)]
        result.append(
            {
                "bucket": label,
                "words": score.words,
                "bytes": score.bytes,
                "nats": {"baseline": nats[0], "setting": nats[1]},
                "difference": sum(bits) / len(bits),
                "difference_over_runs": student_interval(bits) if len(bits) > 1 else None,
            }
        )
    return result


def main(baseline: str, setting: str, data: str) -> None:
    """Print the results as JSON, with the command."""
    corpus, folders = ct.open_corpus(data), (Path(baseline), Path(setting))
    seeds = sorted(set.intersection(*({run.parent.name for run in f.glob("seed-*/result.json")} for f in folders)))
    if not seeds:
        raise ct.CompressiveError(
            f"{baseline} and {setting} have no finished seed in common; expected settings of experiments"
        )
    sides = [[scored(folder / seed, corpus) for seed in seeds] for folder in folders]
    report = {
        "command": shlex.join(["python", "examples/buckets.py", baseline, setting, data]),
        "format": 1,
        "baseline": folders[0].name,
        "setting": folders[1].name,
        "seeds": [int(seed.removeprefix("seed-")) for seed in seeds],
        "conditions": sides[0][0].conditions,
        "buckets": {name: rows(name, *sides) for name in ("by_frequency", "by_position")},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
