# make run          set up a virtual environment and tune one shape
# make test         set up and pass the tests that need no GPU; TENTH=3 adds the fourth tenth of the cases of `make test-all`
# make test-all     the same, and many more cases of the same kinds
# make test-nightly test-all and test-newest, with all code compiled: the night's part of continuous integration
# make width-test   every kernel at every pair of head dimensions, compiled for four architectures: hours
# make test-newest  the tests of kernels, runtime and tuner again, under the newest Triton; TENTH=3 leaves the first case of each
#                   test, and that tenth
# make test-costs   the list of cases that take many processor seconds, which `make test` leaves to the night
# make compile-facts what compile tests found, in tests/data, so that only kernels that change are compiled again
# make test-pair    the same under the PyTorch and Triton that are named: TORCH=2.14.1 TRITON=3.8.0
# make test-transformers  every family of the installed transformers, next to eager attention; HQQ's caches, and Lightning
# make integrations-test  the plugins of vLLM and SGLang under the engines' own classes, unpacked in .engines: 400 MB
# make test-lowest  the command line with the lowest versions that pyproject.toml allows, under Python 3.11
# make gpu-test     the tests that need a GPU; RECORD=results/h200 writes down how they did
# make fuzz         drawn calls against float64 on a GPU: SECONDS=600 SEED=1 JOBS=16 OUT=results/h200.differential.json
# make speed-fuzz   drawn calls next to PyTorch's own attention on a GPU: SECONDS=300 SEED=1 JOBS=15 OUT=blocktune/results/h200.speed-fuzz.json
# make fuzz-parsers what strangers may have written, guided by coverage, from the inputs of earlier runs: SECONDS=600
# make fuzz-cli     random commands on random files: RUNS=5000 SEED=1
# make sanitize     every kernel under compute-sanitizer, on a GPU; RECORD=results/h100 names the record, ARGS what to run
# make fault-test   the store under fire with full counts, recorded in results/; PART="kills disks" runs these parts alone
# make cluster-test Ray clusters of this machine whose nodes, drivers and workers are killed: about 7 minutes
# make results      what is generated in the README and docs/: tables, pictures, the reference of the commands
# make counters     what Nsight Compute counts of three kernels, on a GPU; RECORD=blocktune/results/h200 names the files
# make dist         the wheel and the source archive, in dist/; two builds of a commit give the same wheel; VERSION=0.2.0 stops
#                   where the project has another version
# make hub-kernel   a folder that Hugging Face's package `kernels` loads attention from, in dist/hub
# make pictures     of the report and the live page, in docs/guide/pictures: it needs a browser
# make docs         the documents as a site, in site/
# make clean        remove what make made
#
# PYTHON=python3.12 chooses the interpreter, VENV=path the environment, ARGS="--seq 4096 --dim 128" what `make run` tunes.

PYTHON ?= python3
VENV ?= .venv
ARGS ?= --seq 8192 --dim 64
JOBS ?= 2
SECONDS ?= 600
SEED ?= 1
RUNS ?= 5000

BIN := $(VENV)/bin
NEWEST := .triton-newest
PYTEST = $(BIN)/python -P -m pytest -q
# Several workers share the processors already: threads of PyTorch's and NumPy's in each would wait for one another.
# Hundreds of tests start a process, which would compile our sources again where Python may not keep them compiled.
# What the tests of a file share, such as a server or a browser, is made once; of many long cases all workers take some
# (tests/support/suite/shared_files.py).
PARALLEL = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --dist loadgroup
PAIR := .venv-torch$(TORCH)-triton$(TRITON)
LOWEST := .venv-lowest
COMMANDS := tests/cli/test_every_command.py
# The other files are not read in vain.
INTERPRETED := $(shell grep -rl --include='test_*.py' mark.interpreted tests)
ASKS_TRITON := $(shell grep -rLE --include='test_*.py' '^pytestmark = .*mark\.triton_free' tests/kernels tests/runtime tests/tuner)
WITH_NEWEST := PYTHONPATH=$(CURDIR)/$(NEWEST)
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet

# PyPI's PyTorch carries gigabytes of CUDA libraries that a machine without a GPU cannot use.
CPU_TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
CONSTRAINTS := -c constraints-cpu.txt
INSTALL_TORCH = $(PIP) install --no-deps $(CONSTRAINTS) --extra-index-url $(CPU_TORCH_INDEX) torch
else
CONSTRAINTS :=
INSTALL_TORCH = true
endif

