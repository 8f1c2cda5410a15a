# Each target first makes what it needs, the virtual environment .venv included; what is up to date is left alone.

PYTHON ?= python3
# What pip installs as PyTorch if .venv holds none yet. Other builds: TORCH="torch --index-url <an index of PyTorch's>".
TORCH ?= torch==2.13.0

.PHONY: help demo test test-all lint types docs new-user bench bench-quick clean
.NOTPARALLEL:

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

demo: .venv/.core ## train a small model on the sample books and show what its memory does
	@.venv/bin/compressive demo --out demo/

# Two test processes share the cores; with more than one thread each they would wait for one another.
test: .venv/.dev ## run the tests but for the slow ones; warnings are errors
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 -m "not slow"

test-all: test ## run all tests, the slow ones too
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 -m slow

lint: .venv/.dev ## check format and style
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m ruff check .

types: .venv/.dev ## check the types of the package, strictly
	@.venv/bin/python -m mypy

# --fresh-env and --keep-going: each build reads all pages and shows every warning, and any of them is an error.
docs: .venv/.docs ## build the pages into site/; warnings are errors, and loads from elsewhere too
	@rm -rf site
	@.venv/bin/python -m sphinx -q --fail-on-warning --keep-going --fresh-env --doctree-dir site/.doctrees docs site
	@rm -rf site/.doctrees
	@.venv/bin/python docs/check_site.py site

new-user: ## from the built wheel to a model in transformers, in a fresh environment that is removed again
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/new-user

bench: .venv/.bench ## measure speed and memory against other packages and write the tables (25 minutes)
	@.venv/bin/python benchmarks/performance.py

bench-quick: .venv/.bench ## the same for the small work only, few repetitions (5 minutes); writes nothing
	@.venv/bin/python benchmarks/performance.py --quick

clean: ## remove the environment, the demo's output and all caches
	@rm -rf .venv demo site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests -name __pycache__ -prune -exec rm -rf {} +

# One stamp for each set of dependencies, newer than pyproject.toml once that set is installed.
.venv/.core .venv/.dev .venv/.docs .venv/.bench: .venv/.%: pyproject.toml
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/setup $*
