"""Time of `import compressive_transformer` beside `import torch`, in fresh processes in turn.

    python benchmarks/importing.py

Prints the ratio, which should be at most 1.3, and the part of the package; writes nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys

from timing import Spread, ratio, say

WANTED = 1.3
TORCH, OURS = "import torch", "import compressive_transformer"


def cpu_seconds(code: str) -> float:
    """Return CPU seconds of a fresh process that runs `code`, so that other load does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # With bytecode from the processes before, as where a package is installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of both imports in each round but the first, which writes bytecode."""
    seconds: dict[str, list[float]] = {TORCH: [], OURS: []}
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}")
        for code, taken in seconds.items():
            taken.append(cpu_seconds(code))
    return {code: taken[1:] for code, taken in seconds.items()}


def report(seconds: dict[str, list[float]]) -> str:
    """Return a line with the ratio by round, and both times."""
    against = ratio(seconds[OURS], seconds[TORCH])
    torch, ours = (Spread.of(seconds[code]).median for code in (TORCH, OURS))
    return (
        f"{OURS} takes {against.median:.2f} times {TORCH} ({against.low:.2f} to {against.high:.2f}; wanted: at most "
        f"{WANTED}); {ours:.2f} and {torch:.2f} processor seconds"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="fresh processes of each that count")
    print(report(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
