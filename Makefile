# `make demo`, `make test`, `make test-all`, `make test-browser` and `make docs` set up in .venv what each needs and no more; all are quick
# the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# What is imported is compiled, once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-browser bench bench-gate release wheels docs lint suite ray rates setup clean

demo: $(VENV)/.demo
	$(BIN)/netgym compare examples/digits_wan.yaml

# Tests of Ray and of rates of links have time-outs, and mostly wait: where root starts them they go before the rest, and beside it.
# Where Ray was used a process cannot be forked any more, so they are a run of their own. Every part runs, whatever failed before it.
test: setup
	$(MAKE) --jobs=4 --keep-going lint ray rates suite

suite: $(VENV)/.compiled
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --ignore tests/test_ray.py -m 'not browser and not rates and not thorough'

ray: $(VENV)/.compiled  # whose processes would go behind all others
	RAY_worker_niceness=0 nice -n -10 $(BIN)/python -m pytest tests/test_ray.py

rates: $(VENV)/.compiled
	nice -n -15 $(BIN)/python -m pytest tests/test_probe.py tests/test_mtu.py -m rates

# The pages with all notebooks, the tests marked `thorough`, and the long soaks, about two hours: a million damaged files, 2,000 networks that fail, 500 networks asked in two orders, 500 strategies, 100 kills, 50 broken runs, 500 experiments. What they find
# lies in build/soak, one line of JSON a piece; docs/promises.md tells what they found. SOAK=10 runs a tenth of each.
SOAK ?= 1
FUZZED := flows:300000 topology:220000 traces:220000 checkpoint:80000 foreign:80000 experiment:40000
FUZZED_GUIDED := flows:20000 topology:15000 traces:10000 checkpoint:5000 foreign:5000 experiment:5000
test-all: test docs $(VENV)/.soak
	$(BIN)/python -m pytest --ignore tests/test_ray.py -m thorough
	$(BIN)/python -m pytest tests/test_ray.py -m thorough
	for each in $(FUZZED); do $(BIN)/python tests/soak/fuzz.py $${each%:*} --with random \
		--inputs $$(($${each#*:} / $(SOAK))) || exit 1; done
	for each in $(FUZZED_GUIDED); do $(BIN)/python tests/soak/fuzz.py $${each%:*} --with atheris \
		--inputs $$(($${each#*:} / $(SOAK))) || exit 1; done
	$(BIN)/python tests/soak/fault_scenarios.py --scenarios $$((2000 / $(SOAK)))
	$(BIN)/python tests/soak/question_orders.py --networks $$((500 / $(SOAK)))
	$(BIN)/python tests/soak/own_strategies.py --strategies $$((500 / $(SOAK)))
	$(BIN)/python tests/frozen/make.py compare
	$(BIN)/python tests/soak/kills.py --kills $$((100 / $(SOAK)))
	$(BIN)/python tests/soak/broken_pairs.py --schedules $$((50 / $(SOAK)))
	$(BIN)/python tests/differential/soak.py --programs $$((5000 / $(SOAK))) --experiments $$((500 / $(SOAK)))

# Looks at pages in Chromium; where there is none it says how to have one, and passes.
test-browser: $(VENV)/.browser
	$(BIN)/python -m pytest -m browser -rs tests/browser

# Figures of docs/speed.md against another commit, built alongside in a worktree that goes again: some minutes. Without AGAINST: the
# last release, or where there is none yesterday's commit.
AGAINST ?= $(or $(shell git describe --tags --match 'v*' --abbrev=0 2>/dev/null),$(shell git rev-list -1 --before=yesterday HEAD))
bench: setup
	set -e; before=$$(mktemp -d); \
	trap "git worktree remove --force $$before/tree; rmdir $$before" EXIT; trap 'exit 130' INT TERM; \
	git worktree add --quiet --detach $$before/tree $(AGAINST); \
	(cd $$before/tree && $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace >/dev/null); \
	$(BIN)/python benchmarks/bench.py --against $$before/tree $(GATE) $(ROWS)

# Before a release: fails, and names the rows, where one takes 5 % more processor time or memory than at AGAINST.
bench-gate: GATE := --limit 1.05 --rounds 9
bench-gate: bench

# A release of the committed version: all rows of the gate, then wheels, then a tag, which is not pushed.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
release:
	@git diff --quiet HEAD || { echo "A release is a commit: commit your changes first"; exit 1; }
	@! git rev-parse --quiet --verify refs/tags/v$(VERSION) || { echo "v$(VERSION) exists: raise version in pyproject.toml"; exit 1; }
	$(MAKE) bench-gate ROWS=
	$(MAKE) wheels
	git tag --annotate --message "NetGym $(VERSION)" v$(VERSION)

# A wheel for each of these Pythons that is here, installed in an empty environment.
PYTHONS ?= 3.11 3.12 3.13 3.14
wheels:
	bash tests/wheels.sh $(PYTHONS)

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

lint: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

setup: $(VENV)/.ready

# What is never imported need not be compiled: of most packages that is most. The pip that Python 3.11 brings takes three times as long.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# Type checkers follow this mode of editable installs, whose end setuptools announces at each.
EDITABLE := PYTHONWARNINGS=ignore $(INSTALL) --no-build-isolation --config-settings editable_mode=compat --editable

# The engine is compiled while torch, most of what is downloaded, is installed: pip finds it compiled afterwards.
$(VENV)/.engine: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) 'mypy>=1.15' 'pip>=26' 'setuptools>=77'
	$(BIN)/python setup.py --quiet build_ext --inplace >/dev/null 2>&1 & $(INSTALL) torch && wait
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.engine
	$(EDITABLE) '.[demo]'
	touch $@

$(VENV)/.ready: pyproject.toml $(VENV)/.engine
	$(EDITABLE) '.[demo,dev,docs]'
	touch $(VENV)/.demo $@

# What all tests import is compiled here, beside the check of types, and not by each of their processes at once.
$(VENV)/.compiled: $(VENV)/.ready
	-$(BIN)/python -m pytest --collect-only --quiet >/dev/null
	touch $@

$(VENV)/.soak: $(VENV)/.ready
	$(EDITABLE) '.[soak]'
	touch $@

$(VENV)/.browser: pyproject.toml $(VENV)/.engine
	$(EDITABLE) '.[demo,dev,docs,browser]'
	touch $(VENV)/.demo $(VENV)/.ready $@

$(VENV)/.docs: $(VENV)/.demo
	$(EDITABLE) '.[demo,docs]'
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
