# Every target does its own set-up. Python 3.11+ and make are all that a machine must have.
#
#   make test                               in .venv, made and filled on the first run
#   make test PYTHON=python3.12             with another interpreter
#   make gpu-test VENV= PYTHON=python3      with that interpreter as it is: nothing is made, nothing is installed

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash

# The first interpreter that is new enough; nothing when there is none.
PYTHON ?= $(firstword $(foreach python,python3 python3.13 python3.12 python3.11 python,\
	$(shell $(python) -c 'import sys; sys.version_info >= (3, 11) and print("$(python)")' 2>/dev/null)))
VENV ?= .venv
# Test workers; each runs torch on one thread, and whole files, so that what the tests of a file share is made once.
WORKERS ?= auto
# More options for uv and pip, such as PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu", which saves
# some gigabytes on a Linux machine without an NVIDIA GPU.
PIP_OPTIONS ?=

# Packages that are compiled to bytecode when they are installed, but for parts that no test imports; others are when
# they are imported for the first time, even where the environment forbids it, because hundreds of processes would
# compile them again.
COMPILED = torch,sympy,mpmath,numpy,scipy,keras,onnx,matplotlib,networkx
NOT_COMPILED = /tests?/|_test[.]py|/(_vendor|physics|distutils)/|/backend/(jax|openvino|tensorflow)/
export PYTHONDONTWRITEBYTECODE :=

ifeq ($(strip $(VENV)),)
RUN = $(PYTHON)
BIN :=
TRAIN_READY :=
DEV_READY :=
else
RUN := $(VENV)/bin/python
BIN := $(VENV)/bin/
TRAIN_READY := $(VENV)/.ready-train
DEV_READY := $(VENV)/.ready-dev
endif

# Of `gpu-trials`: how long, where the seeds begin, and how many processes share the GPU.
SECONDS ?= 300
SEED ?= 0
PROCESSES ?= 8

# Of `release`: the versions to test, each Python (or the path of an interpreter) with each PyTorch, and the tests. Those
# that cannot be had are skipped, and listed at the end.
PYTHONS ?= 3.11 3.12 3.13
TORCHES ?= 2.6 2.11 2.13 2.15
TESTS ?= tests

# Of `clients`: those to run; all of them if empty.
CLIENTS ?=

# Of `outputs`: whose blocks to fill, "cpu" on a machine without a GPU, "h200" on one with an H200.
MACHINE ?= cpu

.PHONY: help demo test pytest lint format exhaustive-test gpu-test gpu-trials gpu-trajectories sanitize bench records \
	outputs clients release docs clean

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(TRAIN_READY) ## train a small language model on this machine and sample from it
	$(RUN) -m gatewise train lm --recipe demo

test: $(DEV_READY) ## everything that needs no GPU: lint, types, import order, tests, the examples of the docs
	@$(MAKE) -j 2 lint pytest

pytest: $(DEV_READY) ## the tests that need no GPU, with the examples of the docs
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder \
		-m "not gpu and not exhaustive"

lint: $(DEV_READY) ## style, formatting, types and import order
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	NODE_OPTIONS=--max-semi-space-size=128 $(RUN) -m pyright --pythonpath $(RUN)  # which collects garbage less often
	$(BIN)lint-imports --no-logo --no-cache

format: $(DEV_READY) ## rewrite the sources in the project's format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

exhaustive-test: $(DEV_READY) ## more cases of tests, such as hundreds of random cells, a few of which `make test` runs
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) -m "exhaustive and not gpu"

gpu-test: $(DEV_READY) ## the tests that need a CUDA device
	$(RUN) -m pytest -m gpu

gpu-trials: $(DEV_READY) ## calls with options drawn at random, each held to float64 (SECONDS, SEED, PROCESSES)
	$(RUN) -m gatewise.testing.trials --device cuda --seconds $(SECONDS) --seed $(SEED) --processes $(PROCESSES) \
		--commit "$$(git describe --always --dirty)" --record benchmarks/results/trials.jsonl

