# Everything runs in .venv, which `make setup` makes from a lock file (VENV=path: another place).
SHELL := bash
.DEFAULT_GOAL := help
VENV ?= .venv
export VENV
BIN := $(VENV)/bin
CORES := $(shell nproc 2>/dev/null || echo 1)
# Processes that run tests side by side, each whole files; 1 core and up to 8 GiB of memory each.
WORKERS ?= 2
# One process on this machine, on a free port.
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node 1
SMOLLM2 := models/smollm2-135m

.PHONY: help setup quickstart tiny chain test scale nightly faults soak lint doctor clean

help: ## Show these targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## Make .venv and install titan_rl and everything it needs (quick when done before)
	@scripts/setup.sh

quickstart: setup ## Train SmolLM2-135M on arithmetic with GRPO
	$(BIN)/python -m titan_rl.tools.smollm2 $(SMOLLM2)
	OMP_NUM_THREADS=$(CORES) $(TORCHRUN) -m titan_rl.train train_configs/smollm2_135m_arithmetic_grpo.toml

tiny: setup ## Pretrain a tiny model, then train it with GRPO
	OMP_NUM_THREADS=$(CORES) $(TORCHRUN) -m titan_rl.train train_configs/tiny_pretrain.toml
	OMP_NUM_THREADS=$(CORES) $(TORCHRUN) -m titan_rl.train train_configs/tiny_grpo.toml

chain: setup ## Pretrain and SFT a tiny model, then DPO, and a reward model with PPO after it
	for recipe in pretrain sft dpo reward_model ppo_reward_model; do \
		OMP_NUM_THREADS=$(CORES) $(TORCHRUN) -m titan_rl.train train_configs/tiny_$$recipe.toml || exit 1; \
	done

lint: setup ## Check style, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

test: lint ## Run lint, then all tests and doctests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 1 --doctest-modules titan_rl tests

scale: setup ## Run four ranks and two nodes, which CI does beside `make test`
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile -m scale tests

nightly: setup ## Run what `make test` leaves out: 8 ranks, compiled layers, more of `titan-rl check`
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly tests

faults: setup ## Kill, stop and corrupt runs at every point; results in outputs/faults.jsonl
	mkdir -p outputs && rm -f outputs/faults.jsonl
	OMP_NUM_THREADS=1 TITAN_RL_FAULT_RESULTS=$(CURDIR)/outputs/faults.jsonl \
		$(BIN)/python -m pytest -m "not nightly and not soak" tests/faults

soak: setup ## 200 steps with a rank killed now and then: the same end, and nothing that grows
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak tests/faults/test_soak.py

doctor: setup ## Say what this machine and this environment can run
	$(BIN)/titan-rl doctor

clean: ## Remove caches and build products; .venv, models and outputs stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find titan_rl tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