.PHONY: run test test-interpreted test-all test-nightly test-newest test-costs compile-facts test-pair test-lowest test-transformers integrations-test width-test gpu-test counters model-bench fuzz speed-fuzz fuzz-parsers fuzz-cli sanitize fault-test cluster-test check results dist hub-kernel pictures docs clean

run: $(VENV)/.installed
	$(BIN)/blocktune run $(ARGS)

# What `make test` leaves to `make test-all`, but for a tenth of it where TENTH is a digit.
FEW := and $(if $(TENTH),(not exhaustive or tenth),not exhaustive)
FEW_NEWEST := and not exhaustive $(if $(TENTH),and (first or tenth))
TURN := $(if $(TENTH),--tenth $(TENTH)) $(if $(FACTS),--compile-facts $(FACTS))
test-all: FEW :=

# mypy has one processor: the interpreted tests run beside it.
test test-all: $(VENV)/.installed-test
	$(MAKE) --jobs 2 --output-sync=target check test-interpreted FEW="$(FEW)"
	$(PARALLEL) $(TURN) -m "not gpu and not cluster $(FEW)"

test-nightly:
	$(MAKE) test-all test-newest FACTS=check

# The kernels' own tests run in Triton's interpreter, which a process either has or has not; the rest runs without it.
test-interpreted: $(VENV)/.installed-test
	TRITON_INTERPRET=1 $(PARALLEL) $(TURN) -m "interpreted and not gpu $(FEW)" $(INTERPRETED)

width-test: $(VENV)/.installed-test
	BLOCKTUNE_WIDTHS=full $(PARALLEL) tests/kernels/base/test_width_classes.py tests/kernels/portable/test_row_alignment.py

check: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test-newest: $(VENV)/.installed-test $(NEWEST)/.installed
	TRITON_INTERPRET=1 $(WITH_NEWEST) $(PARALLEL) $(TURN) -m "interpreted and not gpu and not triton_free $(FEW_NEWEST)" $(INTERPRETED)
	$(WITH_NEWEST) $(PARALLEL) $(TURN) -m "not gpu and not cluster and not triton_free $(FEW_NEWEST)" $(ASKS_TRITON)

test-costs: $(VENV)/.installed-test
	TRITON_INTERPRET=1 $(PARALLEL) --costs -m "interpreted and not gpu and not exhaustive" $(INTERPRETED)
	$(PARALLEL) --costs -m "not gpu and not cluster and not exhaustive"

compile-facts: $(VENV)/.installed-test $(NEWEST)/.installed
	$(PARALLEL) --compile-facts write -m "compiles_kernels and not gpu" tests/kernels tests/runtime tests/tuner
	$(WITH_NEWEST) $(PARALLEL) --compile-facts write -m "compiles_kernels and not gpu and not exhaustive" tests/kernels tests/runtime tests/tuner

test-pair: BIN := $(PAIR)/bin
test-pair: $(PAIR)/.installed
# Tests that ask nothing of Triton ask PyTorch.
	TRITON_INTERPRET=1 $(PARALLEL) -m "interpreted and not gpu and not exhaustive" $(INTERPRETED)
	$(PARALLEL) -m "not gpu and not exhaustive and not cluster" tests/kernels tests/runtime tests/tuner tests/test_examples.py $(COMMANDS)

ENGINES := .engines
integrations-test: $(VENV)/.installed-test
	$(PIP) install --no-deps --upgrade --target $(ENGINES) -r integrations/requirements.txt
	for engine in vllm sglang; do \
		TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR):$(CURDIR)/integrations/$$engine:$(CURDIR)/$(ENGINES) OMP_NUM_THREADS=1 \
			$(PYTEST) -W ignore -p integrations.stand_ins integrations/$$engine || exit 1; \
	done

test-lowest: BIN := $(LOWEST)/bin
test-lowest: $(LOWEST)/.installed
	$(PARALLEL) -m "not gpu and not exhaustive" tests/cli/test_main.py tests/cli/output tests/cli/results $(COMMANDS)

test-transformers: $(VENV)/.installed-test
	BLOCKTUNE_FAMILIES=all $(PARALLEL) tests/runtime/api/hugging_face/test_transformers_families.py
	$(PIP) install $(CONSTRAINTS) hqq lightning
	$(PARALLEL) -k "hqq or data_parallel" tests/runtime/api/hugging_face/test_generation_caches.py tests/test_examples.py

gpu-test: $(VENV)/.installed-test
	$(PYTEST) -m gpu $(if $(RECORD),--record $(RECORD).gpu-tests.json --record-costs $(RECORD).host-cost.json)

