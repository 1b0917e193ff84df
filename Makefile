# Two commands do everything: `make quickstart` and `make test`. Each makes its own environment in .venv first.
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

# A Python of 3.12 or newer: by name, the default one, or one that pyenv holds. Override with PYTHON=/path/to/python.
FIND_PYTHON := for p in python3.12 python3.13 python3 $$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python 2>/dev/null); do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && echo "$$p" && break; done
PYTHON ?= $(shell $(FIND_PYTHON))

.PHONY: quickstart test test-all matrix lint bench clean help

help:
	@echo "make quickstart   install, then train on 4 CPU ranks with FCP and compare with one rank"
	@echo "make test         install, then lint and run every test that fits 30 minutes on 2 cores"
	@echo "make test-all     make test plus the long sweeps"
	@echo "make lint         style, types and one-way imports"
	@echo "make matrix       write docs/matrix.md, which feature works in which layout, from the tests"
	@echo "make bench        planning time on this machine"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "megatron-fcp needs Python 3.12 or newer (megatron-core 0.19 does) and found none." \
	  "Install one (for example 'pyenv install 3.12') or run 'make $(MAKECMDGOALS) PYTHON=/path/to/python3.12'." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml
	@echo "Installing megatron-fcp, torch and megatron-core into $(VENV) (several GB; a few minutes)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[megatron,tools,dev]'
	@touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python examples/quickstart.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m "not nightly and not gpu and not multigpu"

test-all: lint
	$(BIN)/python -m pytest -m "not gpu and not multigpu"

matrix: $(VENV)/.installed
	$(BIN)/python -m pytest --collect-only -qq -p megatron_fcp.testing.matrix --matrix docs/matrix.md \
	  tests/integration tests/runtime tests/regress

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/planner.py

clean:
	rm -rf $(VENV) quickstart build *.egg-info
