# make demo   a real model answers, plainly and with MicroSpec
# make test   the default tests (CPU, a few minutes)
# make lint   style, types, import contracts
# Every target sets itself up in .venv on the first call.

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
VENV_517 := .venv-517
# Written last, so that an interrupted set-up is done again. The demo needs less than the tests.
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
READY_517 := $(VENV_517)/.ready
INSTALL := -m pip install -qq --disable-pip-version-check
EXTRAS := dev,demo,evaluation,models

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-slow test-517 lint format clean

help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

setup: $(READY_DEV)

demo: $(READY)
	$(VENV)/bin/microspec demo

test: $(READY_DEV)
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

# What takes too long for every day: thousands of random option sets, injected faults, more models.
test-slow: $(READY_DEV)
	$(VENV)/bin/python -m pytest -m "slow and not gpu" --record examples/results/slow_tests.json $(PYTEST_ARGS)

# The oldest supported transformers: the same tests.
test-517: $(READY_517)
	$(VENV_517)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(READY_DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy microspec_hf $(wildcard examples)
	$(VENV)/bin/lint-imports

format: $(READY_DEV)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(VENV_517) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	$(VENV)/bin/python $(INSTALL) -c constraints.txt -e '.[demo]'
	@touch $@

$(READY_DEV): $(READY)
	$(VENV)/bin/python $(INSTALL) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(READY_517): pyproject.toml constraints.txt
	$(call make_venv,$(VENV_517))
	sed 's/^transformers==[^;]*/transformers==5.17.0/' constraints.txt > $(VENV_517)/constraints.txt
	$(VENV_517)/bin/python $(INSTALL) -c $(VENV_517)/constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# $(1): folder of the environment
define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "$(PYTHON) is older than Python 3.10 or missing: make PYTHON=/path/to/python3.10 ..." >&2; exit 1; }
	@echo "Setting up $(1) (once; a minute or so)"
	$(PYTHON) -m venv --clear $(1)
endef
