"""The command `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import tyro
from tyro.conf import Positional, UseAppendAction

from ..config import ModelConfig, TrainConfig
from ..config.toml import from_mapping, read_settings
from ..data import open_corpus
from ..model import CompressiveTransformer
from ..train import Resume, TrackerName
from ..train import train as train_model
from ._common import DataArgument, say


def train(
    config: Annotated[Positional[Path], tyro.conf.arg(metavar="CONFIG")],
    data: DataArgument,
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    settings: Annotated[UseAppendAction[list[str]], tyro.conf.arg(name="set", metavar="SECTION.FIELD=VALUE")],
    resume: Annotated[Resume, tyro.conf.arg(metavar="latest|if-any|STEP")] = None,
    stop_at: int | None = None,
    tracker: TrackerName | None = None,
) -> None:
    """Train a model on a corpus.

    The run folder gets config.json, model.safetensors (the best at validation), tokenizer.json, log.jsonl and resume/.
    With several processes: torchrun --nproc-per-node N -m compressive_transformer.cli train ...

    Args:
        config: TOML file with the tables [model] and [train]. Their fields are those of ModelConfig and TrainConfig,
            where they are documented; each has a default, and vocab_size comes from the corpus.
        data: Corpus from `compressive prepare`.
        run: Folder of the run, which must not exist; with --resume, an existing run.
        settings: Override a field of the config, for example --set model.compression=mean.
        resume: Resume the run exactly: from its latest checkpoint (latest), or from the checkpoint of a step, for
            example if a later one is damaged. if-any starts a new run if there is no checkpoint yet, for jobs that are
            restarted with the same command, as by torchrun --max-restarts.
        stop_at: Stop after this step, with a checkpoint to resume from.
        tracker: Also log to tensorboard, trackio or wandb; each is an extra of that name.
    """
    corpus = open_corpus(data)
    tables = read_settings(config, settings)
    tables["model"].setdefault("vocab_size", corpus.vocab_size)
    train_config = from_mapping(TrainConfig, tables["train"], "train")
    model_config = from_mapping(ModelConfig, tables["model"], "model")
    torch.manual_seed(train_config.seed)
    model = CompressiveTransformer(model_config)
    train_model(model, corpus, train_config, run, resume=resume, stop_at=stop_at, tracker=tracker)
    say(f"the run is in {run}; try: compressive evaluate {run} {data}")
