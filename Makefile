# `make demo`, `make test`, `make test-browser` and `make docs` set up in .venv what each needs and no more; all are quick
# the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-browser docs lint setup clean

demo: $(VENV)/.demo
	$(BIN)/netgym compare examples/digits_wan.yaml

test: lint
	$(BIN)/python -m pytest --numprocesses auto

# Looks at pages in Chromium; where there is none it says how to have one, and passes.
test-browser: $(VENV)/.browser
	$(BIN)/python -m pytest -m browser -rs tests/browser

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

lint: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

setup: $(VENV)/.ready

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/.ready: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev,docs,fast]'
	touch $@

$(VENV)/.browser: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,docs]'
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
