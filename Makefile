# The first use of any target makes .venv and installs requirements.lock into it; later ones only when that file or
# pyproject.toml has changed. ARGS is passed on, as in: make train ARGS="--seed 2"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_FLAGS := -qq --disable-pip-version-check
TORCH := $(shell grep -o 'torch==[0-9.]*' pyproject.toml)

.PHONY: help sync train test lint format bench lock

help: ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /\1	/' | awk -F '\t' '{printf "  make %-8s %s\n", $$1, $$2}'

sync: $(INSTALLED) ## make .venv and install the locked versions

train: $(INSTALLED) ## train the task cartpole_balance with its recipe
	$(BIN)/lockstep train --task cartpole_balance $(ARGS)

test: $(INSTALLED) ## run the tests
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist loadgroup $(ARGS)

lint: $(INSTALLED) ## check style, types and import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED) ## mend style where it can be done mechanically
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(INSTALLED) ## measure training speed beside the peers (makes an environment for each the first time)
	$(BIN)/python benchmarks/peers/compare.py $(ARGS)

# A .venv without the stamp was interrupted or made by another tool: it is made anew, never mended.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "lockstep needs Python 3.11 or newer, and '$(PYTHON)' is not: make sync PYTHON=/path/to/python3.12" >&2; exit 2; }
	@test -e $@ || rm -rf $(VENV)
	@test -e $@ || echo "setting up $(VENV); this happens once and takes a few minutes"
	@test -e $@ || $(PYTHON) -m venv $(VENV)
	@rm -f $@
	@$(BIN)/python -m pip install $(PIP_FLAGS) --requirement requirements.lock
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --editable .
	@touch $@

# Local versions (+cpu) and the CUDA libraries that torch asks for are left out, so that the file serves every platform.
lock: ## write requirements.lock anew from pyproject.toml
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && \
	$(PYTHON) -m venv "$$work/venv" && \
	"$$work/venv/bin/python" -m pip install $(PIP_FLAGS) --editable '.[dev,jax,onnx,rsl-rl,rl-games,skrl,sb3,gymnasium,envpool,brax,gymnax,playground]' '$(TORCH)' && \
	"$$work/venv/bin/python" -m pip freeze --exclude-editable > "$$work/frozen" && \
	{ grep '^#' requirements.lock; grep -E -v '^(#|cuda-|triton|nvidia-[^m])' "$$work/frozen" | sed 's/+.*//'; } > "$$work/lock" && \
	mv "$$work/lock" requirements.lock
	@echo "requirements.lock is new: look at the difference, then run the tests"
