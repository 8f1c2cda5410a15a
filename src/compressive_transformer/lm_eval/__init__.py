"""The model of lm-evaluation-harness (extra `eval`): its tasks, scored with memory over the whole document.

Importing this module registers the model `compressive`. `TASKS` is the folder of the task `pg19`, which scores books of
a folder of your own; pass it as `include_path`.
"""

from importlib.util import find_spec
from pathlib import Path

from ..errors import CompressiveError

if find_spec("lm_eval") is None:
    raise CompressiveError(
        "compressive_transformer.lm_eval needs lm-evaluation-harness: pip install 'compressive-transformer[eval]'"
    )

from .language_model import CompressiveLM

__all__ = ["TASKS", "CompressiveLM"]

TASKS = Path(__file__).parent
