"""`python -m compressive_transformer.lm_eval`: the command line of the harness, with the model registered."""

from lm_eval.__main__ import cli_evaluate

from . import CompressiveLM as CompressiveLM

cli_evaluate()
