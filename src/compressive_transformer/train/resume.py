"""Checkpoints to resume from: the state of a training run, one folder per step."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..checkpoint import FORMAT, check_format, load_tensors, read_json, save_tensors, sha256, write_json
from ..config import check_range, check_types
from ..errors import CompressiveError
from ..files import atomic_file, flush_folder
from ..memory import Memory, join
from .distributed import Processes

Resume = Literal["latest", "if-any"] | int | None
"""Checkpoint that a run resumes from: the latest, the latest if there is any, that of a step; None to start a run."""
SUMS = "SHA256SUMS"
"""Checksums of a checkpoint's files, in the format of `sha256sum --check`."""
NAMED = re.compile(r"step-[0-9]+")


@dataclass
class Counters:
    """Progress of a run."""

    step: int = 0
    since_update: int = 0
    tokens: int = 0
    """Targets trained on, over all processes."""
    best: float | None = None
    """Fewest bits per byte at a validation."""
    skipped: int = 0
    """Updates skipped because gradients were not finite."""
    skipped_in_a_row: int = 0
    """Updates skipped since the last update."""

    def __post_init__(self) -> None:
        check_types(self)  # they may come from a damaged file
        check_range(self, ("step", "since_update", "tokens", "skipped", "skipped_in_a_row"), low=0)
        if self.best is not None and not (isinstance(self.best, float) and math.isfinite(self.best)):
            raise CompressiveError(f"best ({self.best!r}) must be a number, or none")


class ResumePoint:
    """One checkpoint, the folder `resume/step-N/` of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def step(self) -> int:
        """Step after which it was written, from its name."""
        return int(self.folder.name.removeprefix("step-"))

    @classmethod
    def find_all(cls, run: Path) -> list[ResumePoint]:
        """Return the checkpoints of a run, the latest last; folders with other names are ignored."""
        folders = [folder for folder in (run / "resume").glob("step-*") if NAMED.fullmatch(folder.name)]
        return sorted(map(cls, folders), key=lambda point: point.step)

    @classmethod
    def find(cls, run: Path, step: int | None = None) -> ResumePoint:
        """Return the checkpoint of a step, or the latest, with its files verified.

        Raises CompressiveError if there is none, or if a file differs from its checksum.
        """
        points = cls.find_all(run)
        if not points:
            raise CompressiveError(f"{run}: nothing to resume, no checkpoint was written there; train without --resume")
        matching = [point for point in points if step in (None, point.step)]
        if not matching:
            steps = ", ".join(str(point.step) for point in points)
            raise CompressiveError(f"{run}: no checkpoint of step {step}; there are those of steps {steps}")
        point = matching[-1]
        earlier = [other.step for other in points if other.step < point.step]
        point._verify(f"resume from the one before, --resume {earlier[-1]}" if earlier else "there is none before it")
        return point

    def _verify(self, way_out: str) -> None:
        listed = self.folder / SUMS
        if not listed.exists():  # earlier versions wrote none
            return
        lines = [line.split("  ", 1) for line in listed.read_text(encoding="utf-8", errors="replace").splitlines()]
        for line in lines:
            path = self.folder / Path(line[-1]).name  # a list cannot lead out of the folder
            if len(line) != 2 or not path.is_file() or sha256(path) != line[0]:
                raise CompressiveError(f"{path}: damaged, its checksum differs from that in {SUMS}; {way_out}")

    def state(self) -> dict[str, Any]:
        """Return state.json: counters, position in the data, configs. Raises CompressiveError if it is damaged."""
        state = read_json(self.folder / "state.json")
        check_format(self.folder / "state.json", state)
        return state

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Raise what goes wrong inside as one CompressiveError that names the checkpoint."""
        try:
            yield
        except (CompressiveError, KeyError, TypeError, RuntimeError) as error:
            reason = " ".join(str(error).split())  # PyTorch's take several lines
            raise CompressiveError(f"{self.folder}: damaged checkpoint: {reason}") from None


def find_resume_point(run: Path, resume: Resume) -> ResumePoint | None:
    """Return the checkpoint that `resume` asks for; None to start a run in the folder.

    Raises CompressiveError if there is no such checkpoint, or if a run is started in a folder that is not empty.
    """
    if resume not in ("latest", "if-any", None) and type(resume) is not int:
        raise CompressiveError(f"resume ({resume!r}) must be 'latest', 'if-any', a step or None")
    if not (resume is None or (resume == "if-any" and not ResumePoint.find_all(run))):
        return ResumePoint.find(run, resume if isinstance(resume, int) else None)
    ended_early = resume == "if-any" and (run / "log.jsonl").is_file()  # before its first checkpoint
    if run.exists() and not ended_early and (not run.is_dir() or any(run.iterdir())):
        raise CompressiveError(f"{run}: exists already; choose another folder, or resume it with --resume latest")
    return None


