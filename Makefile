# make train   build .venv if needed, then train the main recipe (on a GPU if there is one, else on the CPU)
# make test    build .venv if needed, then run the tests
# make venv    the environment alone
# make lint    ruff; make format repairs what it can
# make bench   train the main recipe with three seeds and print the table (SEEDS="1 2 3" RECIPE=tiny_m3.yaml)
# make clean   remove caches and build outputs; .venv and runs/ stay

# The first Python that fits; a name may exist and not run, so each is tried.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3 python3.11 python3.12; do $$p -c '$(FITS)' 2>/dev/null && echo $$p && break; done)
RECIPE ?= tiny_m3.yaml
SEEDS ?= 1 2 3
EXTRA := $(if $(shell command -v nvidia-smi 2>/dev/null),gpu,cpu)
BIN := .venv/bin
STAMP := .venv/.lockstep-$(EXTRA)

.DEFAULT_GOAL := help
.PHONY: help venv train test lint format bench clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

venv: $(STAMP)

$(STAMP): pyproject.toml scripts/setup_venv.sh
	@PYTHON="$(PYTHON)" bash scripts/setup_venv.sh $(EXTRA)
	@touch $@

train: $(STAMP)
	@$(BIN)/python scripts/train_grpo.py --config $(RECIPE)

test: $(STAMP)
	@$(BIN)/python -m pytest

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP)
	@$(BIN)/python scripts/bench_train.py --config $(RECIPE) --seeds $(SEEDS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find kernels quant rollout rl scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
