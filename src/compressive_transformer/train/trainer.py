"""Training loop of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

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
from .distributed import Processes, distribute_like, unshard
from .log import Averages, Log, truncate_log
from .optimizer import Optimizer, Update, steps_per_update
from .resume import Counters, Resume, ResumePoint, TrainState, find_resume_point
from .signals import StopSignals
from .skips import check_skips, reset_lanes
from .step import parallel_window, split_micro_batches


class Trainer:
    """Training run, as one process of it sees it: its lanes and their memory, the model and the optimizer."""

    def __init__(
        self, model: CompressiveTransformer, corpus: Corpus, config: TrainConfig, out: Path, processes: Processes
    ) -> None:
        _check_fits(model, corpus, config, processes)
        self.config, self.corpus, self.out, self.processes = config, corpus, out, processes
        self.counters, self.averages = Counters(), Averages()
        self.world_before = processes.world  # number of processes of the checkpoint that the run resumes from
        self.model = model.to(processes.device).train()
        self.model.gradient_checkpointing = int(config.gradient_checkpointing)
        for block in cast(Iterable[Block], self.model.blocks):
            block.compiled = config.compile
        self.window = parallel_window(model, config, processes)
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
        self.micro_batch_size = config.batch_size // processes.world // config.micro_batches
        self.memories = [model.empty_memory(self.micro_batch_size) for _ in range(config.micro_batches)]
        self.validation = _validation_split(corpus, config)

    def begin(self, resume: Resume = None) -> None:
        """Create the run's folder, or restore a checkpoint of it, as `train` describes."""
        torch.manual_seed(self.config.seed + self.processes.rank)
        point = find_resume_point(self.out, resume)
        if point is not None:
            self._check_settings(point)
            with point.reading():
                self._restore(TrainState.from_files(point, self.processes, micro_batches=self.config.micro_batches))
        self.processes.barrier()
        if self.processes.is_main:
            self.out.mkdir(parents=True, exist_ok=True)
            truncate_log(self.out / "log.jsonl", self.counters.step)

    def run(self, last: int, log: Log, stop: StopSignals) -> None:
        """Train through step `last`; validate, sample and write checkpoints on the way.

        Raises KeyboardInterrupt if a signal stopped the run, and CompressiveError if too many updates were skipped.
        """
        config, interrupted = self.config, False
        if self.world_before != self.processes.world:
            worlds = {"before": self.world_before, "now": self.processes.world}
            log.write({"step": self.counters.step, "processes": worlds})
        while self.counters.step < last and not (interrupted or log.stopped):
            self.step(log)
            step = self.counters.step
            if due(step, config.log_every, last):
                self._log_losses(log)
            if due(step, config.validate_every, config.steps):
                log.write({"step": step, "validation": self.validate().total.to_dict()})
            if due(step, config.sample_every, config.steps):
                log.write({"step": step, "sample": self.sample()})
            interrupted = self._interrupted(stop)
            if interrupted or log.stopped:
                self._log_losses(log)  # of the steps since the last line
            if interrupted or log.stopped or due(step, config.checkpoint_every, last):
                self.checkpoint()
        if interrupted or stop.received is not None:  # also one that came while the last checkpoint was written
            raise KeyboardInterrupt(f"stopped after step {self.counters.step}, with a checkpoint to resume from")

    def step(self, log: Log) -> None:
        """Train on the next segments of each lane; a non-finite update is skipped and logged."""
        segments = [next(self.lanes) for _ in range(self.segments)]
        update = self._forward_backward(segments)
        if update is None:
            return
        self.averages.update = update
        if update.finite:
            self.counters.skipped_in_a_row = 0
        else:
            self._skip(update, segments[-1], log)

    def _forward_backward(self, segments: Sequence[Segment]) -> Update | None:
        """Accumulate the gradients of a step, and update the parameters if the step completes an update."""
        config, counters = self.config, self.counters
        period = steps_per_update(config, counters.step + 1)
        targets = sum(segment.total_targets for segment in segments)
        ends = counters.since_update + 1 >= period or counters.step + 1 == config.steps
        for index, micro_batch in enumerate(split_micro_batches(segments, config.micro_batches)):
            with self._synchronize(ends and index == config.micro_batches - 1):
                losses = self.window(micro_batch, self.memories[index])
                # Means over all lanes of all processes, so that the update does not depend on how they are split.
                loss = losses.nats * self.processes.world / max(targets, 1)
                loss = loss + losses.compression_loss / config.micro_batches
                (loss / period).backward()
            self.memories[index] = losses.memory
            self.averages.add(losses, 1 / config.micro_batches)
        self.averages.targets += targets
        counters.step += 1
        counters.since_update += 1
        counters.tokens += targets
        if not ends:
            return None
        counters.since_update = 0
        return self.optimizer.step(counters.step)

    def _skip(self, update: Update, segment: Segment, log: Log) -> None:
        counters = self.counters
        counters.skipped += 1
        counters.skipped_in_a_row += 1
        self.averages = Averages()  # the means would not be finite
        self.memories, lanes = reset_lanes(self.memories, segment, self.corpus.train, self.processes)
        # JSON has no such numbers.
        norms = {name: str(value) for name, value in update.to_dict().items() if name != "learning_rate"}
        skipped = {**norms, "lanes": lanes, "count": counters.skipped}
        log.write({"step": counters.step, "skipped": skipped})
        check_skips(self.out, counters.skipped_in_a_row, self.config.max_skipped_updates, skipped)

    def _log_losses(self, log: Log) -> None:
        """Log the means over the steps since the last line, if there are any."""
        if self.averages.steps:
            counters, means = self.counters, self.averages.entry(self.processes)
            log.write({"step": counters.step, "tokens": counters.tokens, **means})
            self.averages = Averages()

    def _interrupted(self, stop: StopSignals) -> bool:
        """Return True if a signal stops the run now, the same in all processes."""
        if self.processes.world > 1 and not due(self.counters.step, self.config.log_every):
            return False
        return self.processes.any(stop.received is not None)

    def validate(self) -> Evaluation:
        """Score the validation split, and save the model if it is the best so far."""
        model, processes, size = unshard(self.model), self.processes, self.config.batch_size
        result = evaluate(model, self.validation, batch_size=size, rank=processes.rank, world=processes.world)
        score, best = result.total.bits_per_byte, self.counters.best
        if math.isfinite(score) and (best is None or score < best):
            self.counters.best = score
            if processes.is_main:
                save(self.out, model, self.corpus.tokenizer)
        return result

    def sample(self) -> str:
        """Return text generated by the current model, always from the same seed."""
        stream = Stream(unshard(self.model), self.corpus.tokenizer)
        return stream.write(self.config.sample_tokens, seed=self.config.seed)

    def checkpoint(self) -> None:
        """Write a checkpoint from which `begin` restores this run; without validation, save the model too."""
        model = unshard(self.model)
        if self.processes.is_main and self.counters.best is None:
            save(self.out, model, self.corpus.tokenizer)
        parameters = {f"model.{name}": value for name, value in model.state_dict().items()}
        state = TrainState(
            counters=self.counters,
            lanes=self.lanes.state_dict(),
            shared={**parameters, **self.optimizer.state()},
            memories=self.memories,
            local={**self.optimizer.gradients(), **_rng_state(self.processes.device)},
            world=self.processes.world,
        )
        state.to_files(self.out, self.processes, self.settings(), keep=self.config.keep_checkpoints)

    def _restore(self, state: TrainState) -> None:
        parameters = {k.removeprefix("model."): v for k, v in state.shared.items() if k.startswith("model.")}
        like = self.model.state_dict()
        self.model.load_state_dict({k: distribute_like(v, like[k]) if k in like else v for k, v in parameters.items()})
        self.optimizer.restore({**state.shared, **state.local})
        self.counters, self.world_before = state.counters, state.world
        self.lanes.load_state_dict(state.lanes)
        self.memories = [memory.to(self.processes.device) for memory in state.memories]
        for memory in self.memories:
            self.model.check_memory(memory, self.micro_batch_size)
        _set_rng_state(state.local)

    def settings(self) -> dict[str, Any]:
        """Return what must be the same when the run is resumed: configs and the fingerprint of the corpus."""
        return {
            "model": to_dict(self.model.config),
            "train": to_dict(self.config),
            "corpus": self.corpus.fingerprint,
        }

    def _check_settings(self, point: ResumePoint) -> None:
        state = point.state()
        for name, config in (("model", self.model.config), ("train", self.config)):
            if isinstance(state.get(name), dict):
                state[name] = with_defaults(config, state[name])
        for name, value in self.settings().items():
            _check_same(point.folder, name, state.get(name), value)

    def _synchronize(self, wanted: bool) -> AbstractContextManager[None]:
        """Return a context in which a backward pass averages gradients over processes only if `wanted`."""
        if isinstance(self.window, nn.parallel.DistributedDataParallel) and not wanted:
            return self.window.no_sync()
        return nullcontext()


