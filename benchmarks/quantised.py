"""Cost of rounded weights in bits per byte of held-out text, read token by token as in decoding.

    python benchmarks/quantised.py RUN DATA --split test --tokens 20000

The same starts of documents are scored with each precision of `CachedDecoder`; every token is predicted by a step
of the decoder, memory and commits included. Prints a table, each row labelled with its precision.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from compressive_transformer import CompressiveTransformer, Split, Tokenizer, load, open_corpus
from compressive_transformer.evaluate import truncate_split
from compressive_transformer.generate import PRECISIONS, CachedDecoder, Precision


def decoded_nats(model: CompressiveTransformer, split: Split, precision: Precision) -> float:
    """Return the nats of all targets of a split, token by token."""
    decoder, total = CachedDecoder(model, model.empty_memory(1), precision), 0.0
    for document in range(len(split.documents)):
        tokens = torch.tensor([split.start_id, *split.read(document)])
        decoder.restart(model.empty_memory(1))
        scored = split.is_target(tokens[1:].numpy())
        for token, target, counts in zip(tokens[:-1].split(1), tokens[1:], scored, strict=True):
            logits = decoder.step(token)[0].double()
            total += float(logits.logsumexp(0) - logits[target]) * bool(counts)
    return total


def table_of(model: CompressiveTransformer, tokenizer: Tokenizer, split: Split, tokens: int) -> str:
    """Return bits per byte with each precision, and the difference to full precision."""
    part = truncate_split(split, tokenizer, tokens) if tokens else split
    size = sum(document.bytes for document in part.documents)
    bits = {precision: decoded_nats(model, part, precision) / math.log(2) / size for precision in PRECISIONS}
    lines = [f"{'weights':<10}{'bits per byte':>15}{'more':>10}"]
    for precision, found in bits.items():
        lines.append(f"{precision:<10}{found:>15.5f}{found - bits['full']:>+10.5f}")
    return "\n".join(lines)


def main() -> None:
    """Score with each precision and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run that `compressive train` wrote")
    parser.add_argument("data", type=Path, help="a corpus made with the same tokenizer")
    parser.add_argument("--split", default="test", help="train, validation or test")
    parser.add_argument("--tokens", type=int, default=20_000, help="number of tokens, about; 0 for all")
    given = parser.parse_args()
    model, tokenizer = load(given.run)
    print(table_of(model, tokenizer, open_corpus(given.data).split(given.split), given.tokens))


if __name__ == "__main__":
    main()
