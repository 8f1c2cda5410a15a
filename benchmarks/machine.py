"""What a measurement was made on and with."""

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
    """Commit, processor and versions."""
    return {
        "commit": commit(),
        **({"gpu": torch.cuda.get_device_name()} if DEVICE.type == "cuda" else {}),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def commit() -> str:
    """The commit of the package that is imported, with a + where files differ; empty outside of a checkout."""
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
    """The processor's name where the system tells it, else its kind."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def wait() -> None:
    """Until the device has done what it was told; a CPU always has."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def held(*, at_most: bool) -> int:
    """Bytes that this process holds now, or held at most: of tensors on a GPU, else of all as /proc says.

    Not the ru_maxrss of getrusage, which a child takes over from its parent.
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
