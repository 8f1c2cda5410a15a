"""One process's part of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from ..checkpoint import save
from ..config import TrainConfig
from ..config.toml import to_dict, with_defaults
from ..data import Corpus
from ..data.lanes import Lanes, Segment
from ..errors import CompressiveError
from ..evaluate import Evaluation, evaluate, truncate_split
from ..generate.stream import Stream
from ..model import CompressiveTransformer
from ..model.block import Block
from .counters import Counters, check_fits, check_same
from .distributed import Processes
from .log import Progress, Sums, cut_log, skip_line
from .optimizer import Optimizer, Update, steps_per_update
from .reports import Reports
from .reshard import memories_of, named_memories, own_state
from .resume import ResumePoint
from .shards import gathered, placed
from .signals import StopSignals
from .step import parallel_step, split_micro_batches
from .trackers import TrackerName, open_tracker

Resume = bool | int | Literal["if-any"]
"""Whether a run goes on: from its newest checkpoint, from that of a step, or from the newest if there is any."""


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
        check_fits(model, corpus, config, processes)
        self.config, self.corpus, self.out, self.processes = config, corpus, out, processes
        self.counters = Counters()
        self.processes_before = processes.world  # those of the checkpoint that the run goes on from
        self.model = model.to(processes.device).train()
        for block in cast(Iterable[Block], self.model.blocks):
            block.gradient_checkpointing, block.compiled = config.gradient_checkpointing, config.compile
        self.window = parallel_step(model, config, processes)
        self.segments = config.segments_of(model.config)
        self.optimizer = Optimizer(model, config)
        self.lanes = Lanes(
            corpus.train,
            batch_size=config.batch_size,
            length=model.config.segment_length,
            seed=config.seed,
            endless=True,
            max_document_length=config.max_document_length,
            rank=processes.rank,
            world=processes.world,
        )
        self.lanes_a_part = config.batch_size // processes.world // config.micro_batches
        self.memories = [model.empty_memory(self.lanes_a_part) for _ in range(config.micro_batches)]
        self.validation = self._validation()

    def begin(self, *, resume: Resume) -> None:
        """Make the run's folder, or take up what a checkpoint holds, as `train` describes."""
        torch.manual_seed(self.config.seed + self.processes.rank)
        point = self._point(resume)
        if point is not None:
            self._restore(point)
        self.processes.wait()
        if self.processes.is_main:
            self.out.mkdir(parents=True, exist_ok=True)
            cut_log(self.out / "log.jsonl", self.counters.step)

    def _point(self, resume: Resume) -> ResumePoint | None:
        """Where to go on from; None to begin."""
        if resume == "if-any":
            if ResumePoint.all_of(self.out):
                return ResumePoint.of(self.out)
            if (self.out / "log.jsonl").is_file():  # it ended before its first checkpoint
                return None
        elif resume is not False:
            return ResumePoint.of(self.out, None if resume is True else resume)
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise CompressiveError(
                f"{self.out}: exists already; choose another folder, or go on with that run by --resume"
            )
        return None

    def progress(self, last: int, tracker: TrackerName | None) -> Progress:
        """What the leading process writes to, up to step `last`."""
        step, settings = self.counters.step, {name: self._identity()[name] for name in ("model", "train")}
        opened = open_tracker(tracker, self.out, settings, step=step) if tracker else None
        return Progress(self.out, last, step=step, tracker=opened)

    def run(self, last: int, reports: Reports, stop: StopSignals) -> None:
        """Train up to and with step `last`, validating, sampling and writing checkpoints on the way."""
        config, sums, update, stopped = self.config, Sums(), None, False
        if self.processes_before != self.processes.world:
            now = {"before": self.processes_before, "now": self.processes.world}
            reports.write({"step": self.counters.step, "processes": now})
        while self.counters.step < last and not (stopped or reports.stopped):
            segments = [next(self.lanes) for _ in range(self.segments)]
            update = self.step(segments, sums) or update
            step = self.counters.step
            if update is not None and not update.finite:
                self._skip(update, segments[-1], reports)
                sums, update = Sums(), None  # their means would not be finite
            if sums.steps and (step % config.log_every == 0 or step == last):
                reports.write(self._entry(sums, update))
                sums, update = Sums(), None
            if config.validate_every and (step % config.validate_every == 0 or step == config.steps):
                reports.write({"step": step, "validation": self.validate().total.to_dict()})
            if config.sample_every and (step % config.sample_every == 0 or step == config.steps):
                reports.write({"step": step, "sample": self.sample()})
            stopped = self._stops(stop)
            if (stopped or reports.stopped) and sums.steps:  # they would be missing from the log
                reports.write(self._entry(sums, update))
            if step % config.checkpoint_every == 0 or step == last or stopped or reports.stopped:
                self.checkpoint()
        if stopped or stop.received is not None:  # also one that came while the last checkpoint was written
            raise KeyboardInterrupt(f"stopped after step {self.counters.step}, with a checkpoint to resume from")

    def step(self, segments: Sequence[Segment], sums: Sums) -> Update | None:
        """The next segments of each lane: forward, backward and, where its period ends, an update."""
        config, counters = self.config, self.counters
        period = steps_per_update(config, counters.step + 1)
        targets = sum(segment.total_targets for segment in segments)
        ends = counters.since_update + 1 >= period or counters.step + 1 == config.steps
        for index, part in enumerate(split_micro_batches(segments, config.micro_batches)):
            synchronised = ends and index == config.micro_batches - 1
            with self._gathering(synchronised):
                read = self.window(part, self.memories[index])
                # Means over all lanes of all processes, so that however they are split the update is the same.
                loss = read.nats * self.processes.world / max(targets, 1)
                loss = loss + read.compression_loss / config.micro_batches
                (loss / period).backward()
            self.memories[index] = read.memory
            sums.add(read, 1 / config.micro_batches)
        sums.targets += targets
        counters.step += 1
        counters.since_update += 1
        counters.tokens += targets
        if not ends:
            return None
        counters.since_update = 0
        update = self.optimizer.step(counters.step)
        counters.skipped += not update.finite
        counters.skipped_in_a_row = 0 if update.finite else counters.skipped_in_a_row + 1
        return update

    def _skip(self, update: Update, segment: Segment, reports: Reports) -> None:
        """Empty the memory of lanes in which it is not finite, and tell all that.

        Raises CompressiveError where too many updates in a row were skipped.
        """
        masks = [~memory.finite() for memory in self.memories]
        self.memories = [memory.reset(mask) for memory, mask in zip(self.memories, masks, strict=True)]
        bad = torch.cat(masks)
        # Of each lane of all processes 0, or one more than the number of the document that it reads.
        found = torch.zeros(self.processes.world, len(bad), dtype=torch.int64)
        found[self.processes.rank] = torch.where(bad, segment.documents + 1, 0)
        found = self.processes.total(found.to(self.processes.device)).flatten().cpu()
        lanes = {
            str(lane): self.corpus.train.documents[int(found[lane]) - 1].title
            for lane in found.nonzero().flatten().tolist()
        }
        # JSON has no such numbers.
        norms = {name: str(value) for name, value in update.to_dict().items() if name != "learning_rate"}
        skipped = {**norms, "lanes": lanes, "count": self.counters.skipped}
        reports.write({"step": self.counters.step, "skipped": skipped})
        most, in_a_row = self.config.max_skipped_updates, self.counters.skipped_in_a_row
        if in_a_row > most:
            raise CompressiveError(
                f"{self.out}: {in_a_row} updates in a row were skipped, more than max_skipped_updates ({most}): "
                f"{skip_line(skipped)}. The last checkpoint is as it was: go on from it by --resume, or begin anew "
                "with a smaller learning_rate or a larger warmup_steps"
            )

    def _stops(self, stop: StopSignals) -> bool:
        """Whether a signal ends the run now, the same in all processes."""
        if self.processes.world == 1:
            return stop.received is not None
        if self.counters.step % self.config.log_every:
            return False
        return bool(self.processes.total(torch.tensor(float(stop.received is not None), device=self.processes.device)))

    def validate(self) -> Evaluation:
        """The score on the validation split; the best model so far is kept as model.safetensors."""
        processes = self.processes
        batch_size = max(self.config.batch_size, processes.world)
        model = gathered(self.model)
        result = evaluate(model, self.validation, batch_size=batch_size, rank=processes.rank, world=processes.world)
        reached, best = result.total.bits_per_byte, self.counters.best
        if math.isfinite(reached) and (best is None or reached < best):
            self.counters.best = reached
            if processes.is_main:
                save(self.out, model, self.corpus.tokenizer)
        return result

    def sample(self) -> str:
        """Text that the model writes now, always from the same seed."""
        stream = Stream(gathered(self.model), self.corpus.tokenizer)
        return stream.write(self.config.sample_tokens, seed=self.config.seed)

    def checkpoint(self) -> None:
        """Write all that `begin(resume=True)` needs."""
        own = {**named_memories(self.memories), **self.optimizer.gradients(), "random": torch.get_rng_state()}
        if self.processes.device.type == "cuda":
            own["random_cuda"] = torch.cuda.get_rng_state()
        model = gathered(self.model)
        if self.processes.is_main and self.counters.best is None:
            save(self.out, model, self.corpus.tokenizer)
        parameters = {f"model.{name}": value for name, value in model.state_dict().items()}
        state = {
            "counters": asdict(self.counters),
            "lanes": self.lanes.state_dict(),
            "processes": self.processes.world,
            **self._identity(),
        }
        shared = {**parameters, **self.optimizer.state()}
        kept = self.config.keep_checkpoints
        ResumePoint.write(self.out, self.counters.step, self.processes, shared=shared, own=own, state=state, kept=kept)

    def _entry(self, sums: Sums, update: Update | None) -> dict[str, Any]:
        """A line of the log on the steps that `sums` holds."""
        counters, rates = self.counters, update.to_dict() if update else {}
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
        return truncate_split(split, self.corpus.tokenizer, limit) if limit else split

    def _identity(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        return {
            "model": to_dict(self.model.config),
            "train": to_dict(self.config),
            "corpus": self.corpus.fingerprint,
        }

    def _restore(self, point: ResumePoint) -> None:
        state = point.state()
        for part, config in (("model", self.model.config), ("train", self.config)):
            if isinstance(state.get(part), dict):
                state[part] = with_defaults(config, state[part])
        for part, now in self._identity().items():
            check_same(point.folder, part, state.get(part), now)
        try:
            self.processes_before = state["processes"]
            shared = point.shared()
            own = own_state(point, self.processes_before, parts=self.config.micro_batches, processes=self.processes)
            parameters = {k.removeprefix("model."): v for k, v in shared.items() if k.startswith("model.")}
            current = self.model.state_dict()
            self.model.load_state_dict({k: placed(v, current[k]) if k in current else v for k, v in parameters.items()})
            self.optimizer.restore({**shared, **own})
            self.counters = Counters(**state["counters"])
            if self.counters.step != point.step:
                raise CompressiveError(f"it counts {self.counters.step} steps")
            self.lanes.load_state_dict(state["lanes"])
            memories = memories_of(own, self.config.micro_batches)
            for at, memory in enumerate(memories):
                self.memories[at] = memory.to(self.processes.device)
                self.model.check_memory(self.memories[at], self.lanes_a_part)
            if "random" in own:
                torch.set_rng_state(own["random"])
            if "random_cuda" in own:
                torch.cuda.set_rng_state(own["random_cuda"])
        except (CompressiveError, KeyError, TypeError, RuntimeError) as error:
            reason = " ".join(str(error).split())  # PyTorch's take several lines
            raise CompressiveError(f"{point.folder}: damaged checkpoint: {reason}") from None
