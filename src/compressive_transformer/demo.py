"""The demonstration: a Compressive Transformer and a Transformer-XL of equal attention width, on real books."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch

from .checkpoint import load, write_json
from .config import ModelConfig, TrainConfig
from .corpus import Corpus, open_corpus, prepare
from .evaluate import Evaluation, evaluate
from .model import CompressiveTransformer
from .stream import Stream
from .train import train

COMPRESSIVE = ModelConfig(
    vocab_size=2048,
    d_model=128,
    n_layers=4,
    n_heads=4,
    segment_length=64,
    memory_length=64,
    compressed_length=64,
    compression_rate=4,
)
# The same number of states to attend to, none of them compressed.
TRANSFORMER_XL = replace(COMPRESSIVE, memory_length=128, compressed_length=0)
TRAINING = TrainConfig(
    steps=500,
    batch=16,
    learning_rate=2e-3,
    compression_learning_rate=2e-4,
    warmup=50,
    log_every=50,
    validate_every=250,
    validation_tokens=20_000,
    checkpoint_every=250,
)
PROMPT_CHARACTERS = 2000


def run_demo(out: Path) -> None:
    """Prepare the sample, train both models on the same tokens, score them, write a passage; about five minutes.

    What is in `out` already is taken up where it stands.
    """
    corpus = _corpus(out / "data")
    results = {}
    for name, config in (("compressive", COMPRESSIVE), ("transformer-xl", TRANSFORMER_XL)):
        _say(f"\nTraining {name}: {TRAINING.steps * TRAINING.batch * config.segment_length:,} tokens")
        run = out / name
        torch.manual_seed(TRAINING.seed)
        model = CompressiveTransformer(replace(config, vocab_size=corpus.vocab_size))
        train(model, corpus, TRAINING, run, resume=(run / "resume").is_dir())
        model, _ = load(run)
        results[name] = evaluate(model, corpus.test)
        write_json(out / f"{name}.json", results[name].table())
    print(_comparison(results))
    print(_passage(out / "compressive", corpus))
    print(
        f"\nEverything is in {out}: data/ (the corpus), compressive/ and transformer-xl/ (the runs), and the two "
        f"scores, book by book.\nTry:  compressive generate {out / 'compressive'} --tokens 200\n"
        f"      compressive evaluate {out / 'compressive'} {out / 'data'} --compressed-length 128"
    )


def _corpus(folder: Path) -> Corpus:
    if folder.is_dir():
        return open_corpus(folder)
    _say("Preparing the sample: 12 books of PG-19, byte-level BPE trained on 8 of them")
    with resources.as_file(resources.files(__package__) / "sample") as sample:
        return prepare(str(sample), folder, tokenizer="bpe", vocab_size=COMPRESSIVE.vocab_size)


def _comparison(results: dict[str, Evaluation]) -> str:
    lines = [
        "\nTwo held-out books, both models trained on the same tokens with equal attention width:\n",
        f"{'':<16}{'memory':>18}{'width':>7}{'range':>8}{'bits per byte':>15}{'word perplexity':>17}",
    ]
    for name, result in results.items():
        config = ModelConfig(**result.conditions["model"])
        memory = f"{config.memory_length} + {config.compressed_length} × {config.compression_rate}"
        score = result.total
        lines.append(
            f"{name:<16}{memory:>18}{config.attention_width:>7}{config.temporal_range:>8}"
            f"{score.bits_per_byte:>15.4f}{score.word_perplexity:>17.1f}"
        )
    lines.append(
        "\nmemory: recent slots + compressed slots × tokens in each; width: states a token attends to at most;\n"
        "range: tokens that can reach a prediction. A demonstration on one seed, not evidence."
    )
    return "\n".join(lines)


def _passage(run: Path, corpus: Corpus) -> str:
    model, tokenizer = load(run)
    stream = Stream(model, tokenizer)
    opening = tokenizer.decode(corpus.test.read(0))[:PROMPT_CHARACTERS]
    stream.read(opening)
    written = stream.write(120, temperature=0.7, seed=1)
    return (
        f"\nAfter reading the first {PROMPT_CHARACTERS} characters of {corpus.test.documents[0].title!r}, "
        f"the compressive model goes on:\n\n… {opening[-200:].strip()} ▶ {written}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
