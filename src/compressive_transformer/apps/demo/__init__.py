"""Demo: a Compressive Transformer and a Transformer-XL of equal attention width, trained on real books."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import load, read_json, write_json
from ...config import ModelConfig, TrainConfig
from ...data import Corpus, open_corpus, prepare
from ...errors import CompressiveError
from ...evaluate import evaluate
from ...generate.stream import Stream
from ...model import CompressiveTransformer
from ...train import train

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
    batch_size=16,
    learning_rate=2e-3,
    compression_learning_rate=2e-4,
    warmup_steps=50,
    log_every=50,
    validate_every=250,
    validation_tokens=20_000,
    checkpoint_every=250,
)
PROMPT_CHARACTERS = 2000


MODELS = {"compressive": COMPRESSIVE, "transformer-xl": TRANSFORMER_XL}


def run_demo(out: Path) -> None:
    """Prepare the sample books, train both models on the same tokens, score them and generate text; five minutes.

    The models are trained side by side, one core each: models as small as these gain little from a second one.

    Args:
        out: Folder for the corpus, the runs and the scores. An interrupted demo resumes from what it holds.

    Raises:
        CompressiveError: A training failed.
    """
    corpus = _corpus(out / "data")
    tokens = TRAINING.steps * TRAINING.batch_size * COMPRESSIVE.segment_length
    _say(f"Training both models on the same {tokens:,} tokens, side by side. Progress of the compressive model:")
    spawned = multiprocessing.get_context("spawn")
    workers = {name: spawned.Process(target=_train_and_score, args=(name, out)) for name in MODELS}
    for worker in workers.values():
        worker.start()
    for worker in workers.values():
        worker.join()
    for name, worker in workers.items():
        if worker.exitcode:
            log = "its output is above" if name == "compressive" else f"see {out / name}.log"
            raise CompressiveError(f"training of {name} failed; {log}")
    print(_comparison({name: read_json(out / f"{name}.json") for name in MODELS}))
    print(_passage(out / "compressive", corpus))
    print(
        f"\nResults are in {out}: data/ (the corpus), compressive/ and transformer-xl/ (the runs), and a score file "
        f"for each.\nTry:  compressive generate {out / 'compressive'} --tokens 200\n"
        f"      compressive evaluate {out / 'compressive'} {out / 'data'} --compressed-length 128"
    )


def _corpus(folder: Path) -> Corpus:
    if folder.is_dir():
        return open_corpus(folder)
    _say("Preparing the sample: 12 books of PG-19; training a byte-level BPE tokenizer on 8 of them")
    with resources.as_file(resources.files(__package__) / "sample") as sample:
        return prepare(str(sample), folder, tokenizer="bpe", vocab_size=COMPRESSIVE.vocab_size)


def _train_and_score(name: str, out: Path) -> None:
    """Train and score one model, in its own process."""
    torch.set_num_threads(1)
    log = sys.stderr if name == "compressive" else (out / f"{name}.log").open("w", encoding="utf-8")
    with contextlib.redirect_stderr(log):
        corpus, run = open_corpus(out / "data"), out / name
        torch.manual_seed(TRAINING.seed)
        model = CompressiveTransformer(replace(MODELS[name], vocab_size=corpus.vocab_size))
        train(model, corpus, TRAINING, run, resume="latest" if (run / "resume").is_dir() else None)
        model, _ = load(run)
        write_json(out / f"{name}.json", evaluate(model, corpus.test).to_dict())


def _comparison(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "\nScores on two held-out books. Both models saw the same tokens and have equal attention width:\n",
        f"{'':<16}{'memory':>18}{'width':>7}{'range':>8}{'bits per byte':>15}{'word perplexity':>17}",
    ]
    for name, result in results.items():
        config = ModelConfig(**result["conditions"]["model"])
        memory = f"{config.memory_length} + {config.compressed_length} × {config.compression_rate}"
        lines.append(
            f"{name:<16}{memory:>18}{config.attention_width:>7}{config.temporal_range:>8}"
            f"{result['bits_per_byte']:>15.4f}{result['word_perplexity']:>17.1f}"
        )
    lines.append(
        "\nmemory: recent slots + compressed slots × tokens per slot; width: states that a token attends to;\n"
        "range: tokens that can reach a prediction. One seed: a demo, not evidence."
    )
    return "\n".join(lines)


def _passage(run: Path, corpus: Corpus) -> str:
    model, tokenizer = load(run)
    stream = Stream(model, tokenizer)
    opening = tokenizer.decode(corpus.test.read(0))[:PROMPT_CHARACTERS]
    stream.read(opening)
    written = stream.write(120, temperature=0.7, seed=1)
    return (
        f"\nThe compressive model continues {corpus.test.documents[0].title!r} after its first "
        f"{PROMPT_CHARACTERS} characters (▶ marks where it starts):\n\n… {opening[-200:].strip()} ▶ {written}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
