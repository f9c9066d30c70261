# Needs python3 (3.11 or later) and make; everything else is installed into .venv from the package index.
# Stamp files under .venv mean that nothing is installed twice until pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
CASES ?= ../shared/cases
# --resume FILE goes on where a run of the same code was stopped.
CASE_ARGS ?=
PYTEST_ARGS ?=
# Tests run in two processes: more would starve the eight forced devices of each of them.
WORKERS ?= 2
# ruff does not follow the links hetjax/{ir,passes,kernels}: the folders are named themselves.
CODE := hetjax ir passes kernels tests $(wildcard examples benchmarks)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test quick nightly notebooks lint docs docs-check cases bench build clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"hetjax needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}. Set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: $(VENV)/created pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev,eccheck,notebook]'
	touch $@

demo: $(VENV)/installed ## Train a small GPT across two unlike sites and prove it equal to plain jit
	$(BIN)/hetjax demo $(DEMO_ARGS)

test: lint ## Lint, type-check, then the whole test suite
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not nightly and not notebooks' $(PYTEST_ARGS)

quick: $(VENV)/installed-dev ## The tests that take seconds
	$(BIN)/python -m pytest -m quick $(PYTEST_ARGS)

nightly: $(VENV)/installed-dev ## The longer searches, left out of `make test`
	$(BIN)/python -m pytest -m nightly $(PYTEST_ARGS)

notebooks: $(VENV)/installed-dev ## Run every notebook of examples/notebooks from top to bottom
	$(BIN)/python -m pytest -m notebooks tests/notebook $(PYTEST_ARGS)

lint: $(VENV)/installed-dev ## ruff and pyright
	$(BIN)/ruff check $(CODE)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/installed ## docs/passes.md, from the passes
	$(BIN)/python -m hetjax.cli.pass_docs > docs/passes.md

docs-check: $(VENV)/installed-dev ## Every path, command and make target named in the documents exists
	$(BIN)/python -m pytest tests/test_docs.py $(PYTEST_ARGS)

cases: $(VENV)/installed-dev ## docs/cases.md: the train steps of CASES=FOLDER through `hetjax check`
	$(BIN)/python -m hetjax.cli.case_table $(CASES) --write docs/cases.md $(CASE_ARGS)

bench: $(VENV)/installed-dev ## The benchmarks, in their quick form
	@for script in benchmarks/[!_]*.py; do echo "== $$script"; $(BIN)/python $$script --quick || exit 1; done

build: $(VENV)/installed-dev ## An sdist, and a wheel built from it, into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

clean: ## Remove the environment and everything built
	rm -rf $(VENV) dist build *.egg-info .pytest_cache .ruff_cache .hypothesis
