"""Description of the machine and the software of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import compressive_transformer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where everything is measured."""
PACKAGES = (
    "torch",
    "compressive-transformer",
    "compressive-transformer-pytorch",
    "mogrifier",
    "labml-nn",
    "labml",
    "labml-helpers",
    "x-transformers",
)


def conditions() -> dict[str, Any]:
    """Return commit, processor and versions."""
    return {
        "commit": commit(),
        **({"gpu": torch.cuda.get_device_name()} if DEVICE.type == "cuda" else {}),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def commit() -> str:
    """Return the commit of the imported package, with a + if files differ; empty outside of a checkout."""
    folder = Path(compressive_transformer.__file__).parent
    commands = (["git", "rev-parse", "--short=12", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        head, changed = (
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + "+" * bool(changed)


def cpu() -> str:
    """Return the name of the processor, or its architecture if unknown."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def wait() -> None:
    """Wait until the device has finished its work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def held(*, at_most: bool) -> int:
    """Return current or peak bytes of this process: of tensors on a GPU, otherwise resident memory by /proc.

    The ru_maxrss of getrusage is inherited from the parent, so it is not used.
    """
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() if at_most else torch.cuda.memory_allocated()
    field = "VmHWM" if at_most else "VmRSS"
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
