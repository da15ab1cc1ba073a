# Every target begins with the set-up; the stamp makes it free when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests start some hundred processes, which share what was compiled once.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-all bench lint style types fast-tests clean

setup: $(STAMP)

# torch is pinned to the release developed on, so that a small CPU build is taken where one is at hand.
# A new pip resolves in a third of the time; what is imported is compiled as it is, a fraction of all that is installed.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile -e '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/trainwright demo

lint: style types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Types are checked beside the tests, some of which wait rather than compute.
test: style
	@$(MAKE) --no-print-directory --jobs=2 types fast-tests

fast-tests: setup
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n 2 --dist loadfile --durations=25

# Full grids take minutes each: among them all plans of 480 small problems, and 50 kills.
test-all: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -o timeout=3600 --durations=50

bench: setup
	$(BIN)/python -m benchmarks.profiler.peaks

clean:
	rm -rf $(VENV) build dist *.egg-info
