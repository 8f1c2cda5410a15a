"""Detection of foreign lines in a log: train on its first part, score the rest with foreign lines inserted.

    python examples/foreign_lines.py logs/OpenSSH_2k.log logs/Linux_2k.log logs/Apache_2k.log --out runs/lines

Lines of each of the other files are inserted into the second part, one after every 19, and all are scored as by
`compressive score`, with a stream that has read the end of the first part. Prints the area under the ROC curve by
bits per byte (1: every foreign line is more surprising than every genuine one; 0.5: chance) per file and seed, as JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import compressive_transformer as ct

FIRST_PART, EVERY, READ_BEFORE = 0.7, 20, 200
"""Share of lines for training; distance between foreign lines; lines that the stream reads before scoring."""


def train_on(lines: Sequence[str], out: Path, *, steps: int, seed: int) -> Path:
    """Train a small model on lines, with the last tenth for validation, and return its run."""
    cut = len(lines) * 9 // 10
    for split, part in {"train": lines[:cut], "validation": lines[cut:]}.items():
        (out / "text" / split).mkdir(parents=True)
        (out / "text" / split / "log.txt").write_text("".join(part), encoding="utf-8")
    corpus = ct.prepare(out / "text", out / "corpus", tokenizer="bytes")
    torch.manual_seed(seed)
    config = ct.ModelConfig(
        vocab_size=corpus.vocab_size,
        d_model=128,
        n_layers=2,
        n_heads=4,
        segment_length=64,
        memory_length=64,
        compressed_length=64,
        compression_rate=4,
    )
    settings = ct.TrainConfig(
        steps=steps,
        batch_size=16,
        max_document_length=4096,
        learning_rate=1e-3,
        warmup_steps=steps // 10,
        log_every=100,
        validate_every=max(1, steps // 4),
        checkpoint_every=steps,
        seed=seed,
    )
    ct.train(ct.CompressiveTransformer(config), corpus, settings, out / "run")
    return out / "run"


def area_under_curve(genuine: Sequence[float], foreign: Sequence[float]) -> float:
    """Return the probability that a foreign score exceeds a genuine one; ties count one half."""
    difference = torch.tensor(foreign, dtype=torch.float64)[:, None] - torch.tensor(genuine, dtype=torch.float64)
    return float((difference > 0).double().mean() + (difference == 0).double().mean() / 2)


def foreign_score(run: Path, before: Sequence[str], genuine: Sequence[str], foreign: Sequence[str]) -> float:
    """Return the area under the curve for foreign lines among `genuine` ones, after reading `before`."""
    model, tokenizer = ct.load(run)
    stream = ct.Stream(model, tokenizer)
    stream.read("".join(before))
    lines, is_foreign, more = [], [], iter(foreign)
    for number, line in enumerate(genuine):
        lines.append(line)
        is_foreign.append(False)
        if number % (EVERY - 1) == EVERY - 2 and (other := next(more, None)):
            lines.append(other)
            is_foreign.append(True)
    scores: dict[bool, list[float]] = {False: [], True: []}
    source = io.BytesIO("".join(lines).encode())
    for scored, kind in zip(ct.score_lines(stream, source), is_foreign, strict=True):
        scores[kind].append(scored.bits_per_byte)
    return area_under_curve(scores[False], scores[True])


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file without blank ones."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line.strip() + "\n" for line in text.split("\n") if line.strip()]


def main() -> None:
    """Train and score with each seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("foreign", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder for corpora and runs")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    lines = lines_of(options.log)
    cut = int(len(lines) * FIRST_PART)
    results: dict[str, Any] = {}
    for seed in options.seeds:
        run = train_on(lines[:cut], options.out / str(seed), steps=options.steps, seed=seed)
        for path in options.foreign:
            area = foreign_score(run, lines[cut - READ_BEFORE : cut], lines[cut:], lines_of(path))
            results.setdefault(path.name, []).append(round(area, 4))
    command = shlex.join(["python", "examples/foreign_lines.py", *sys.argv[1:]])
    report = {"command": command, "format": 1, "log": options.log.name, "steps": options.steps, "seeds": options.seeds}
    print(json.dumps({**report, "foreign_lines": results}, indent=1))


if __name__ == "__main__":
    main()
