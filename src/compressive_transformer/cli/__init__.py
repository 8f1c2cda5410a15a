"""The command `compressive`: each sub-command parses its arguments, calls one public function and prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import tyro

from ..errors import CompressiveError
from ._common import run_plugins
from .compare import compare
from .demo import demo
from .describe import describe
from .evaluate import evaluate
from .experiment import experiment
from .export import export
from .generate import generate
from .inspect import inspect
from .prepare import prepare
from .recall import recall
from .score import score
from .serve import serve
from .sweep import sweep
from .train import train

COMMANDS: dict[str, Callable[..., None]] = {
    "prepare": prepare,
    "train": train,
    "evaluate": evaluate,
    "sweep": sweep,
    "recall": recall,
    "compare": compare,
    "generate": generate,
    "score": score,
    "inspect": inspect,
    "serve": serve,
    "export": export,
    "describe": describe,
    "experiment": experiment,
    "demo": demo,
}


def main() -> None:
    """Run the command line; exit 0 when done, 1 with one line when it failed, 2 on wrong usage."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="compressive",
            args=run_plugins(sys.argv[1:]),
            description="Language models whose memory compresses instead of forgetting (Rae et al. 2019).\n\n"
            "compressive --plugin FILE.py COMMAND ... runs a Python file first, to register compression functions.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except CompressiveError as error:
        sys.exit(f"compressive: {error}")
    except BrokenPipeError:  # stdout was closed, as by `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        sys.exit(f"compressive: {error.filename or 'file system'}: {error.strerror}")
    except KeyboardInterrupt as stop:
        sys.exit(
            f"compressive: {str(stop) or 'interrupted'}; `compressive train --resume latest` continues from the last "
            "checkpoint, and the same `compressive prepare` continues where it says so"
        )
