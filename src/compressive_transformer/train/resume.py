"""Checkpoints to resume from: the training state of a run, one folder a step."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint import FORMAT, check_format, load_tensors, read_json, save_tensors, sha256, write_json
from ..errors import CompressiveError
from ..files import atomic_file, flush_folder
from .distributed import Processes

SUMS = "SHA256SUMS"
"""Checksums of a checkpoint's files, as `sha256sum --check` reads them."""
NAMED = re.compile(r"step-[0-9]+")


class ResumePoint:
    """One checkpoint to resume from, `resume/step-N/`: shared state once, and the own state of each process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def step(self) -> int:
        """The step after which it was written, by its name."""
        return int(self.folder.name.removeprefix("step-"))

    @classmethod
    def all_of(cls, run: Path) -> list[ResumePoint]:
        """Those of a run, the newest last; a copy under another name is its owner's affair."""
        folders = [folder for folder in (run / "resume").glob("step-*") if NAMED.fullmatch(folder.name)]
        return sorted(map(cls, folders), key=lambda point: point.step)

    @classmethod
    def of(cls, run: Path, step: int | None = None) -> ResumePoint:
        """That of a step, or the newest one, its files checked.

        Raises CompressiveError where there is none, and where a file is not as it was written.
        """
        found = cls.all_of(run)
        if not found:
            raise CompressiveError(
                f"{run}: nothing to resume, no checkpoint was written there; train without --resume to begin"
            )
        wanted = [point for point in found if step in (None, point.step)]
        if not wanted:
            steps = ", ".join(str(point.step) for point in found)
            raise CompressiveError(f"{run}: no checkpoint of step {step}; there are those of steps {steps}")
        point = wanted[-1]
        earlier = [other.step for other in found if other.step < point.step]
        way_out = f"go on from the one before, --resume-from {earlier[-1]}" if earlier else "there is none before it"
        point._check_sums(way_out)
        return point

    def _check_sums(self, way_out: str) -> None:
        """Raise CompressiveError where a file is not as it was written."""
        listed = self.folder / SUMS
        if not listed.exists():  # earlier versions wrote none
            return
        lines = [line.split("  ", 1) for line in listed.read_text(encoding="utf-8", errors="replace").splitlines()]
        for line in lines:
            path = self.folder / Path(line[-1]).name  # a list cannot lead out of the folder
            if len(line) != 2 or not path.is_file() or sha256(path) != line[0]:
                raise CompressiveError(f"{path}: damaged, its checksum is not that of {SUMS}; {way_out}")

    @staticmethod
    def write(
        run: Path,
        step: int,
        processes: Processes,
        *,
        shared: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        state: Mapping[str, Any],
        kept: int,
    ) -> None:
        """Write the point of `step` as a whole, then remove others but the `kept` newest. All processes call this.

        `shared` tensors and `state` are those of the leading process, `own` tensors those of each. Points of later
        steps belong to a run that was resumed further back, and go.
        """
        folder = run / "resume" / f"step-{step:09d}"
        partial = folder.with_name(f".{folder.name}.partial")
        try:
            if processes.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            processes.wait()
            save_tensors(partial / f"process-{processes.rank}.safetensors", own)
            processes.wait()
            if processes.is_main:
                save_tensors(partial / "training.safetensors", shared)
                write_json(partial / "state.json", {"format": FORMAT, **state})
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
            others = [point for point in ResumePoint.all_of(run) if point.step != step]
            before = [point for point in others if point.step < step]
            for point in others:
                if point not in before[max(0, len(before) - kept + 1) :]:
                    shutil.rmtree(point.folder)
        processes.wait()

    def state(self) -> dict[str, Any]:
        """What `write` was given as `state`."""
        state = read_json(self.folder / "state.json")
        check_format(self.folder / "state.json", state)
        return state

    def shared(self) -> dict[str, Tensor]:
        """Parameters and optimizer state."""
        return load_tensors(self.folder / "training.safetensors")

    def process(self, rank: int) -> dict[str, Tensor]:
        """Memory, accumulated gradients and random state of one process."""
        return load_tensors(self.folder / f"process-{rank}.safetensors")
