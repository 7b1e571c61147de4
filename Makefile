TORCH := 2.13.0
TORCHREC := 1.8.0
FBGEMM := 1.8.0

# The first that runs (a version manager's shim may not) and is of a version that torch, torchrec and FBGEMM-GPU have wheels for.
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c "$(USABLE)" >/dev/null 2>&1 && echo $$python && break; done)

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --quiet --no-input --disable-pip-version-check
# The files that a machine with an NVIDIA driver has, as jagged/versions.py looks for them.
FBGEMM_PACKAGE := $(if $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/dxg),fbgemm-gpu,fbgemm-gpu-cpu)

# Two processes of one thread each: small tensors gain nothing from more threads.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal
CODE := find jagged ops modules -name '*.py' -type f
TESTS := find tests -name '*.py' -type f

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-long mutants lint types docs package clean

help: ## show this list
	@echo "make TARGET, where TARGET is one of (each does the set-up it needs):"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime ## train on a built-in sample, evaluate, recommend: minutes on two CPU cores
	@$(PY) -m jagged demo

# Files of tests of which nothing changed since they passed are left out here, and run in test-all; see tests/proven.py.
test: PROVEN = --proven=$(if $(COVERED),run,skip)
test: $(VENV)/.dev ## the Triton kernels that changed, under the interpreter, then all other tests
	@echo "Testing the Triton kernels under the interpreter"
	@TRITON_INTERPRET=1 $(PYTEST) -m interpret tests/ops $(PROVEN) $(if $(COVERED),--cov --cov-report=)
	@echo "Testing everything else"
	@$(CODE) -exec cat {} + | wc -l > $(VENV)/.code-lines; $(TESTS) -exec cat {} + | wc -l | \
		awk -v code=$$(cat $(VENV)/.code-lines) '{ printf "%d lines of tests, %d of code: %.2f to 1\n", $$1, code, $$1 / code }'
	@$(PYTEST) $(PROVEN) $(if $(COVERED),--cov --cov-append --cov-report=term:skip-covered)

test-all: COVERED = 1
test-all: test ## every test, and the lines that none runs; about twice as long

test-long: export JAGGED_TEST_LONG = 1
test-long: test-all ## the same with the full counts: hours

mutants: $(VENV)/.dev ## 100 small faults, each before the tests of its file; saved in tests/mutants.json; up to hours
	@$(PY) -m tests.mutants

lint: types ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: $(VENV)/.dev ## mypy
	@$(PY) -m mypy

docs: $(VENV)/.dev ## the site, in docs/_build/html
	@$(PY) -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

package: $(VENV)/.dev ## wheel and source distribution, in dist/, built and tried
	@rm -rf build dist
	@$(PY) -m build --no-isolation >/dev/null
	@JAGGED_WHEEL=$$(ls dist/*.whl) $(PY) -m pytest -q tests/test_packaging.py
	@ls dist/*

clean: ## remove the environment and what was built; runs/ stays
	rm -rf $(VENV) build dist docs/_build *.egg-info .coverage* .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that does not work (half made, or its Python is gone) is made anew.
ifneq ($(shell $(PY) -c "import pip; print('fine')" 2>/dev/null),fine)
.PHONY: $(VENV)/.python
endif
$(VENV)/.python:
	@if ! { $(PY) -c "$(USABLE)" && $(PY) -m pip --version; } >/dev/null 2>&1; then \
		if [ -z "$(PYTHON)" ]; then \
			echo "found no python3.11, python3.12 or python3 that runs, is Python 3.11 or 3.12 and has venv and ensurepip;" \
				"install one (Debian, Ubuntu: apt install python3-venv) or name one: make PYTHON=/path/to/python3.12" >&2; exit 2; \
		elif ! "$(PYTHON)" -c "$(USABLE)"; then \
			echo "PYTHON=$(PYTHON): found $$("$(PYTHON)" -V 2>&1)," \
				"expected Python 3.11 or 3.12 with venv and ensurepip" >&2; exit 2; \
		fi; \
		echo "Creating $(VENV) with $$("$(PYTHON)" -V)"; \
		"$(PYTHON)" -m venv --clear $(VENV) || exit; \
	fi
	@touch $@

$(VENV)/.runtime: $(VENV)/.python requirements/runtime.txt Makefile pyproject.toml
	@echo "Installing what jagged needs"
	@$(PIP) install --no-deps -r requirements/runtime.txt
	@echo "Installing torch $(TORCH), the largest download"
	@$(PIP) install torch==$(TORCH)
	@echo "Installing torchrec $(TORCHREC) and $(FBGEMM_PACKAGE) $(FBGEMM)"
	@$(PIP) install --no-deps torchrec==$(TORCHREC) $(FBGEMM_PACKAGE)==$(FBGEMM)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.txt
	@echo "Installing tools for tests, lint, docs and packaging"
	@$(PIP) install --no-deps -r requirements/dev.txt
	@touch $@
