"""Commands that make things: a corpus, a trained model, the demonstration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import tyro
from tyro.conf import Positional, UseAppendAction

from ..apps.demo import run_demo
from ..config import ModelConfig, TrainConfig
from ..config.toml import from_mapping, read_settings
from ..data import open_corpus
from ..data import prepare as prepare_corpus
from ..data.sources import SOURCES
from ..model import CompressiveTransformer
from ..train import Resume
from ..train import train as train_model
from ..train.trackers import TrackerName
from .terminal import say


def prepare(
    source: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE", help=SOURCES)],
    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")],
    /,
    tokenizer: str | None = None,
    vocab_size: int = 32_000,
    holdout: int = 10,
    field: str = "text",
    processes: int | None = None,
) -> None:
    """Turn text into a corpus: tokens on disk, with the borders, words and bytes of each document.

    The text must be UTF-8; CRLF is read as LF. After an interruption the same command goes on where it stopped.

    Args:
        out: The corpus's folder, to be made.
        tokenizer: "bytes", which is what text is read with if nothing is said, "bpe" (byte-level, trained here on
            the training documents), or a path to a Hugging Face tokenizer (a tokenizer.json or a folder with one) or
            to a .model of SentencePiece (extra `data`).
            enwik8:, recall: and passkey: are read as bytes, wikitext: as words, audio: as samples.
        vocab_size: Most token ids of "bpe".
        holdout: Where the source has no splits: of every so many documents one goes to validation and one to
            test; 0 takes all for training.
        field: Name of the text in JSON lines, Parquet files and datasets.
        processes: How many encode at a time. If nothing is said, one for each core where the source is large and the
            tokenizer slow. They change nothing but the time.
    """
    corpus = prepare_corpus(
        source,
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        holdout=holdout,
        field=field,
        processes=processes,
        progress=True,
    )
    for name, split in corpus.splits.items():
        documents = split.documents
        print(
            f"{name:<10}  {len(documents):>7,} documents  {sum(d.tokens for d in documents):>13,} tokens  "
            f"{sum(d.words for d in documents):>12,} words  {sum(d.bytes for d in documents):>13,} bytes"
            + (f"  ({split.official}, official)" if split.official else "")
        )


def train(
    config: Annotated[Positional[Path], tyro.conf.arg(metavar="CONFIG")],
    data: Annotated[Positional[Path], tyro.conf.arg(metavar="DATA")],
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    settings: Annotated[UseAppendAction[list[str]], tyro.conf.arg(name="set", metavar="SECTION.FIELD=VALUE")],
    resume: Annotated[Resume, tyro.conf.arg(metavar="latest|if-any|STEP")] = None,
    stop_at: int | None = None,
    tracker: TrackerName | None = None,
) -> None:
    """Train a model on a corpus.

    The run's folder gets config.json, model.safetensors (the best at validation), tokenizer.json, log.jsonl and
    resume/. For several processes: torchrun --nproc-per-node N -m compressive_transformer.cli train ...

    Args:
        config: A TOML file with the tables [model] and [train]. Each of their fields has a default, so the file may
            be empty, and is described in the docstrings of ModelConfig and TrainConfig; the corpus says vocab_size.
        data: A corpus that `compressive prepare` made.
        run: The run's folder, to be made; with --resume, an existing one.
        settings: Override a field of the config, for example --set model.compression=mean; may be repeated.
        resume: Resume the run exactly from its latest checkpoint (latest), or from that of a step, if a later one is
            damaged; if-any starts the run where there is no checkpoint yet: for jobs that are restarted with the same
            command, as by torchrun --max-restarts.
        stop_at: Stop after this step, with a checkpoint to resume from.
        tracker: Show the run in tensorboard, trackio or wandb too; each is an extra of that name.
    """
    corpus = open_corpus(data)
    tables = read_settings(config, settings)
    tables["model"].setdefault("vocab_size", corpus.vocab_size)
    train_config = from_mapping(TrainConfig, tables["train"], "train")
    model_config = from_mapping(ModelConfig, tables["model"], "model")
    torch.manual_seed(train_config.seed)
    model = CompressiveTransformer(model_config)
    train_model(
        model,
        corpus,
        train_config,
        run,
        resume=resume,
        stop_at=stop_at,
        tracker=tracker,
    )
    say(f"the run is in {run}; try: compressive evaluate {run} {data}")


def demo(out: Path = Path("demo")) -> None:
    """Train a small model on the sample of real books in the package, and show what its memory does.

    Args:
        out: A folder for the corpus, the runs and the results, to be made.
    """
    run_demo(out)
