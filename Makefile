# Each target does its own set-up: a virtual environment in .venv with the package and its tools.
# All that must be there before is Python 3.11 or newer with venv.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIVE := .venv-live
JOBS ?= 2
PACK := build/demo-pack
LEAK := build/leak.png
SITE := build/site

.DELETE_ON_ERROR:
.PHONY: help setup demo test nightly notebooks bench docs wheel live lint format types coverage clean distclean

help:
	@echo 'make demo      make a golden pack, check a good kernel and a broken one against it, see a leak'
	@echo 'make test      run the tests, JOBS=$(JOBS) at a time'
	@echo 'make nightly   run the tests that take minutes'
	@echo 'make notebooks run the notebooks, keep what they show in them, draw the pictures of docs/accumulation.md'
	@echo 'make bench     measure speed beside peers, BENCH="NAME ..." for some of it'
	@echo 'make docs      build the site of docs/ in $(SITE), warnings as errors'
	@echo 'make wheel     build the distribution and test it in an environment of its own'
	@echo 'make live      compare the presets with the libraries themselves, in $(LIVE), on fresh random input;'
	@echo '               it installs PyTorch, which is large where the package index has no CPU build'
	@echo 'make lint      check style and types'
	@echo 'make format    put the source in its standard form'
	@echo 'make coverage  run the tests and show the lines that none of them reaches'
	@echo 'make clean     remove what the targets above left, distclean the environments too'

setup: $(STAMP)

$(STAMP): pyproject.toml
	@./.ci/environment $(VENV)
	@echo '== Installing flamia-ref with its development tools in $(VENV), a minute or two'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: setup
	@mkdir -p $(dir $(PACK))
	@echo '== 1 of 4: making a golden pack, $(PACK)'
	@$(BIN)/flamia-ref golden make $(PACK) --recipe flamia-mxfp8-folded --suite smoke --force
	@echo
	@echo '== 2 of 4: checking a kernel that is right, the simulator itself'
	@$(BIN)/flamia-ref golden check $(PACK) --kernel examples.kernels:simulator
	@echo
	@echo '== 3 of 4: checking a kernel with one scale byte of V off by one'
	@status=0; \
	$(BIN)/flamia-ref golden check $(PACK) --kernel examples.kernels:v_scale_off_by_one \
		|| status=$$?; \
	if [ $$status -ne 1 ]; then \
		echo "demo: expected exit status 1, a mismatch, but got $$status" >&2; exit 1; \
	fi
	@echo
	@echo '== 4 of 4: a later token of V changed: which outputs move that must not? Drawn in $(LEAK)'
	@$(BIN)/flamia-ref leak demo --picture $(LEAK) --force
	@echo
	@echo '== As it should: the first kernel passed, the second was found out (exit status 1), and of four recipes one leaks.'

test: setup
	@echo '== Testing, $(JOBS) at a time'
	@$(BIN)/python -m pytest -n $(JOBS)

nightly: setup live
	@$(BIN)/python -m pytest -m nightly -n $(JOBS)

notebooks: setup
	@$(BIN)/python notebooks/execute.py
	@$(BIN)/python docs/accumulation.py

bench: setup
	@$(BIN)/python -m benchmarks $(BENCH)

docs: $(VENV)/.docs
	@echo '== Building the site in $(SITE)'
	@rm -rf $(SITE)
	@$(BIN)/python -m sphinx -q -E -W --keep-going -c docs -d build/site-cache . $(SITE)
	@echo '== Begin with $(SITE)/index.html'

$(VENV)/.docs: $(STAMP)
	@echo '== Installing what builds the site in $(VENV)'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[docs]'
	@touch $@

wheel: setup
	@echo '== Building the distribution and testing it away from the checkout'
	@$(BIN)/python -m pytest -m wheel

live: $(LIVE)/.installed
	@echo '== Comparing the presets with the libraries themselves'
	@FLAMIA_LIVE_REQUIRED=1 $(LIVE)/bin/python -m pytest tests/formats/live

$(LIVE)/.installed: pyproject.toml
	@./.ci/environment $(LIVE)
	@echo '== Installing flamia-ref and the libraries it is compared with in $(LIVE), a minute or two'
	@$(LIVE)/bin/python -m pip install -qq --disable-pip-version-check --no-compile \
		--editable '.[jax,properties,libraries]'
	@touch $@

lint: setup
	@echo '== Checking style'
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@echo '== Checking types'
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

coverage: setup
	@$(BIN)/python -m pytest -n $(JOBS) --cov --cov-report=term

clean:
	@rm -rf build dist *.egg-info .cache .coverage .coverage.* htmlcov \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache

distclean: clean
	@rm -rf $(VENV) $(LIVE)
