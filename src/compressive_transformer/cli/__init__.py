"""The command `compressive`: each sub-command parses, calls one public function and prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import tyro

from ..errors import CompressiveError
from .compare import compare
from .describe import describe
from .experiment import experiment
from .export import export
from .inspect import inspect
from .making import demo, prepare, train
from .plugin import take_plugins
from .recall import recall
from .score import score
from .serve import serve
from .using import evaluate, generate, sweep

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
            args=take_plugins(sys.argv[1:]),
            description="Language models whose memory compresses instead of forgetting (Rae et al. 2019).\n\n"
            "compressive --plugin FILE.py COMMAND ... runs a Python file first, to register compression functions.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except CompressiveError as error:
        sys.exit(f"compressive: {error}")
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        sys.exit(f"compressive: {error.filename or 'file system'}: {error.strerror}")
    except KeyboardInterrupt as stop:
        sys.exit(
            f"compressive: {str(stop) or 'interrupted'}; `compressive train --resume latest` continues from the last "
            "checkpoint, and `compressive prepare` where it says so"
        )
