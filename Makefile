# make quickstart   installs everything and runs the main job
# make test         installs everything and passes the tests
# make check        lint, format and types
# make docs         the guides as a site in build/site
# make audit        known vulnerabilities of the pinned packages; needs a network

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: install quickstart test test-slow check docs audit format clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

quickstart: $(READY)
	$(BIN)/fedweave run quickstart

# A file's tests stay together, since they share what they prepare; tests/conftest.py puts the longest files first.
test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not gpu" -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/mkdocs build --strict

# Strict: a package that could not be looked up is no package without faults.
audit: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check 'pip-audit>=2.7'
	$(BIN)/pip-audit --strict --no-deps --disable-pip -r constraints.txt

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
