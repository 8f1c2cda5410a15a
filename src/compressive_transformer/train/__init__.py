"""Training: lanes through the model with their memory, in one process or several.

torchrun --nproc-per-node 2 -m compressive_transformer.cli train CONFIG DATA RUN
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ..config import TrainConfig
from ..data import Corpus
from ..errors import CompressiveError
from ..model import CompressiveTransformer
from .distributed import init_distributed
from .log import Callback, Log
from .resume import Resume
from .signals import StopSignals
from .trackers import TrackerName, open_tracker, require_tracker
from .trainer import Trainer

__all__ = ["Callback", "Resume", "TrackerName", "Trainer", "train"]


def train(
    model: CompressiveTransformer,
    corpus: Corpus,
    config: TrainConfig,
    out: str | Path,
    *,
    resume: Resume = None,
    stop_at: int | None = None,
    tracker: TrackerName | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train a model on `corpus.train` and write the run to a folder, which `load` reads.

    Under `torchrun` each process trains on its share of the lanes. Updates with non-finite gradients are skipped, lanes
    with non-finite memory are reset, both are logged.

    Args:
        model: The model to train; it is moved to the device of its process and trained in place.
        corpus: A corpus with the vocabulary of the model.
        config: Steps, batch size, learning rates, and how often to log, validate and write checkpoints.
        out: Folder of the run: config.json, model.safetensors (the best at validation), tokenizer.json, log.jsonl and
            resume/. It must be new or empty unless the run is resumed.
        resume: Checkpoint to resume from: "latest"; "if-any", the latest or a new run if there is none, for jobs that
            are restarted with the same command; or the number of a step. Parameters, optimizer, memory, position in
            the data and RNG state are restored exactly. With another number of processes than before, lanes keep their
            memory and position, and RNG states are reset.
        stop_at: Step after which to stop, with a checkpoint.
        tracker: Experiment tracker that shows the metrics of the log: "tensorboard", "trackio" or "wandb".
        callbacks: Functions called on rank 0 as `callback(entry, model)` with each entry of the log, a dict to which
            they may add plain values before it is written. One that returns True stops the run, with a checkpoint.

    Raises:
        CompressiveError: If model, corpus, config and folder do not fit together, before anything is written; later, if
            more than `max_skipped_updates` updates in a row are skipped.
        KeyboardInterrupt: After Ctrl-C or SIGTERM, which stop the run after the current step, with a checkpoint (with
            several processes, at the next line of the log). A second signal stops it immediately.
    """
    if stop_at is not None and stop_at < 1:
        raise CompressiveError(f"stop_at ({stop_at}) must be 1 or more")
    require_tracker(tracker)
    with init_distributed() as processes, ExitStack() as stack:
        trainer = Trainer(model, corpus, config, Path(out), processes)
        trainer.begin(resume)
        step, last = trainer.counters.step, config.steps if stop_at is None else min(stop_at, config.steps)
        stop = stack.enter_context(StopSignals())
        if tracker is not None and processes.is_main:
            shown = {name: trainer.settings()[name] for name in ("model", "train")}
            callbacks = [*callbacks, stack.enter_context(open_tracker(tracker, trainer.out, shown, step=step))]
        log = stack.enter_context(Log(model, processes, trainer.out, last=last, step=step, callbacks=callbacks))
        trainer.run(last, log, stop)
