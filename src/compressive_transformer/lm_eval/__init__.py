"""The model of lm-evaluation-harness (extra `eval`): its tasks, scored with memory over the whole document.

Importing this registers the model `compressive` with the harness. `TASKS` is the folder of the task `pg19`, books of a
folder of your own; the harness takes it as `include_path`.
"""

from importlib.util import find_spec
from pathlib import Path

from ..errors import CompressiveError

if find_spec("lm_eval") is None:
    raise CompressiveError("this needs lm-evaluation-harness: pip install 'compressive-transformer[eval]'")

from .language_model import CompressiveLM

__all__ = ["TASKS", "CompressiveLM"]

TASKS = Path(__file__).parent
