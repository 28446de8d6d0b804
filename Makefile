# Two commands for a fresh machine with Python 3.10+ and a C++ compiler:
#   make run     sets up everything in .venv and runs the main job on the example checkpoint
#   make test    sets up everything and runs the tests
# Variables: VENV (where the environment lives), PYTHON, TORCH (the requirement that is installed first),
# PYTEST_ARGS, WORKERS (test files that run at a time), CHECKPOINT, WHEELS (their folder), S390X_GRID (reduced, default, all).

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$p; break; }; done)
TORCH ?= torch==2.13.0
PLUGINS := plugins/x86_vnni plugins/aarch64_neon plugins/s390x_vxe plugins/triton_gpu plugins/humming_gpu
CHECKPOINT ?=
PYTEST_ARGS ?=
WORKERS ?= 2
WHEELS ?= dist
ARM64 ?= build/arm64
GRID ?= all
S390X_GRID ?= reduced

BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(shell find src/int8moe/include plugins/*/csrc plugins/*/CMakeLists.txt -type f 2>/dev/null)
METADATA := pyproject.toml $(wildcard plugins/*/pyproject.toml)

.PHONY: run test setup lint types conformance-all arm64-root conformance-arm64 s390x triton-check gpu-check wheels check-wheels clean

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

# An AArch64 system with Python and torch in $(ARM64), for QEMU; some minutes. Then the conformance suite on every tier of
# aarch64_neon there: about eight minutes a tier with GRID=default, longer with the whole grid.
arm64-root: setup
	$(BIN)/python plugins/aarch64_neon/tests/emulation/arm64_root.py make $(ARM64)

conformance-arm64: arm64-root
	INT8MOE_TEST_ARM64=$(abspath $(ARM64)) INT8MOE_TEST_ARM64_GRID=$(GRID) $(BIN)/python -m pytest -n $(WORKERS) \
		plugins/aarch64_neon/tests/test_aarch64_emulated_python.py $(PYTEST_ARGS)

# The Triton kernels without a GPU: their code interpreted on CPU tensors, and compiled for GPUs that are not here.
# triton is 1 GB and not a dependency: this installs it, without what it would bring, in an environment beside.
TRITON ?= triton==3.9.0
TRITON_VENV ?= $(VENV)-triton

triton-check: setup
	$(PYTHON) -m venv $(TRITON_VENV)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_paths()['purelib'])" > \
		"$$($(TRITON_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/base.pth"
	$(TRITON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$(TRITON)" humming-kernels==0.1.20
	TRITON_INTERPRET=1 $(TRITON_VENV)/bin/python -m pytest -q -n $(WORKERS) plugins/triton_gpu/tests $(PYTEST_ARGS)
	$(TRITON_VENV)/bin/python -m pytest -q -n $(WORKERS) plugins/triton_gpu/tests plugins/humming_gpu/tests $(PYTEST_ARGS)

# What takes a device, in at most six minutes: installs nothing from a network, and says "skipped" with the reason
# where there is no device or no triton. PYTHON is the environment that has torch for the device, triton and int8moe.
gpu-check:
	$(PYTHON) plugins/triton_gpu/checks/gpu_check.py

# The s390x plugin on an emulated machine: a minute with the reduced grid, 40 minutes with S390X_GRID=all. Needs the Debian
# packages g++-s390x-linux-gnu, qemu-user-static and mmdebstrap.
s390x: setup
	$(BIN)/python plugins/s390x_vxe/tests/emulated/s390x_machine.py plugins/s390x_vxe/build/emulated
	$(BIN)/python -m pytest plugins/s390x_vxe/tests/emulated --int8moe-grid $(S390X_GRID) $(PYTEST_ARGS)

# What is published, tagged for the oldest C library that it runs on; plugins for other machines where a cross-compiler is.
wheels: setup
	$(BIN)/python wheels/build.py $(WHEELS)

# Each of them installed in an environment of its own with the torch that TORCH says.
check-wheels: setup
	$(BIN)/python wheels/check.py $(WHEELS) --torch "$(TORCH)"

clean:
	rm -rf $(VENV) $(TRITON_VENV) build $(WHEELS) plugins/*/build