def due(step: int, every: int, last: int | None = None) -> bool:
    """Return True if something that is done every `every` steps, and at step `last`, is done at `step`; 0 for never."""
    return bool(every) and (step % every == 0 or step == last)


def _check_fits(model: CompressiveTransformer, corpus: Corpus, config: TrainConfig, processes: Processes) -> None:
    if corpus.vocab_size != model.config.vocab_size:
        raise CompressiveError(
            f"vocab_size ({model.config.vocab_size}) must be {corpus.vocab_size}, the number of ids of {corpus.path}"
        )
    groups = processes.world * config.micro_batches
    if config.batch_size % groups:
        raise CompressiveError(
            f"batch_size ({config.batch_size}) must be a multiple of {groups}, processes times micro_batches"
        )


def _check_same(folder: Path, name: str, stored: Any, now: Any) -> None:
    """Raise CompressiveError if a run would be resumed with other settings than it was started with."""
    if isinstance(now, dict) and isinstance(stored, dict):
        for field in sorted({*now, *stored}):
            _check_same(folder, f"{name}.{field}", stored.get(field), now.get(field))
    elif stored != now:
        raise CompressiveError(
            f"{folder}: cannot resume, {name} was {stored!r} and is {now!r} now; set it back, or start a new run"
        )


def _validation_split(corpus: Corpus, config: TrainConfig) -> Any:
    if not config.validate_every:
        return None
    split, limit = corpus.validation, config.validation_tokens
    return truncate_split(split, corpus.tokenizer, limit) if limit else split


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    cuda = {"random_cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {}
    return {"random": torch.get_rng_state(), **cuda}


def _set_rng_state(tensors: Mapping[str, Tensor]) -> None:
    if "random" in tensors:
        torch.set_rng_state(tensors["random"])
    if "random_cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random_cuda"])
