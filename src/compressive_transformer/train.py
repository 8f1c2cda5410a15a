"""The training loop: lanes through the model with their memory, on one process or on many.

torchrun --nproc-per-node 2 -m compressive_transformer.cli train CONFIG DATA RUN
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from .blocks import Block
from .checkpoint import ResumePoint, save
from .config import TrainConfig, check_range, check_types
from .corpus import Corpus
from .errors import CompressiveError
from .evaluate import Evaluation, beginnings, evaluate
from .lanes import Lanes, Segment
from .memory import Memory
from .model import CompressiveTransformer
from .optimiser import Optimiser, Update, update_period
from .processes import Processes, joined
from .progress import Progress, Sums, cut_log
from .reports import Callback, Reports
from .settings import as_table, with_defaults
from .stream import Stream
from .trackers import TrackerName, open_tracker, require_tracker
from .window import Window, lane_parts


@dataclass
class Counters:
    """How far a run has come."""

    step: int = 0
    since_update: int = 0
    tokens: int = 0
    """Targets that were learned from, over all processes."""
    best: float | None = None
    """Fewest bits per byte at a validation."""

    def __post_init__(self) -> None:
        check_types(self)  # they may come from a damaged file
        check_range(self, ("step", "since_update", "tokens"), low=0)
        if self.best is not None and not (isinstance(self.best, float) and math.isfinite(self.best)):
            raise CompressiveError(f"best ({self.best!r}) must be a number, or none")


def train(
    model: CompressiveTransformer,
    corpus: Corpus,
    config: TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    stop_at: int | None = None,
    tracker: TrackerName | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train `model` on `corpus.train` and write the run to the folder `out`; `load` reads it.

    Under `torchrun` each process takes its share of the lanes. With `resume` the run in `out` goes on exactly
    where its last checkpoint stands, parameters, optimiser, memory, data position and random state included.
    `stop_at` ends this call early, with a checkpoint, at that step. The model moves to the device of its process.

    `tracker` names what shows the numbers of the log: "tensorboard", "trackio" or "wandb". Each of the `callbacks` is
    called with each entry of the log, a dict to which it may add values before it is written, and with the model; one
    that returns True ends this call, as `stop_at` does. All this happens in the leading process only.

    Raises CompressiveError, before anything is written, where config, model, corpus and folder do not fit.
    """
    if stop_at is not None and stop_at < 1:
        raise CompressiveError(f"stop_at ({stop_at}) must be 1 or more")
    require_tracker(tracker)
    with joined() as processes:
        trainer = Trainer(model, corpus, config, Path(out), processes)
        trainer.begin(resume=resume)
        last = config.steps if stop_at is None else min(stop_at, config.steps)
        with trainer.progress(last, tracker) if processes.leads else nullcontext() as progress:
            trainer.run(last, Reports(model, processes, progress, callbacks))


