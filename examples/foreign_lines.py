"""Are lines that do not belong into a log more surprising than its own? Trains on its first part, scores the rest.

    python examples/foreign_lines.py logs/OpenSSH_2k.log logs/Linux_2k.log logs/Apache_2k.log --out runs/lines

Of each of the other files lines are put among those of the second part, one after every 19, and all are scored as
`compressive score` scores them: a stream that has read the end of the first part reads on. Prints the area
under the ROC curve by bits per byte (1: every foreign line is more surprising than every own one; 0.5: chance) for each
file and seed, as JSON.
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
"""Share of the lines that is learned from; of so many lines one is foreign; lines that a stream reads before."""


def train_on(lines: Sequence[str], out: Path, *, steps: int, seed: int) -> Path:
    """A run of a small model that has learned from lines; the last tenth of them validates."""
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


def area_under_curve(own: Sequence[float], foreign: Sequence[float]) -> float:
    """The probability that a foreign score is larger than an own one, ties counted as halves."""
    difference = torch.tensor(foreign, dtype=torch.float64)[:, None] - torch.tensor(own, dtype=torch.float64)
    return float((difference > 0).double().mean() + (difference == 0).double().mean() / 2)


def foreign_score(run: Path, before: Sequence[str], own: Sequence[str], foreign: Sequence[str]) -> float:
    """The area under the curve where foreign lines stand among `own`, after `before` was read."""
    model, tokenizer = ct.load(run)
    stream = ct.Stream(model, tokenizer)
    stream.read("".join(before))
    lines, is_foreign, more = [], [], iter(foreign)
    for number, line in enumerate(own):
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
    """The lines of a file, each with one end; those that are blank are left out."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line.strip() + "\n" for line in text.split("\n") if line.strip()]


def main() -> None:
    """Train and score with each seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("foreign", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="a folder for corpora and runs, to be made")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    lines = lines_of(given.log)
    cut = int(len(lines) * FIRST_PART)
    results: dict[str, Any] = {}
    for seed in given.seeds:
        run = train_on(lines[:cut], given.out / str(seed), steps=given.steps, seed=seed)
        for path in given.foreign:
            area = foreign_score(run, lines[cut - READ_BEFORE : cut], lines[cut:], lines_of(path))
            results.setdefault(path.name, []).append(round(area, 4))
    command = shlex.join(["python", "examples/foreign_lines.py", *sys.argv[1:]])
    report = {"command": command, "format": 1, "log": given.log.name, "steps": given.steps, "seeds": given.seeds}
    print(json.dumps({**report, "foreign_lines": results}, indent=1))


if __name__ == "__main__":
    main()
