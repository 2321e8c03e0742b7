# `make train` and `make test` need only Python 3.11 and make: both set up .venv first.

PIPELINE ?= pipelines/gsm8k_grpo.py
ARGS ?=
# cpu or gpu; the one that is installed is kept, unless another is given.
EXTRA ?= $(or $(shell cat .venv/.extra 2>/dev/null),cpu)
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
# Everything that an install depends on, including the directory: scripts in .venv contain it.
WANTED = $(shell cat setup.cfg pyproject.toml overrides-cpu.txt | cksum) $(EXTRA) $(CURDIR)
DOCS_WANTED = $(shell cat setup.cfg pyproject.toml | cksum) $(CURDIR)

CHROMIUM = $(or $(DATAFLOW_CHROMIUM),$(shell command -v chromium || command -v chromium-browser \
	|| command -v google-chrome))

# A third of the time tests wait for processes to start and for timers: three files at once keep two cores busy.
PARALLEL := 3
FILES_APART := --dist loadfile --no-loadscope-reorder

# The tests start hundreds of processes that import the package: it is compiled once, not in each of them, even where
# the environment forbids to write bytecode.
test test-fast contract: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup install browser train test contract gpu-check test-fast check format compare bench docs clean

ifeq ($(filter cpu gpu,$(EXTRA)),)
$(error EXTRA=$(EXTRA): give cpu or gpu)
endif

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## */  make \1\t/p' Makefile | expand -t 18
	@echo '  ARGS="key=value ..." overrides the configuration, PIPELINE=x.py names another pipeline.'

setup:  ## make .venv and install into it, if anything changed (EXTRA=gpu for CUDA)
	@if [ ! -x $(BIN)/python ] || [ "$$(cat .venv/.installed 2>/dev/null)" != "$(WANTED)" ]; then \
		$(MAKE) --no-print-directory -s install EXTRA=$(EXTRA); \
	fi

# The stamp goes first and comes back last, so that an install cut short is not taken for done; the next one starts
# from an empty .venv, since packages may lie there half written.
# uv reads none of pip's settings: its find-links is passed on. Without one, torch's CPU wheels come from torch's index.
install:
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "dataflow needs Python 3.11 or newer; install it, or name it: make setup PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi
	@rm -f .venv/.installed
	@if ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.prefix != "$(CURDIR)/.venv")' 2>/dev/null \
			|| [ -e .venv/.installing ] \
			|| [ "$$(cat .venv/.extra 2>/dev/null || echo $(EXTRA))" != "$(EXTRA)" ]; then \
		echo "making .venv with $(PYTHON)"; \
		"$(PYTHON)" -m venv --clear .venv || { \
			echo "python's venv module failed; install it (Debian, Ubuntu: apt install python3.11-venv)" >&2; exit 1; }; \
	fi
	@echo "$(EXTRA)" > .venv/.extra; touch .venv/.installing
	@[ -x $(BIN)/uv ] || $(BIN)/python -m pip install -q uv
ifeq ($(EXTRA),gpu)
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode -e '.[gpu,dev]'
else
	@if [ -n "$$PIP_FIND_LINKS" ] && [ -z "$$UV_FIND_LINKS" ]; then \
		UV_FIND_LINKS=$$(echo $$PIP_FIND_LINKS | tr ' ' ','); export UV_FIND_LINKS; \
	fi; \
	if [ -z "$$UV_FIND_LINKS" ]; then UV_TORCH_BACKEND=$${UV_TORCH_BACKEND:-cpu}; export UV_TORCH_BACKEND; fi; \
	echo "$(BIN)/uv pip install --overrides overrides-cpu.txt -e '.[cpu,dev]'"; \
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --overrides overrides-cpu.txt -e '.[cpu,dev]'
endif
	@rm .venv/.installing; echo "$(WANTED)" > .venv/.installed

train: setup  ## train: GRPO with the `both` policy, in a few minutes on two cores
	$(BIN)/dataflow run $(PIPELINE) $(ARGS)

browser: setup  ## a Chromium for the tests of the timeline's page, where there is none
	@if [ -z "$(CHROMIUM)" ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			echo "installing chromium"; \
			{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } > .venv/.chromium 2>&1 \
				|| echo "no chromium: apt-get failed (see .venv/.chromium); the tests in a browser are skipped" >&2; \
		else \
			echo "no chromium: install one, or name it in DATAFLOW_CHROMIUM; the tests in a browser are skipped" >&2; \
		fi; \
	fi

test: setup browser  ## all tests, and which took longest
	$(BIN)/python -m pytest -q -n $(PARALLEL) $(FILES_APART) --durations=20 --durations-min=5 $(ARGS)

contract: setup  ## what must not change, by the command line, public names and files alone; part of `make test`
	$(BIN)/python -m pytest -q -n $(PARALLEL) $(FILES_APART) --confcutdir=tests/contract tests/contract $(ARGS)

gpu-check: setup  ## the tests that need a GPU (EXTRA=gpu), with what they measure
	$(BIN)/python -m pytest -q -rs tests/project/test_cuda.py tests/engines/test_gpu.py $(ARGS)

test-fast: setup  ## the tests that need no engine, in under a minute
	$(BIN)/python -m pytest -q -n $(PARALLEL) $(FILES_APART) -m 'not heavy and not slow' --hypothesis-profile=fast $(ARGS)

check: setup  ## lint, format, types, the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

compare: setup  ## one seed under all four policies: a table and compare.png
	$(BIN)/dataflow compare $(PIPELINE) -o compare.png $(ARGS)

bench: setup  ## the benchmarks, one after another
	@for file in benchmarks/[!_]*.py; do echo "$$file"; $(BIN)/python "$$file" $(ARGS) || exit 1; done

# The stamp comes last: an install cut short starts anew.
docs:  ## the documentation site, in site/
	@if [ -z "$(PYTHON)" ]; then \
		echo "dataflow needs Python 3.11 or newer; install it, or name it: make docs PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi
	@if [ "$$(cat .venv-docs/.installed 2>/dev/null)" != "$(DOCS_WANTED)" ]; then \
		echo "making .venv-docs with $(PYTHON)"; \
		"$(PYTHON)" -m venv --clear .venv-docs && .venv-docs/bin/python -m pip install -q -e '.[docs]' \
			&& echo "$(DOCS_WANTED)" > .venv-docs/.installed; \
	fi
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict $(ARGS)

clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv .venv-docs site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
