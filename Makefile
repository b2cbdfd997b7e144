PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: quickstart test lint tables clean

quickstart: $(VENV)/installed
	$(BIN)/fastweights train --data shakespeare --mixers metala --steps 450 --lr 0.006 --out runs/quickstart

# A worker that died is not replaced: the test that killed it would be given to the next one.
test: $(VENV)/installed-test
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --max-worker-restart 0

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

tables: $(VENV)/installed
	$(BIN)/fastweights table --markdown > docs/tables.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "fastweights needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-%: $(VENV)/installed
	$(PIP) --editable '.[$*]'
	@touch $@
