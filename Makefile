# minillm: `make demo` and `make test` need Python 3.11 to 3.14 and make; everything else is installed into .venv.
#
#   TORCH_INDEX=URL   index to install torch from (a CPU-only index saves several GB on Linux without a GPU)
#   PYTHON=python3.12 Python that creates .venv; by default the first of PYTHONS that fits
#   SEED=N EXAMPLES=N for `make explore`: the seed (random by default) and the factor by which examples increase

SHELL := /bin/bash
VENV := .venv
PYTHONS := python3.11 python3.12 python3.13 python3 python python3.14
BIN := $(VENV)/bin
READY := $(VENV)/.installed
RAY := $(VENV)/.installed-ray
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' requirements.lock)
NOTEBOOK ?=
EXAMPLES ?= 10
# One process per core (conftest.py), one thread each. The tests of one file stay in one process: its fixtures are made
# once, and the cells of a notebook run in order. Files start in their own order: notebooks, short ones, come last.
IN_PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.start -n auto --dist loadfile --no-loadscope-reorder
# The files that have tests with a marker: to collect all others would take longer than to run some of these.
marked = $(shell grep -rlE --include='test_*.py' '(pytest\.mark\.|tests\.)$(1)' tests | LC_ALL=C sort)

.PHONY: help setup demo check test proofs explore lab notebooks triton site lint types format lock clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       serve the embedded model, load-test it, compare it; writes an HTML report to build/'
	@echo 'make check      format, lint, types and the key tests, in about two minutes'
	@echo 'make test       every test but the proofs, with the lessons (PYTEST="-k name" selects some)'
	@echo 'make proofs     the longest tests and lessons, the solved notebooks, types'
	@echo 'make explore    the randomized tests with another seed (SEED=N EXAMPLES=N)'
	@echo 'make lab        JupyterLab on copies of the notebooks, in lab/'
	@echo 'make notebooks  rebuild and execute the notebooks from notebooks/source/'
	@echo 'make triton     run minillm inside a real Triton Inference Server, installed into build/triton'
	@echo 'make site       the course as a site to read: build/site/index.html, which needs no network'
	@echo 'make lint       ruff check and format check      make format   let ruff rewrite'
	@echo 'make types      mypy'
	@echo 'make lock       write the two locks and environment.yml (UPGRADE=1: latest versions)'
	@echo 'make setup      only the environment in .venv    make clean    remove what was built'

setup: $(READY)

# A name on PATH may be a shim that cannot start: each candidate is run before it is chosen.
$(BIN)/python:
	@for python in $(or $(PYTHON),$(PYTHONS)); do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then \
	    echo "making $(VENV) with $$($$python --version)"; \
	    $$python -m venv $(VENV) && exit 0; \
	    echo 'python -m venv failed; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; \
	  fi; \
	  found="$$found $$python ($$($$python --version 2>/dev/null || echo 'cannot be run'))"; \
	done; \
	echo "minillm needs Python 3.11, 3.12 or 3.13 (3.14: not tested). Tried:$$found." >&2; \
	echo 'Install one ("apt install python3 python3-venv", "uv python install 3.13", or from python.org) and name it:' \
	  'make PYTHON=/path/to/python3.13' >&2; exit 1

# torch goes first, alone and by exact version: next to open ranges pip may download several builds of it.
$(READY): requirements.lock pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Only some tests need Ray, which is large: the demo and the lessons do without it.
$(RAY): requirements-ray.lock $(READY)
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --requirement requirements-ray.lock
	@touch $@

demo: $(READY)
	$(BIN)/python -m minillm.course.making.build demo

check: lint types
	PYTHONHASHSEED=0 $(IN_PARALLEL) $(call marked,key) -m 'key and not proof' $(PYTEST)

test: $(READY) $(RAY)
	PYTHONHASHSEED=0 $(IN_PARALLEL) --nbval --nbval-current-env -m 'not proof' $(PYTEST)

proofs: $(READY) $(RAY)
	PYTHONHASHSEED=0 $(IN_PARALLEL) --nbval --nbval-current-env $(call marked,proof) notebooks -m proof $(PYTEST)

explore: $(READY)
	@seed=$(or $(SEED),$$RANDOM$$RANDOM); echo "the same again: make explore SEED=$$seed EXAMPLES=$(EXAMPLES)"; \
	MINILLM_TEST_SEED=$$seed MINILLM_TEST_EXAMPLES=$(EXAMPLES) PYTHONHASHSEED=$$seed \
	$(IN_PARALLEL) tests -m 'explore or hypothesis' --hypothesis-seed=$$seed $(PYTEST)

lab: $(READY)
	$(BIN)/python -m minillm.course.making.build lab
	$(BIN)/jupyter lab --notebook-dir lab --LabApp.news_url=None $(ARGS)

notebooks: $(READY)
	$(BIN)/python -m minillm.course.making.build notebooks $(NOTEBOOK) $(ARGS)

# Triton's Python backend needs numpy 1, so Triton has an environment of its own, made by the same Python.
build/triton/venv/.installed: tools/triton/requirements.txt | $(READY)
	$(BIN)/python -m venv build/triton/venv
	build/triton/venv/bin/python -m pip install --quiet --requirement tools/triton/requirements.txt
	@touch $@

triton: build/triton/venv/.installed
	$(BIN)/python tools/triton_server.py $(ARGS)

site: $(READY)
	$(BIN)/python tools/build_site.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(READY)
	$(BIN)/python .ci/lock.py $(if $(UPGRADE),--upgrade)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
