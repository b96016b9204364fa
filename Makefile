# The front door. `make help` lists what there is; the logic of `make env` lives in tools/make_env.py.

PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
# In the order of tests/conftest.py, which has the long files first.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help env campaign campaign-vllm campaign-sglang lint test test-own test-core soak mutation wheel clean env-vllm test-vllm env-sglang test-sglang models

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

env: ## build .venv with the kvguard script in it (PYTHON=python3.12 picks another Python)
	@$(PYTHON) tools/make_env.py

campaign: env ## run the fault-injection campaign (ARGS="--trials 50 --seed 7")
	@$(BIN)/kvguard campaign $(ARGS)

lint: env ## ruff and mypy
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

test: lint test-own test-vllm test-sglang ## lint, then every test but the million-operation soak (PYTEST_ARGS="-n 4 --dist loadfile")

test-own: env models ## the tests that need no engine but our own
	$(PYTEST) -m "not soak"

test-core: env ## the quick tests of the core, the kernels and the house
	$(PYTEST) -m "not slow and not soak and not mutation" $(wildcard tests/core tests/kernels tests/house)

soak: env ## a million random guard operations against the plain model
	$(PYTEST) -m soak

mutation: env ## take one check out at a time; each must turn a test red
	$(PYTEST) -m mutation

wheel: env ## build the sdist and the wheel into dist/
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

clean: ## remove what was built, but neither .venv nor runs/
	rm -rf build dist kvguard.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . \( -path './.venv*' -o -path ./.git -o -path ./runs \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

env-vllm: ## build .venv-vllm: vLLM on the CPU with kvguard in it
	@$(PYTHON) -m tools.make_engine_env vllm

env-sglang: ## build .venv-sglang: SGLang on the CPU with kvguard in it
	@$(PYTHON) -m tools.make_engine_env sglang

models: env ## download and prepare SmolLM2 as bf16 and INT4 checkpoints, in .cache/models
	@$(BIN)/python -m tools.prepare_smollm2

campaign-vllm: env-vllm ## page faults inside a real vLLM, both runners (ARGS="--runner v1")
	@.venv-vllm/bin/kvguard campaign --engine vllm $(ARGS)

campaign-sglang: env-sglang ## page faults inside a real SGLang scheduler, both loops (ARGS="--page-size 16")
	@.venv-sglang/bin/kvguard campaign --engine sglang $(ARGS)

test-vllm: env-vllm models ## the tests of the vLLM adapter, in .venv-vllm
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest $(PYTEST_ARGS) tests/vllm

test-sglang: env-sglang models ## the tests of SGLang, in .venv-sglang
	OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest $(PYTEST_ARGS) tests/sglang
