# make demo    optimize a first program and show what was found
# make test    everything that needs no GPU: lint, types, tests
#
# Both make their own virtual environment in .venv (once). A CUDA build of PyTorch that PYTHON
# already has is used as it is and never replaced.
#
#   PYTHON=python3.12   the interpreter the environment is made from
#   VENV=/path          where the environment is made
#   TORCH=auto          auto, host, pinned or newest: see scripts/setup_venv.sh
#   GPU=h200            the one that ptx-test stands for: h200 or b200
#   ARGS=...            more arguments for what the target runs

PYTHON ?= python3
VENV ?= .venv
TORCH ?= auto
WORKLOAD ?= inference
GPU ?= h200
ARGS ?=

# with tables that are made of results; WORKLOAD's stand in one of them, or in two
PAGES := benchmarks performance search

BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
BENCH_STAMP := $(VENV)/.ready-bench

# pip compiles nothing (scripts/setup_venv.sh): what is imported is compiled then, and kept
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test tests lint style types ptx-test gpu-test bench golden docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt scripts/setup_venv.sh
	sh scripts/setup_venv.sh "$(VENV)" "$(PYTHON)" "$(TORCH)" "[dev]"
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(VENV)/constraints.txt --editable ".[dev,bench]"
	@touch $@

setup: $(STAMP)  ## only make the virtual environment

demo: $(STAMP)  ## optimize a first program, verify it, show it (and time it on a GPU)
	$(BIN)/cutesuper demo $(ARGS)

lint: style types  ## ruff (rules and format) and pyright

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

# pyright has one thread, and tests that wait for something leave it a core
test: style  ## lint, types and all tests that need no GPU
	$(MAKE) --no-print-directory --jobs=2 tests types

tests: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu" -n 2 --durations=10 $(ARGS)
	$(BIN)/python -m pytest --ptx -m ptx -n 2 --durations=10 $(ARGS)

ptx-test: $(STAMP)  ## the tests that need a GPU, as far as the machine of tests/ptx goes
	$(BIN)/python -m pytest --ptx=$(GPU) -m gpu --durations=10 $(ARGS)

gpu-test: $(STAMP)  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu --durations=10 $(ARGS)

bench: $(BENCH_STAMP)  ## measure WORKLOAD against its peers, refresh the tables of the pages (GPU)
	$(BIN)/python -m benchmarks $(WORKLOAD) --json benchmarks/results/$(WORKLOAD).json $(ARGS)
	$(BIN)/python -m benchmarks.report $(foreach page,$(PAGES),--page docs/$(page).md) \
		benchmarks/results/$(WORKLOAD)*.json
	$(BIN)/python -m benchmarks.summary benchmarks/results README.md docs/summary.svg
	$(BIN)/python -m benchmarks.plots benchmarks/results docs/plots

golden: $(STAMP)  ## write the golden files in tests/golden again
	$(BIN)/python -m pytest -m "not gpu" --golden-update $(ARGS)
	@git --no-pager diff --stat -- tests/golden 2>/dev/null || true

docs: $(STAMP)  ## the documentation as a site, in build/site
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

clean:  ## remove the environment and all caches of the tools
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
