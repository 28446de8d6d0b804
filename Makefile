# Two commands for a fresh machine with Python 3.10+ and a C++ compiler:
#   make run     sets up everything in .venv and runs the main job on the example checkpoint
#   make test    sets up everything and runs the tests
# Variables: VENV (where the environment lives), PYTHON, TORCH (the requirement that is installed first),
# PYTEST_ARGS, WORKERS (test files that run at a time), CHECKPOINT.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$p; break; }; done)
TORCH ?= torch==2.13.0
PLUGINS := plugins/x86_vnni plugins/aarch64_neon
CHECKPOINT ?=
PYTEST_ARGS ?=
WORKERS ?= 2
WHEELS ?= dist

BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(shell find src/int8moe/include plugins/*/csrc plugins/*/CMakeLists.txt -type f 2>/dev/null)
METADATA := pyproject.toml $(wildcard plugins/*/pyproject.toml)

.PHONY: run test setup lint types conformance-all wheels clean

setup: $(READY)

$(READY): $(METADATA) $(NATIVE)
	@test -n "$(PYTHON)" || { echo "int8moe needs Python 3.10 or newer: install it, or set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(foreach plugin,$(PLUGINS),-e "./$(plugin)[test]")
	$(BIN)/python -m compileall -q src/int8moe $(addsuffix /src,$(PLUGINS))
	@touch $@

run: setup
	$(BIN)/int8moe list-kernels
	$(BIN)/int8moe run $(CHECKPOINT)

test: setup
	$(BIN)/python -m pytest -m alone tests/cli/test_start_up.py
	$(BIN)/python -m pytest -m "not alone" -n $(WORKERS) --dist loadfile tests $(addsuffix /tests,$(PLUGINS)) $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# The whole cross of shapes, activations, dtypes and threads for every kernel of this machine: about half an hour.
conformance-all: setup
	$(BIN)/python -m pytest tests/conformance --int8moe-grid all $(PYTEST_ARGS)

wheels: setup
	$(BIN)/python -m build --outdir $(WHEELS) .
	for plugin in $(PLUGINS); do $(BIN)/python -m build --outdir $(WHEELS) $$plugin || exit 1; done

clean:
	rm -rf $(VENV) build $(WHEELS) plugins/*/build
