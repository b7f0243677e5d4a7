# Each target does its own set-up; `make demo` or `make test` can be the first command after a clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
TORCH := $(if $(filter-out 0,$(GPU)),torch,-r requirements/torch-cpu.txt)
RANKS ?= $(if $(filter-out 0,$(GPU)),$(GPU),4)
WORKERS ?= 2
QUICK := $(addprefix tests/,math rules kernels copies comm layout step simulated record) \
	$(addprefix tests/,dist/layouts/test_alone.py programs/test_counting.py programs/test_aborts.py) \
	$(addprefix tests/packaging/,test_extras.py test_house.py test_integrations.py)

SYSTEMS := .venv-systems
COMPILE_DEEPSPEED := from deepspeed.comm.torch import build_shm_op; build_shm_op()
# Else DeepSpeed's first launch compiles it, on all ranks. It finds ninja by PATH.
IN_SYSTEMS := PATH="$(CURDIR)/$(SYSTEMS)/bin:$$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
	TORCH_EXTENSIONS_DIR="$(CURDIR)/$(SYSTEMS)/extensions" python

DOCS := .venv-docs

VERSIONS := .venv-versions
PAIRS := 3.10-2.8 3.13-2.13
PYTHON310 ?= python3.10
PYTHON313 ?= python3.13
WANTED = $(firstword $(subst -, ,$*))
INTERPRETER = PYTHON$(subst .,,$(WANTED))
INSTALLED := build/versions
# Beside QUICK: real ranks, where what is expected is the same with every torch.
ON_RANKS := $(addprefix tests/dist/,layouts/test_layouts.py layouts/test_submeshes.py values copies \
	errors stepping/test_overlap_changes.py) tests/packaging/test_import.py

.PHONY: help demo test lint unit test-quick replay test-systems test-versions bench docs changelog clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml requirements/dev.txt requirements/torch-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "shardclip needs Python >= 3.10; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	@touch $@

demo: $(READY)  ## train a small language model twice on 4 ranks: without and with clipping
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_lm.py

test: lint unit  ## lint, types, import rules and every test

lint: $(READY)  ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(READY)  ## every test, in parallel
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

test-quick: $(READY)  ## the tests that start no process, in a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not processes" $(QUICK) $(ARGS)

replay: $(READY)  ## what travels and comes out of every layout, beside the revision BASE: no byte may differ
	$(BIN)/python -m tests.replay $(or $(BASE),HEAD) $(ARGS)

$(SYSTEMS)/.ready: pyproject.toml requirements/systems.txt requirements/torch-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "the frameworks need Python >= 3.11; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(SYSTEMS)
	$(SYSTEMS)/bin/python -m pip install --quiet -r requirements/torch-cpu.txt
	$(SYSTEMS)/bin/python -m pip install --quiet -r requirements/systems.txt
	$(SYSTEMS)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	$(IN_SYSTEMS) -c "$(COMPILE_DEEPSPEED)" > /dev/null
	@touch $@

test-systems: $(SYSTEMS)/.ready  ## the tests with the real frameworks, in an environment of their own
	$(IN_SYSTEMS) -m pytest tests/systems --timeout 400 $(ARGS)
	SHARDCLIP_REQUIRE_TRACKERS=1 $(IN_SYSTEMS) -m pytest tests/record/test_trackers.py

$(VERSIONS)/%/.ready: requirements/versions.txt
	@$($(INTERPRETER)) -c 'import sys; sys.exit(not sys.version.startswith("$(WANTED)."))' || \
		{ echo "$($(INTERPRETER)) is no Python $(WANTED); set $(INTERPRETER)=..."; exit 1; }
	$($(INTERPRETER)) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -r requirements/versions.txt
	@touch $@

test-versions: $(READY) $(PAIRS:%=$(VERSIONS)/%/.ready)  ## the sdist with the oldest and the newest Python and torch
	rm -rf $(INSTALLED) && mkdir -p $(INSTALLED)/alone
	$(BIN)/python -m build --sdist --no-isolation --outdir $(INSTALLED) . > /dev/null
	cp -R tests benchmarks docs examples README.md pyproject.toml $(INSTALLED)/alone
	@set -e; for pair in $(PAIRS); do \
		python=$(CURDIR)/$(VERSIONS)/$$pair/bin/python; \
		$$python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall \
			$(CURDIR)/$(INSTALLED)/*.tar.gz; \
		cd $(CURDIR)/$(INSTALLED)/alone; echo "== Python and torch $$pair"; \
		$$python -c "import sys, shardclip as s; assert s.__file__.startswith(sys.prefix), s.__file__"; \
		OMP_NUM_THREADS=1 $$python -m pytest -q -n $(WORKERS) -m "not processes" $(QUICK) $(ARGS); \
		OMP_NUM_THREADS=1 $$python -m pytest -q -n $(WORKERS) --dist loadgroup $(ON_RANKS) $(ARGS); \
	done

bench: $(READY)  ## time shardclip beside torch on the same gradients
	$(BIN)/python -m benchmarks

$(DOCS)/.ready: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -r requirements/docs.txt
	@touch $@

docs: $(DOCS)/.ready  ## build the documentation, warnings as errors: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build

changelog: $(READY)  ## what changelog.d/ says of the next version; with VERSION=... write it into CHANGELOG.md
	$(BIN)/towncrier build $(if $(VERSION),--yes --version $(VERSION),--draft --version next)

clean:  ## remove the virtual environment and everything generated
	rm -rf $(VENV) $(SYSTEMS) $(DOCS) $(VERSIONS) build dist runs shardclip-runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