gpu-trajectories: $(TRAIN_READY) ## real models trained for 500 steps on every kernel, their losses beside nn.LSTM's
	$(RUN) -m gatewise.benchmarks.trajectories --device cuda --jobs $(PROCESSES) \
		--record benchmarks/results/trajectories.jsonl

# Without PyTorch's cache each tensor is an allocation of its own, so that a read beyond its end is seen.
sanitize: $(DEV_READY) ## small cases under compute-sanitizer, which comes with CUDA's toolkit
	for tool in memcheck racecheck; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 \
			--kernel-name-exclude kns=at:: $(RUN) tests/kernels/small_cases.py || exit 1; done
	# initcheck counts as written only what kernels write that it watches, so that it has to watch PyTorch's too.
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck --report-api-errors no --error-exitcode 1 \
		$(RUN) tests/kernels/small_cases.py

bench: $(TRAIN_READY) ## the classic table: words per second of a language model, one row per way to compute it
	$(RUN) -m gatewise bench lm

records: $(TRAIN_READY) ## measure every benchmark on this machine's GPU and refresh the pages that show them
	$(RUN) -m gatewise bench lstm
	$(RUN) -m gatewise bench gru
	$(RUN) -m gatewise bench cells --dtype bf16
	$(RUN) -m gatewise bench lm
	$(RUN) -m gatewise bench attention
	$(RUN) -m gatewise bench nmt
	$(RUN) -m gatewise bench models
	$(RUN) -m gatewise bench scale
	$(RUN) -m gatewise bench scale --model nmt
	for page in README.md docs/benchmarks.md; do \
		$(RUN) -m gatewise bench report lstm --into $$page --plot=docs/images/lstm && \
		$(RUN) -m gatewise bench report lm --into $$page || exit 1; done
	$(RUN) -m gatewise bench report gru --into docs/benchmarks.md --plot=docs/images/gru
	$(RUN) -m gatewise bench report attention --into docs/attention.md
	$(RUN) -m gatewise bench report cells --into docs/benchmarks.md --plot=docs/images/cells
	$(RUN) -m gatewise bench report nmt --into docs/benchmarks.md --plot=docs/images/nmt
	$(RUN) -m gatewise bench report models --into docs/benchmarks.md --plot=docs/images/models
	$(RUN) -m gatewise bench report scale --into docs/training.md --plot=docs/images/scale
	$(RUN) -m gatewise bench report quality --into docs/training.md --plot=docs/images/quality

outputs: $(TRAIN_READY) ## fill the documentation's blocks of program output with what this machine prints (MACHINE)
	for page in $$(grep -rl --include=*.md "<!-- output: $(MACHINE):" docs); do \
		$(RUN) docs/record_output.py $$page $(MACHINE) || exit 1; done

clients: $(TRAIN_READY) ## real libraries before and after one line of gatewise, and their table in the docs (CLIENTS)
	$(RUN) -m clients $(CLIENTS)

release: ## build wheel and sdist, and test both in empty environments (PYTHONS, TORCHES, TESTS); uploads nothing
	$(PYTHON) .ci/release.py --pythons="$(PYTHONS)" --torches="$(TORCHES)" --tests="$(TESTS)" --workers="$(WORKERS)" \
		--pip="$(PIP_OPTIONS)"

docs: $(DEV_READY) ## build the documentation into site/
	$(RUN) -m mkdocs build --strict

clean: ## remove what the targets made, the environment too
	rm -rf .venv .clients site .pytest_cache .ruff_cache .hypothesis

define install
	@test -n "$(PYTHON)" || { echo "gatewise needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv --without-pip $(VENV)
	@echo "Installing gatewise[$(1)] into $(VENV) (once) ..."
	@$(PYTHON) .ci/install.py $(RUN) $(1) $(PIP_OPTIONS)
	@# On all cores and without the packages' own tests and other parts that are not imported; an extra may lack some.
	@$(RUN) -m compileall -q -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib/*/site-packages/{$(COMPILED)} gatewise >/dev/null 2>&1 || true
	@touch $@
endef

$(VENV)/.ready-train: pyproject.toml constraints.txt
	$(call install,train)

$(VENV)/.ready-dev: pyproject.toml constraints.txt
	$(call install,dev)
	@touch $(VENV)/.ready-train
