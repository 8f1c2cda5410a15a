"""The training loop: lanes through the model with their memory, on one process or on many.

torchrun --nproc-per-node 2 -m compressive_transformer.cli train CONFIG DATA RUN
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ..config import TrainConfig
from ..data import Corpus
from ..errors import CompressiveError
from ..model import CompressiveTransformer
from .distributed import init_distributed
from .reports import Callback, Reports
from .signals import StopSignals
from .trackers import TrackerName, require_tracker
from .trainer import Resume, Trainer

__all__ = ["Resume", "Trainer", "train"]


def train(
    model: CompressiveTransformer,
    corpus: Corpus,
    config: TrainConfig,
    out: str | Path,
    *,
    resume: Resume = False,
    stop_at: int | None = None,
    tracker: TrackerName | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train `model` on `corpus.train` and write the run to the folder `out`; `load` reads it.

    Under `torchrun` each process takes its share of the lanes. With `resume` the run in `out` goes on exactly
    where its last checkpoint stands, parameters, optimizer, memory, data position and random state included, or with a
    number where the checkpoint of that step does; "if-any" begins where no checkpoint was written yet, for jobs that
    are started again with the same command. On another number of processes than before random numbers begin anew,
    and the log says so; each lane keeps its memory and its place.
    `stop_at` ends this call early, with a checkpoint, at that step. The model moves to the device of its process.

    `tracker` names what shows the numbers of the log: "tensorboard", "trackio" or "wandb". Each of the `callbacks` is
    called with each entry of the log, a dict to which it may add values before it is written, and with the model; one
    that returns True ends this call, as `stop_at` does. All this happens in the leading process only.

    Ctrl-C and SIGTERM end it after the step that is being made, with a checkpoint; a second one at once. With several
    processes they do so at the next line of the log.

    An update whose gradients are not finite is left out, and lanes whose memory is not finite begin anew with an empty
    one; the log says so. Too many of them in a row end the run.

    Raises CompressiveError, before anything is written, where config, model, corpus and folder do not fit, and later
    where `max_skipped_updates` is exceeded. Raises KeyboardInterrupt where it was stopped by a signal.
    """
    if stop_at is not None and stop_at < 1:
        raise CompressiveError(f"stop_at ({stop_at}) must be 1 or more")
    require_tracker(tracker)
    with init_distributed() as processes:
        trainer = Trainer(model, corpus, config, Path(out), processes)
        trainer.begin(resume=resume)
        last = config.steps if stop_at is None else min(stop_at, config.steps)
        with StopSignals() as stop, trainer.progress(last, tracker) if processes.is_main else nullcontext() as progress:
            trainer.run(last, Reports(model, processes, progress, callbacks), stop)
