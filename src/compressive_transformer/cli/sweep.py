"""The command `sweep`."""

from __future__ import annotations

import json as json_format

from tyro.conf import OmitArgPrefixes

from ..data import open_corpus
from ..evaluate import sweep as sweep_lengths
from ._common import DataArgument, RunArgument, load_model
from .evaluate import DEFAULT_SPLIT, LengthOption, SplitOptions, progress_of


def sweep(
    run: RunArgument,
    data: DataArgument,
    /,
    split: OmitArgPrefixes[SplitOptions] = DEFAULT_SPLIT,
    recent: tuple[LengthOption, ...] = (),
    compressed: tuple[LengthOption, ...] = (),
    json: bool = False,
) -> None:
    """Score a trained model with every combination of other memory lengths.

    Args:
        run: Run from `compressive train`.
        data: Corpus with the same tokenizer.
        split: Part of the corpus to score.
        recent: Slots of recent memory to try, each one number or one per layer (4,8); by default as in training.
        compressed: Slots of compressed memory to try, likewise.
        json: Print a JSON list of what `compressive evaluate --json` prints.
    """
    model, tokenizer = load_model(run)
    part = split.select(open_corpus(data), tokenizer)
    with progress_of(part, times=max(1, len(recent)) * max(1, len(compressed))) as progress:
        results = sweep_lengths(
            model,
            part,
            memory_lengths=recent,
            compressed_lengths=compressed,
            batch_size=split.batch_size,
            progress=progress.advance,
        )
    if json:
        print(json_format.dumps([result.to_dict() for result in results], indent=1, ensure_ascii=False))
        return
    print(f"{'recent':>10}{'compressed':>12}{'bits per byte':>15}{'word perplexity':>17}{'nats per token':>16}")
    for result in results:
        memory, total = result.conditions["model"], result.total
        print(
            f"{memory['memory_length']!s:>10}{memory['compressed_length']!s:>12}{total.bits_per_byte:>15.4f}"
            f"{total.word_perplexity:>17.2f}{total.nats_per_token:>16.4f}"
        )
