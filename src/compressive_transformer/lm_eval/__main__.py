"""`python -m compressive_transformer.lm_eval`: the harness's own command line, which then knows the model."""

from lm_eval.__main__ import cli_evaluate

from . import CompressiveLM as CompressiveLM

cli_evaluate()
