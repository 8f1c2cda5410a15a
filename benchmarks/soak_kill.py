"""Soak test: kill a training run at random times, and compare it with an undisturbed run, bit for bit.

    python benchmarks/soak_kill.py --kills 50 > benchmarks/soak_kill.json

Each kill is a SIGKILL of the whole process, at a moment drawn evenly from the time that a step, a validation or a
checkpoint takes; the same command then resumes. In the end parameters, moments, memory, random state, data position and
log must be those of the undisturbed run; the script fails where they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

CONFIG = """
[model]
d_model = 64
n_layers = 2
n_heads = 2
segment_length = 32
memory_length = 32
compressed_length = 32
dropout = 0.1

[train]
steps = 400
batch_size = 8
warmup_steps = 20
learning_rate = 1e-3
late_update_step = 100
late_steps_per_update = 3
log_every = 7
validate_every = 50
validation_tokens = 4_000
checkpoint_every = 7
"""
STEPS = 400


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "compressive_transformer.cli", *arguments]


def run(folder: Path, name: str, *, resume: bool) -> subprocess.Popen[bytes]:
    """Start or resume the run `name`."""
    arguments = ["train", str(folder / "config.toml"), str(folder / "data"), str(folder / name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    going_on = ["--resume", "latest"] if resume else []
    return subprocess.Popen(command(*arguments, *going_on), env=environment, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"soak: an undisturbed run failed: {errors.decode()}")


def step_of(run: Path) -> int:
    """Return the last step of the log."""
    if not (run / "log.jsonl").exists():
        return 0
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return max((int(line.split(",")[0].split(":")[1]) for line in lines if line.endswith("}")), default=0)


def killed(folder: Path, kills: int, draw: random.Random) -> tuple[list[dict[str, Any]], list[str]]:
    """Yield the moment of each kill and the differences to the undisturbed run; a new run follows a finished one."""
    target, met, found, resume = folder / "killed", [], [], False
    while len(met) < kills:
        # Past the start of Python and PyTorch, spread over what one life may do of the run.
        process, begun = run(folder, "killed", resume=resume), step_of(target)
        goal = begun + draw.randint(0, 2 * STEPS // kills)
        while process.poll() is None and step_of(target) <= goal:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.3))
        if process.poll() is not None:
            finish(process)
            found += differences(folder)
            shutil.rmtree(target)
            resume = False
            continue
        process.send_signal(signal.SIGKILL)
        process.wait()
        resume = any((target / "resume").glob("step-*"))
        writing = any((target / "resume").glob(".step-*")) or any(target.glob(".*"))
        met.append({"step": step_of(target), "while_writing": writing, "resumed_from_a_checkpoint": resume})
        if not resume:
            shutil.rmtree(target, ignore_errors=True)
        print(f"soak: kill {len(met)} at step {met[-1]['step']}", file=sys.stderr, flush=True)
    finish(run(folder, "killed", resume=resume))
    return met, found + differences(folder)


def differences(folder: Path) -> list[str]:
    """Return the differences between two runs."""
    found = []
    one, other = (sorted((folder / name / "resume").iterdir())[-1] for name in ("killed", "undisturbed"))
    for name in ("training.safetensors", "process-0.safetensors"):
        tensors, expected = load_file(one / name), load_file(other / name)
        if tensors.keys() != expected.keys():
            found.append(f"names in {name}")
        found += [f"{key} in {name}" for key in expected if not tensors[key].equal(expected[key])]
    if (one / "state.json").read_bytes() != (other / "state.json").read_bytes():
        found.append("state.json")
    logs = [
        [{**json.loads(line), "tokens_per_second": 0} for line in (folder / name / "log.jsonl").open(encoding="utf-8")]
        for name in ("killed", "undisturbed")
    ]
    if logs[0] != logs[1]:
        found.append("log.jsonl")
    if (folder / "killed/model.safetensors").read_bytes() != (folder / "undisturbed/model.safetensors").read_bytes():
        found.append("model.safetensors")
    return found


def main() -> None:
    """Prepare a corpus, train undisturbed, train with kills, compare, and print the results as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
        books = str(files("compressive_transformer.apps.demo") / "sample")
        subprocess.run(command("prepare", books, str(folder / "data")), check=True, stdout=sys.stderr)
        finish(run(folder, "undisturbed", resume=False))
        met, found = killed(folder, options.kills, random.Random(options.seed))
    report = {
        "command": f"python benchmarks/soak_kill.py --kills {options.kills} --seed {options.seed}",
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "steps": STEPS,
        "kills": len(met),
        "while_writing": sum(kill["while_writing"] for kill in met),
        "differences": found,
        "each": met,
    }
    print(json.dumps(report, indent=1))
    if found:
        sys.exit("soak: the run that was killed is not the undisturbed one")


if __name__ == "__main__":
    main()
