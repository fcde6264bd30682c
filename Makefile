# make run          set up a virtual environment and tune one shape
# make test         set up and pass every test that needs no GPU
# make test-newest  the tests of kernels and tuner again, under the newest Triton
# make gpu-test     the tests that need a GPU; RECORD=results/h200 writes down how they did
# make fault-test   the tests of a store under fire, with their full counts
# make results      the README's tables, from results/*.bench.json
# make typings      the link tree by which type checkers find the packages
# make clean        remove what make made
#
# PYTHON=python3.12 chooses the interpreter, VENV=path the environment, ARGS="--seq 4096 --dim 128" what `make run` tunes.

PYTHON ?= python3
VENV ?= .venv
ARGS ?= --seq 8192 --dim 64
JOBS ?= 2

BIN := $(VENV)/bin
NEWEST := .triton-newest
ROOMS := cli db kernels results tuner
INTERPRETED := $(addprefix tests/kernels/test_,dirty_padding.py flash_bwd_dense.py flash_decode.py \
	flash_decode_packing.py flash_fwd.py flash_fwd_general.py flash_sparse.py historical.py hopper_bwd_passes.py)
# What asks nothing of Triton: numbers, files and processes, and sources that run as plain Python.
TRITON_FREE := $(addprefix --ignore=tests/,$(addprefix kernels/test_,dispatch.py dispatch_plans.py faults.py \
	flash_decode_hopper_source.py flash_fwd_fp8_source.py flash_fwd_hopper_source.py flash_fwd_hopper_short_source.py \
	fork_gate.py hostile_rows.py miss_file.py misses.py reuse.py source.py sync.py) $(addprefix tuner/test_,buckets.py calibration.py \
	cost_model.py executor.py job_worker.py killed_runs.py noise.py occupancy_differential.py overlap.py recorded_sweeps.py \
	rematch.py replay.py roofline.py run.py runner.py search.py strategies.py sweep_file.py telemetry.py verdict.py verify.py))
PYTEST := $(BIN)/python -P -m pytest -q
WITH_NEWEST := PYTHONPATH=$(CURDIR)/$(NEWEST)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# PyPI's PyTorch carries gigabytes of CUDA libraries that a machine without a GPU cannot use.
CPU_TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
CONSTRAINTS := -c constraints-cpu.txt
INSTALL_TORCH = $(PIP) install --no-deps $(CONSTRAINTS) --extra-index-url $(CPU_TORCH_INDEX) torch
else
CONSTRAINTS :=
INSTALL_TORCH = true
endif

.PHONY: run test test-newest gpu-test fault-test check results typings clean

run: $(VENV)/.installed
	$(BIN)/tune run $(ARGS)

# The kernels' own tests run in Triton's interpreter, which a process either has or has not; the rest runs without it.
test: check
	TRITON_INTERPRET=1 $(PYTEST) -n $(JOBS) -m "not gpu" $(INTERPRETED)
	$(PYTEST) -n $(JOBS) -m "not gpu"

check: $(VENV)/.installed-test typings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test-newest: $(VENV)/.installed-test $(NEWEST)/.installed
	TRITON_INTERPRET=1 $(WITH_NEWEST) $(PYTEST) -n $(JOBS) -m "not gpu" $(INTERPRETED)
	$(WITH_NEWEST) $(PYTEST) -n $(JOBS) -m "not gpu" tests/kernels tests/tuner $(TRITON_FREE)

gpu-test: $(VENV)/.installed-test
	$(PYTEST) -m gpu $(if $(RECORD),--record $(RECORD).gpu-tests.json --record-costs $(RECORD).host-cost.json)

fault-test: $(VENV)/.installed-test
	BLOCKTUNE_FAULTS=full $(PYTEST) tests/db/test_processes.py tests/db/test_faults.py tests/tuner/test_killed_runs.py

results: $(VENV)/.installed
	$(BIN)/python -m blocktune.cli.pages.pages

typings:
	mkdir -p typings/blocktune
	ln -sfn ../../blocktune/__init__.py typings/blocktune/__init__.py
	ln -sfn ../../blocktune/integrations.py typings/blocktune/integrations.py
	ln -sfn ../../blocktune/py.typed typings/blocktune/py.typed
	$(foreach room,$(ROOMS),ln -sfn ../../$(room) typings/blocktune/$(room);)

clean:
	rm -rf $(VENV) $(NEWEST) typings build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL_TORCH)
	$(PIP) install $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install $(CONSTRAINTS) -e '.[test]'
	touch $@

$(NEWEST)/.installed: $(VENV)/.installed-test
	rm -rf $(NEWEST)
	$(PIP) install --target $(NEWEST) --no-deps 'triton>3.6'
	touch $@