@dataclass(frozen=True, eq=False)
class TrainState:
    """State of one process of a run after a step."""

    counters: Counters
    lanes: Mapping[str, Any]
    """Position in the data, `Lanes.state_dict`."""
    shared: Mapping[str, Tensor]
    """Parameters ("model.NAME") and optimizer state, the same in all processes."""
    memories: Sequence[Memory]
    """Memory of each micro-batch of this process."""
    local: Mapping[str, Tensor]
    """Accumulated gradients ("gradient.NAME") and RNG state of this process."""
    world: int
    """Number of processes."""

    def to_files(self, run: Path, processes: Processes, settings: Mapping[str, Any], *, keep: int) -> None:
        """Write a checkpoint atomically and remove all but the `keep` latest. All processes call this.

        Tensors of `shared`, counters, lanes and `settings` are those of rank 0. Checkpoints of later steps are removed
        too: they are left from a run that was resumed further back.
        """
        folder = run / "resume" / f"step-{self.counters.step:09d}"
        partial = folder.with_name(f".{folder.name}.partial")
        try:
            if processes.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            processes.barrier()
            local = {**named_memories(self.memories), **self.local}
            save_tensors(partial / f"process-{processes.rank}.safetensors", local)
            processes.barrier()
            if processes.is_main:
                save_tensors(partial / "training.safetensors", self.shared)
                counters = {"counters": asdict(self.counters), "lanes": self.lanes, "processes": self.world}
                write_json(partial / "state.json", {"format": FORMAT, **counters, **settings})
                sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(partial.iterdir())]
                with atomic_file(partial / SUMS) as temporary:
                    temporary.write_text("".join(sums), encoding="utf-8")
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if processes.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # left from a run that was resumed further back
            partial.rename(folder)
            flush_folder(folder.parent)
            _remove_others(run, self.counters.step, keep)
        processes.barrier()

    @classmethod
    def from_files(cls, point: ResumePoint, processes: Processes, *, micro_batches: int) -> TrainState:
        """Read the share of this process of a checkpoint, which may be of another number of processes.

        Raises CompressiveError or KeyError if the checkpoint is damaged.
        """
        state = point.state()
        counters, world = Counters(**state["counters"]), state["processes"]
        if counters.step != point.step:
            raise CompressiveError(f"it counts {counters.step} steps")
        if type(world) is not int or world < 1:
            raise CompressiveError(f"it is of {world!r} processes")
        ranks = [processes.rank] if world == processes.world else range(world)
        local = [load_tensors(point.folder / f"process-{rank}.safetensors") for rank in ranks]
        if world != processes.world:
            local = [reshard(local, micro_batches=micro_batches, rank=processes.rank, world=processes.world)]
        return cls(
            counters=counters,
            lanes=state["lanes"],
            shared=load_tensors(point.folder / "training.safetensors"),
            memories=memories_from(local[0], micro_batches),
            local=local[0],
            world=world,
        )


def _remove_others(run: Path, step: int, keep: int) -> None:
    others = [point for point in ResumePoint.find_all(run) if point.step != step]
    before = [point for point in others if point.step < step]
    for point in others:
        if point not in before[max(0, len(before) - keep + 1) :]:
            shutil.rmtree(point.folder)


def named_memories(memories: Sequence[Memory]) -> dict[str, Tensor]:
    """Return the tensors of the memories of micro-batches by name, for `memories_from`."""
    return {
        f"memory-{index}.{name}": tensor
        for index, memory in enumerate(memories)
        for name, tensor in memory.state_dict().items()
    }


def memories_from(tensors: Mapping[str, Tensor], micro_batches: int) -> list[Memory]:
    """Return the memories that `named_memories` named. Raises CompressiveError if tensors are missing."""
    memories = []
    for index in range(micro_batches):
        prefix = f"memory-{index}."
        named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        memories.append(Memory.from_state_dict(named))
    return memories


def reshard(states: Sequence[Mapping[str, Tensor]], *, micro_batches: int, rank: int, world: int) -> dict[str, Tensor]:
    """Return the local state of process `rank` of `world`, from the local states of another number of processes.

    Every lane keeps its memory: lanes stay in order and are split into `micro_batches` per process. An update averages
    gradients over processes, so each process gets the mean of what was accumulated. RNG states are dropped.

    Raises CompressiveError if the lanes cannot be split evenly.
    """
    memory = join([memory for state in states for memory in memories_from(state, micro_batches)])
    if memory.batch_size % (world * micro_batches):
        raise CompressiveError(
            f"its {memory.batch_size} lanes cannot be split into {world * micro_batches} equal parts"
        )
    lanes = torch.arange(memory.batch_size).chunk(world * micro_batches)
    indices = range(rank * micro_batches, (rank + 1) * micro_batches)
    tensors = named_memories([memory.select(lanes[index]) for index in indices])
    for name in {name for state in states for name in state if name.startswith("gradient.")}:
        # A process whose lanes evicted nothing has no gradient of f_c.
        tensors[name] = torch.stack([state[name] for state in states if name in state]).sum(0) / len(states)
    return tensors
