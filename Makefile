# Every target makes the environment it needs; `make help` lists them.

# The first of the given commands, or else of pyenv's versions, that is Python $(2) or newer.
find_python = $(firstword $(foreach python, \
	$(1) $(sort $(wildcard $(shell pyenv root 2>/dev/null)/versions/3.*/bin/python)), \
	$(shell $(python) -c 'import sys; sys.exit(sys.version_info < ($(2)))' 2>/dev/null && echo $(python))))
PYTHON ?= $(call find_python,python3.11 python3.12 python3,3$(comma)11)
PYTHON_LATEST ?= $(call find_python,python3.12 python3,3$(comma)12)
comma := ,

# pip's warnings are about the package index, not about this project: only its errors are shown.
PIP_INSTALL := -m pip install -qq --disable-pip-version-check
DEMO_DIR ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
DEMO_FLAGS ?=
PYTEST_FLAGS ?= -q -n 2

.PHONY: help demo test lint test-latest clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         train the paper's systems on handwritten digits: a table and a figure"
	@echo "make test         the tests"
	@echo "make lint         ruff check, ruff format --check, mypy"
	@echo "make test-latest  the tests on Python 3.12 with the newest jax and flax, if there is one"
	@echo "make clean        remove the environments and every cache"

demo: .venv/installed
	.venv/bin/python experiments/compare.py --config=configs/digits.py --workdir=$(DEMO_DIR) $(DEMO_FLAGS)

test: .venv/installed
	.venv/bin/python -m pytest $(PYTEST_FLAGS)

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

ifeq ($(strip $(PYTHON_LATEST)),)
test-latest:
	@echo "No Python 3.12 found, nothing tested with the newest jax (set PYTHON_LATEST to name one)."
else
test-latest: .venv-latest/installed
	.venv-latest/bin/python -m pytest $(PYTEST_FLAGS)
endif

.venv/installed: setup.cfg constraints.txt
	$(if $(strip $(PYTHON)),,$(error No Python 3.11 or newer found: install one, or set PYTHON))
	@echo "Installing into .venv with $(PYTHON) (one to three minutes, once) ..."
	@$(PYTHON) -m venv --clear .venv
	@.venv/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[train,tfds,test]'
	@touch $@

.venv-latest/installed: setup.cfg constraints.txt
	@echo "Installing into .venv-latest with $(PYTHON_LATEST) (one to three minutes, once) ..."
	@$(PYTHON_LATEST) -m venv --clear .venv-latest
	@grep -vE '^(jax|jaxlib|flax)==' constraints.txt > .venv-latest/constraints.txt
	@.venv-latest/bin/python $(PIP_INSTALL) -c .venv-latest/constraints.txt -e '.[train,tfds,test]'
	@.venv-latest/bin/python -m pip list 2>/dev/null | grep -E '^(jax|jaxlib|flax) '
	@touch $@

clean:
	rm -rf .venv .venv-latest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
