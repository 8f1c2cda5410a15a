"""The command `compressive`: each sub-command parses, calls one public function and prints."""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tyro.conf import Positional, UseAppendAction

from .checkpoint import load
from .config import ModelConfig, TrainConfig, from_mapping, read_settings
from .corpus import open_corpus
from .corpus import prepare as prepare_corpus
from .demo import run_demo
from .errors import CompressiveError
from .evaluate import beginnings
from .evaluate import evaluate as evaluate_model
from .model import CompressiveTransformer, with_lengths
from .stream import Stream
from .train import train as train_model


def prepare(
    source: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")],
    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")],
    /,
    tokenizer: str = "bytes",
    vocab_size: int = 32_000,
    holdout: int = 10,
    field: str = "text",
) -> None:
    """Turn text into a corpus: tokens on disk, with the borders, words and bytes of each document.

    Line ends are read as text mode reads them (CRLF becomes LF); the text must be UTF-8.

    Args:
        source: A folder of .txt files, one document each, with sub-folders train/, validation/ and test/ or
            without; a .jsonl file or a folder of such; or hf:NAME for a Hugging Face dataset (extra `data`).
        out: The corpus's folder, to be made.
        tokenizer: "bytes", "bpe" (byte-level, trained here on the training documents), or a path to a Hugging
            Face tokenizer (a tokenizer.json or a folder with one).
        vocab_size: Most token ids of "bpe".
        holdout: Where the source has no splits: of every so many documents one goes to validation and one to
            test; 0 takes all for training.
        field: Name of the text in JSON lines and datasets.
    """
    corpus = prepare_corpus(
        source, out, tokenizer=tokenizer, vocab_size=vocab_size, holdout=holdout, field=field, progress=_say
    )
    for name, split in corpus.splits.items():
        documents = split.documents
        print(
            f"{name:<10}  {len(documents):>7,} documents  {sum(d.tokens for d in documents):>13,} tokens  "
            f"{sum(d.words for d in documents):>12,} words  {sum(d.bytes for d in documents):>13,} bytes"
        )


def train(
    config: Annotated[Positional[Path], tyro.conf.arg(metavar="CONFIG")],
    data: Annotated[Positional[Path], tyro.conf.arg(metavar="DATA")],
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    settings: Annotated[UseAppendAction[list[str]], tyro.conf.arg(name="set", metavar="SECTION.FIELD=VALUE")],
    resume: bool = False,
    stop_at: int | None = None,
    tensorboard: bool = False,
) -> None:
    """Train a model on a corpus.

    The run's folder gets config.json, model.safetensors (the best at validation), tokenizer.json, log.jsonl and
    resume/. For several processes: torchrun --nproc-per-node N -m compressive_transformer.cli train ...

    Args:
        config: A TOML file with the tables [model] and [train]; every field is described in the docstrings of
            ModelConfig and TrainConfig. vocab_size may be left out, the corpus says it.
        data: A corpus that `compressive prepare` made.
        run: The run's folder, to be made; with --resume, the one to go on with.
        settings: Override a field of the config, for example --set model.compression=mean; may be repeated.
        resume: Go on exactly where the run's last checkpoint stands.
        stop_at: End at this step, with a checkpoint to resume from.
        tensorboard: Write TensorBoard files too (extra `tensorboard`).
    """
    corpus = open_corpus(data)
    tables = read_settings(config, settings)
    tables["model"].setdefault("vocab_size", corpus.vocab_size)
    train_config = from_mapping(TrainConfig, tables["train"], "train")
    model_config = from_mapping(ModelConfig, tables["model"], "model")
    torch.manual_seed(train_config.seed)
    model = CompressiveTransformer(model_config)
    train_model(model, corpus, train_config, run, resume=resume, stop_at=stop_at, tensorboard=tensorboard)
    _say(f"the run is in {run}; try: compressive evaluate {run} {data}")


def evaluate(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    data: Annotated[Positional[Path], tyro.conf.arg(metavar="DATA")],
    /,
    split: str = "validation",
    batch: int = 8,
    memory_length: int | None = None,
    compressed_length: int | None = None,
    tokens: int = 0,
    json: bool = False,
) -> None:
    """Score a trained model on a split of a corpus: bits per byte, word perplexity, nats.

    Each document is read from its beginning, each token predicted once; the result does not depend on --batch.

    Args:
        run: A run that `compressive train` wrote.
        data: A corpus made with the same tokenizer.
        split: train, validation or test.
        batch: Documents that are read side by side.
        memory_length: Slots of recent memory, if other than in training.
        compressed_length: Slots of compressed memory, if other than in training.
        tokens: Score about this many tokens only, in beginnings of documents; 0 for all.
        json: Print everything as JSON, document by document, with all that is needed to repeat it.
    """
    model, tokenizer = load(run)
    lengths = {"memory_length": memory_length, "compressed_length": compressed_length}
    if changed := {name: length for name, length in lengths.items() if length is not None}:
        model = with_lengths(model, **changed)
    chosen = open_corpus(data).split(split)
    if tokens:
        chosen = beginnings(chosen, tokenizer, tokens)
    total, done = sum(document.tokens for document in chosen.documents), 0

    def progress(tokens: int) -> None:
        nonlocal done
        done += tokens
        _say_over(f"{done:,} of {total:,} tokens")

    result = evaluate_model(model.to(_device()), chosen, batch=batch, progress=progress)
    _say_over("")
    print(json_format.dumps(result.table(), indent=1, ensure_ascii=False) if json else result)


def generate(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    prompt: Path | None = None,
    tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: str | None = None,
) -> None:
    """Read a text with memory and write on from it, printed as it is produced.

    Args:
        run: A run that `compressive train` wrote.
        prompt: A file with the text to read first, "-" for standard input; without it a new document begins.
        tokens: Tokens to write.
        temperature: 0 takes the likeliest token each time, 1 samples from the model's own distribution.
        top_k: Sample among the k likeliest tokens only; 0 for all.
        top_p: Sample among the fewest tokens that have this probability together.
        seed: The same seed gives the same text.
        stop: End before this text appears.
    """
    model, tokenizer = load(run)
    stream = Stream(model.to(_device()), tokenizer)
    if prompt is not None:
        stream.read(_read_prompt(prompt))
    pieces = stream.pieces(tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def demo(out: Path = Path("demo")) -> None:
    """Train a small model on the sample of real books in the package, and show what its memory does.

    Args:
        out: A folder for the corpus, the runs and the results, to be made.
    """
    run_demo(out)


COMMANDS: dict[str, Callable[..., None]] = {
    "prepare": prepare,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "demo": demo,
}


def main() -> None:
    """Run the command line; exit 0 when done, 1 with one line when it failed, 2 on wrong usage."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="compressive",
            description="Language models whose memory compresses instead of forgetting (Rae et al. 2019).",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except CompressiveError as error:
        sys.exit(f"compressive: {error}")
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        sys.exit(f"compressive: {error.filename or 'file system'}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit("compressive: interrupted; `compressive train --resume` goes on from the last checkpoint")


def _read_prompt(path: Path) -> str:
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CompressiveError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as corpora are read


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_over(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
