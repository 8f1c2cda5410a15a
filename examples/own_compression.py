"""A compression function of your own: trained, saved, loaded and evaluated on the sample books of the package.

    python examples/own_compression.py runs/median

The command line can use this file as a plugin:

    compressive --plugin examples/own_compression.py generate runs/median/run
"""

import sys
from importlib.resources import as_file, files
from pathlib import Path

import torch

import compressive_transformer as ct
from compressive_transformer.evaluate import truncate_split


class MedianPool(ct.Compression):
    """Median of each group, per feature."""

    def forward(self, evicted: torch.Tensor) -> torch.Tensor:
        """Compress `[batch, group, compression_rate, d_model]` to `[batch, group, d_model]`."""
        return evicted.median(dim=2).values


ct.COMPRESSIONS["median"] = MedianPool


def main(out: Path) -> None:
    """Prepare the corpus `out`/data, train `out`/run on it, load and score the saved model."""
    with as_file(files("compressive_transformer.apps.demo") / "sample") as sample:
        corpus = ct.prepare(sample, out / "data")
    config = ct.ModelConfig(
        vocab_size=corpus.vocab_size,
        d_model=32,
        n_layers=2,
        n_heads=2,
        segment_length=32,
        memory_length=32,
        compressed_length=32,
        compression_rate=4,
        compression="median",
    )
    training = ct.TrainConfig(steps=20, batch_size=4, learning_rate=3e-3, warmup_steps=2, validate_every=0)
    ct.train(ct.CompressiveTransformer(config), corpus, training, out / "run")
    model, tokenizer = ct.load(out / "run")
    print(ct.evaluate(model, truncate_split(corpus.test, tokenizer, 1_000)))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/median"))