class Trainer:
    """One process's part of a training run."""

    def __init__(
        self,
        model: CompressiveTransformer,
        corpus: Corpus,
        config: TrainConfig,
        out: Path,
        processes: Processes,
    ) -> None:
        _check(model, corpus, config, processes)
        self.config, self.corpus, self.out, self.processes = config, corpus, out, processes
        self.counters = Counters()
        self.model = model.to(processes.device).train()
        for block in cast(Iterable[Block], self.model.blocks):
            block.gradient_checkpointing, block.compiled = config.gradient_checkpointing, config.compile
        # A step whose lanes all read short documents compresses nothing, so f_c may get no gradient.
        parallel, window = nn.parallel.DistributedDataParallel, Window(model, config.precision)
        self.window = parallel(window, find_unused_parameters=True) if processes.world > 1 else window
        self.segments = config.segments_of(model.config)
        self.optimiser = Optimiser(model, config)
        self.lanes = Lanes(
            corpus.train,
            batch=config.batch,
            length=model.config.segment_length,
            seed=config.seed,
            endless=True,
            longest_document=config.longest_document,
            rank=processes.rank,
            world=processes.world,
        )
        part = config.batch // processes.world // config.accumulation
        self.memories = [model.empty_memory(part) for _ in range(config.accumulation)]
        self.validation = self._validation()

    def begin(self, *, resume: bool) -> None:
        """Make the run's folder, or take up what its last checkpoint holds."""
        torch.manual_seed(self.config.seed + self.processes.rank)
        if resume:
            self._restore(ResumePoint.latest(self.out))
        elif self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise CompressiveError(
                f"{self.out}: exists already; choose another folder, or go on with that run by --resume"
            )
        self.processes.wait()
        if self.processes.leads:
            self.out.mkdir(parents=True, exist_ok=True)
            cut_log(self.out / "log.jsonl", self.counters.step)

    def progress(self, last: int, tracker: TrackerName | None) -> Progress:
        """What the leading process writes to, up to step `last`."""
        step, settings = self.counters.step, {name: self._identity()[name] for name in ("model", "train")}
        opened = open_tracker(tracker, self.out, settings, step=step) if tracker else None
        return Progress(self.out, last, step=step, tracker=opened)

    def run(self, last: int, reports: Reports) -> None:
        """Train up to and with step `last`, validating, sampling and writing checkpoints on the way."""
        config, sums, update = self.config, Sums(), None
        while self.counters.step < last and not reports.stopped:
            update = self.step([next(self.lanes) for _ in range(self.segments)], sums) or update
            step = self.counters.step
            if step % config.log_every == 0 or step == last:
                reports.write(self._entry(sums, update))
                sums, update = Sums(), None
            if config.validate_every and (step % config.validate_every == 0 or step == config.steps):
                reports.write({"step": step, "validation": self.validate().total.table()})
            if config.sample_every and (step % config.sample_every == 0 or step == config.steps):
                reports.write({"step": step, "sample": self.sample()})
            if reports.stopped and sums.steps:  # they would be missing from the log
                reports.write(self._entry(sums, update))
            if step % config.checkpoint_every == 0 or step == last or reports.stopped:
                self.checkpoint()

    def step(self, segments: Sequence[Segment], sums: Sums) -> Update | None:
        """The next segments of each lane: forward, backward and, where its period ends, an update."""
        config, counters = self.config, self.counters
        period = update_period(config, counters.step + 1)
        targets = sum(segment.total_targets for segment in segments)
        ends = counters.since_update + 1 >= period or counters.step + 1 == config.steps
        for index, part in enumerate(lane_parts(segments, config.accumulation)):
            synchronised = ends and index == config.accumulation - 1
            with self._gathering(synchronised):
                read = self.window(part, self.memories[index])
                # Means over all lanes of all processes, so that however they are split the update is the same.
                loss = read.nats * self.processes.world / max(targets, 1)
                loss = loss + read.compression_loss / config.accumulation
                (loss / period).backward()
            self.memories[index] = read.memory
            sums.add(read, 1 / config.accumulation)
        sums.targets += targets
        counters.step += 1
        counters.since_update += 1
        counters.tokens += targets
        if not ends:
            return None
        counters.since_update = 0
        return self.optimiser.step(counters.step)

    def validate(self) -> Evaluation:
        """The score on the validation split; the best model so far is kept as model.safetensors."""
        processes = self.processes
        batch = max(self.config.batch, processes.world)
        result = evaluate(self.model, self.validation, batch=batch, rank=processes.rank, world=processes.world)
        reached, best = result.total.bits_per_byte, self.counters.best
        if math.isfinite(reached) and (best is None or reached < best):
            self.counters.best = reached
            if processes.leads:
                save(self.out, self.model, self.corpus.tokenizer)
        return result

    def sample(self) -> str:
        """Text that the model writes now, always from the same seed."""
        stream = Stream(self.model, self.corpus.tokenizer)
        return stream.write(self.config.sample_tokens, seed=self.config.seed)

    def checkpoint(self) -> None:
        """Write all that `begin(resume=True)` needs."""
        own = {
            f"memory-{at}.{name}": value
            for at, memory in enumerate(self.memories)
            for name, value in memory.state_dict().items()
        }
        own.update(self.optimiser.gradients())
        own["random"] = torch.get_rng_state()
        if self.processes.device.type == "cuda":
            own["random_cuda"] = torch.cuda.get_rng_state()
        if self.processes.leads and self.counters.best is None:
            save(self.out, self.model, self.corpus.tokenizer)
        parameters = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        state = {"counters": asdict(self.counters), "lanes": self.lanes.state_dict(), **self._identity()}
        shared = {**parameters, **self.optimiser.state()}
        ResumePoint.write(self.out, self.counters.step, self.processes, shared=shared, own=own, state=state)

    def _entry(self, sums: Sums, update: Update | None) -> dict[str, Any]:
        """A line of the log on the steps that `sums` holds."""
        counters, rates = self.counters, update.table() if update else {}
        return {"step": counters.step, "tokens": counters.tokens, **sums.entry(self.processes), **rates}

    def _gathering(self, synchronised: bool) -> Any:
        if isinstance(self.window, nn.parallel.DistributedDataParallel) and not synchronised:
            return self.window.no_sync()
        return nullcontext()

    def _validation(self) -> Any:
        if not self.config.validate_every:
            return None
        split = self.corpus.validation
        limit = self.config.validation_tokens
        return beginnings(split, self.corpus.tokenizer, limit) if limit else split

    def _identity(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        return {
            "model": as_table(self.model.config),
            "train": as_table(self.config),
            "corpus": self.corpus.fingerprint,
            "processes": self.processes.world,
        }

    def _restore(self, point: ResumePoint) -> None:
        state = point.state()
        for part, config in (("model", self.model.config), ("train", self.config)):
            if isinstance(state.get(part), dict):
                state[part] = with_defaults(config, state[part])
        for part, now in self._identity().items():
            _compare(point.folder, part, state.get(part), now)
        shared, own = point.shared(), point.process(self.processes.rank)
        try:
            parameters = {k.removeprefix("model."): v for k, v in shared.items() if k.startswith("model.")}
            self.model.load_state_dict(parameters)
            self.optimiser.restore({**shared, **own})
            self.counters = Counters(**state["counters"])
            if self.counters.step != point.step:
                raise CompressiveError(f"it counts {self.counters.step} steps")
            self.lanes.load_state_dict(state["lanes"])
            for at in range(len(self.memories)):
                prefix = f"memory-{at}."
                named = {k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)}
                self.memories[at] = Memory.from_state_dict(named).to(self.processes.device)
            torch.set_rng_state(own["random"])
            if "random_cuda" in own:
                torch.cuda.set_rng_state(own["random_cuda"])
        except (CompressiveError, KeyError, TypeError, RuntimeError) as error:
            reason = " ".join(str(error).split())  # PyTorch's take several lines
            raise CompressiveError(f"{point.folder}: damaged checkpoint: {reason}") from None


def _check(model: CompressiveTransformer, corpus: Corpus, config: TrainConfig, processes: Processes) -> None:
    if corpus.vocab_size != model.config.vocab_size:
        raise CompressiveError(
            f"vocab_size ({model.config.vocab_size}) must be {corpus.vocab_size}, the number of ids of {corpus.path}"
        )
    parts = processes.world * config.accumulation
    if config.batch % parts:
        raise CompressiveError(
            f"batch ({config.batch}) must be a multiple of {parts}, the number of processes times accumulation"
        )


def _compare(folder: Path, part: str, stored: Any, now: Any) -> None:
    """Raise CompressiveError where a run would go on under other conditions than it began with."""
    if isinstance(now, dict) and isinstance(stored, dict):
        for name in sorted({*now, *stored}):
            _compare(folder, f"{part}.{name}", stored.get(name), now.get(name))
    elif stored != now:
        raise CompressiveError(
            f"{folder}: cannot resume, {part} was {stored!r} and is {now!r} now; set it back, or begin a new run"
        )
