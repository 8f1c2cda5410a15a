"""`python -m compressive_transformer.cli`, which `torchrun` starts in each process."""

from . import main

main()