# The model next to the counters: `make results` makes the tables of these files.
COUNTED := flash_fwd flash_fwd_tma flash_fwd_hopper
counters: $(VENV)/.installed
	for kernel in $(COUNTED); do \
		$(BIN)/blocktune profile --seq 8192 --dim 64 --kernel $$kernel --out $(RECORD)-$$kernel.counters.csv || exit 1; \
	done

# Steps of whole models with our attention and with PyTorch's, in turns.
model-bench: $(VENV)/.installed-test
	PYTHONPATH=$(CURDIR) $(BIN)/python -P -m tools.end_to_end --out $(RECORD).models.json

fuzz: $(VENV)/.installed-test
	PYTHONPATH=$(CURDIR) $(BIN)/python -P -m tools.differential --seconds $(SECONDS) --seed $(SEED) --jobs $(JOBS) \
		$(if $(OUT),--out $(OUT))

speed-fuzz: $(VENV)/.installed-test
	PYTHONPATH=$(CURDIR) $(BIN)/python -P -m tools.differential.speed --seconds $(SECONDS) --seed $(SEED) --jobs $(JOBS) \
		$(if $(OUT),--kernels --out $(OUT))

fuzz-parsers: $(VENV)/.installed-test
	$(PIP) install atheris
	PYTHONPATH=$(CURDIR) $(BIN)/python -P -m tools.fuzz --seconds $(SECONDS)

fuzz-cli: $(VENV)/.installed-test
	PYTHONPATH=$(CURDIR) $(BIN)/python -P -m tools.stores.faults --only commands --runs $(RUNS) --seed $(SEED)

# Runs where PyTorch and Triton are, without an install of the package.
sanitize: ARGS :=
sanitize:
	PYTHONPATH=$(CURDIR) $(PYTHON) -P tools/checks/sanitize.py $(if $(RECORD),--record $(RECORD).sanitizer.json) $(ARGS)

fault-test: $(VENV)/.installed-test
	$(if $(PART),,BLOCKTUNE_FAULTS=full $(PYTEST) tests/db/test_processes.py)
	PYTHONPATH=$(CURDIR) $(BIN)/python -P -m tools.stores.faults --out results/store.faults.json \
		--seed $(SEED) --jobs $(JOBS) $(if $(PART),--only $(PART))

# Ray clusters of this machine, whose nodes, drivers and workers are killed.
cluster-test: $(VENV)/.installed-test
	$(PYTEST) -m cluster

results: $(VENV)/.installed
	$(BIN)/python -m tools.pages.pages

# The wheel is built from the archive. The times of its files are that of the commit and their modes are set, so that another
# machine builds the same bytes.
dist: $(VENV)/.installed
	$(if $(VERSION),grep -qx 'version = "$(VERSION)"' pyproject.toml)
	$(PIP) install build
	umask 022 && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build

hub-kernel: $(VENV)/.installed
	$(BIN)/python -m tools.package.hub_kernel dist/hub

pictures: $(VENV)/.installed-test
	PYTHONPATH=$(CURDIR) $(BIN)/python -P -m tools.bench.report_pictures

docs: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) $(ENGINES) .venv-torch* .venv-lowest $(NEWEST) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL_TORCH)
	$(PIP) install $(CONSTRAINTS) -e '.[tune]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
# Python compiles what the tests import; pip would compile ten thousand files, which takes a third of its time.
	$(PIP) install --no-compile $(CONSTRAINTS) -e '.[test]'
# Ray, which the tests need, has a command `tune` too: the one that is installed last stays.
	$(PIP) install --no-deps --no-build-isolation --force-reinstall -e .
	touch $@

$(NEWEST)/.installed: $(VENV)/.installed-test
	rm -rf $(NEWEST)
	$(PIP) install --target $(NEWEST) --no-deps 'triton>3.6'
	touch $@

# PyTorch's CPU builds need no certain Triton. Triton 3.6's interpreter uses a conversion that NumPy 2.4 removed.
$(PAIR)/.installed: pyproject.toml
	$(PYTHON) -m venv $(PAIR)
	$(PIP) install --no-deps --extra-index-url $(CPU_TORCH_INDEX) torch==$(TORCH) triton==$(TRITON)
	$(PIP) install --no-compile 'numpy<2.4' torch==$(TORCH) triton==$(TRITON) -e '.[test]'
	touch $@

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(PIP) install --no-deps --extra-index-url $(CPU_TORCH_INDEX) -c constraints-lowest.txt torch triton
	$(PIP) install --no-compile -c constraints-lowest.txt -e '.[frames,report,tune,ui]' hypothesis pytest pytest-timeout pytest-xdist
	touch $@
