# Targets create what they need, the virtual environment .venv included.

PYTHON ?= python3
# The PyTorch that pip installs if .venv has none. Other builds: TORCH="torch --index-url <an index of PyTorch's>".
TORCH ?= torch==2.13.0

.PHONY: help demo test test-all lint types docs new-user bench bench-quick clean
.NOTPARALLEL:

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

demo: .venv/.core ## train two small models on the sample books and compare them
	@.venv/bin/compressive demo --out demo/

# One thread per test process: two processes share the cores.
test: .venv/.dev ## run the tests except slow ones; warnings are errors
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 -m "not slow"

test-all: test ## run all tests, and more damaged files
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 -m slow
	@OMP_NUM_THREADS=1 HOSTILE_EXAMPLES=40 .venv/bin/python -m pytest -q -n 2 tests/test_hostile.py

lint: .venv/.dev ## check format and style (ruff)
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m ruff check .

types: .venv/.dev ## check the types of the package (mypy, strict)
	@.venv/bin/python -m mypy

# --fresh-env and --keep-going: each build reads all pages and shows all warnings, which are errors.
docs: .venv/.docs ## build the site in site/; warnings, dead links and external resources are errors
	@rm -rf site
	@.venv/bin/python -m sphinx -q --fail-on-warning --keep-going --fresh-env --doctree-dir site/.doctrees docs site
	@rm -rf site/.doctrees
	@.venv/bin/python docs/check_site.py site

new-user: ## test the path of a new user, from the wheel to transformers, in a temporary environment
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/new-user

bench: .venv/.bench ## measure speed and memory beside other packages and update the tables (25 minutes)
	@.venv/bin/python benchmarks/performance.py

bench-quick: .venv/.bench ## the same for the small model with few repetitions (5 minutes), without updating
	@.venv/bin/python benchmarks/performance.py --quick

clean: ## remove .venv, the output of the demo and all caches
	@rm -rf .venv demo site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests -name __pycache__ -prune -exec rm -rf {} +

# One stamp file per set of dependencies, newer than pyproject.toml once it is installed.
.venv/.core .venv/.dev .venv/.docs .venv/.bench: .venv/.%: pyproject.toml
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/setup $*
