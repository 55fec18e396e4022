# Each target does its own set-up: a virtual environment in .venv with the constrained versions.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint train clean

demo: .venv/ready
	$(BIN)/kvloom compare

test: .venv/ready
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

train: .venv/ready
	$(BIN)/python -m kvloom.reference.train

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
