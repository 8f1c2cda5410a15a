"""Profile of a training step by operation.

    PYTHONPATH=EARLIER/src python benchmarks/profiling.py

`performance.py` takes such a profile each time. This takes one of an earlier version, checked out in another folder, to
profile-before.json, and the page shows both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from compressive_transformer.checkpoint import write_json
from contenders import Ours
from machine import DEVICE, conditions, wait
from works import WORKS

BEFORE = Path(__file__).parent / "profile-before.json"


def profile_training(name: str = "S", steps: int = 2, rows: int = 10) -> dict[str, Any]:
    """Return the operations with the largest self time in training steps on one thread, as shares."""
    torch.set_num_threads(1)
    contender = Ours(WORKS[name])
    contender.train()
    activity = ProfilerActivity.CPU if DEVICE.type == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        for _ in range(steps):
            contender.train()
        wait()
    events = profiler.key_averages()
    took = {event: event.self_cpu_time_total or event.self_device_time_total for event in events}
    total = sum(took.values())
    operations = [
        {"name": event.key, "share": took[event] / total, "calls": event.count / steps}
        for event in sorted(events, key=lambda event: -took[event])[:rows]
    ]
    return {"work": name, "threads": 1, "seconds_a_step": total / steps / 1e6, "operations": operations}


def main() -> None:
    """Profile and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=BEFORE, help="the JSON to write")
    write_json(parser.parse_args().out, {"made": conditions(), "profile": profile_training()})


if __name__ == "__main__":
    main()
