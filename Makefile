# make          install into .venv (a second run installs nothing)
# make demo     verify the Token2Wav decoder at released sizes and show what was rewritten
# make test     lint, type check and test on the CPU        PYTEST_ARGS="-k ring -x" narrows the tests
# make gpu-test tests that need a CUDA device               GPU_PYTHON=python3 uses another environment's torch
# make lint     ruff and mypy only
# make clean    remove .venv and everything that was generated

VENV        := .venv
BIN         := $(VENV)/bin
STAMP       := $(VENV)/.installed
PIP         := $(BIN)/python -m pip --disable-pip-version-check
TORCH       ?= torch==2.13.0
# Tracing and rewriting use one core: two processes, one thread each, take two thirds of the time of one with two.
PROCESSES   ?= -n 2 --dist worksteal
PYTEST_ARGS ?=
GPU_PYTHON  ?=

# The first interpreter that is new enough; PYTHON=... overrides the search.
NEW_ENOUGH  := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON      ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
                   if $$p -c '$(NEW_ENOUGH)' >/dev/null 2>&1; then echo $$p; break; fi; done)

.DELETE_ON_ERROR:
.PHONY: venv demo test lint clean gpu-test

venv: $(STAMP)

# torch comes first and alone, so that the build which pip finds for this machine is the one that stays. The
# vendors' packages pin old versions of torch and need no more than the `vendors` extra of what they declare.
$(STAMP): pyproject.toml Makefile
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null; then \
	    echo "make: cadence_fx needs Python 3.11 or newer and found none; name one with PYTHON=/path/to/python3" >&2; \
	    exit 1; fi
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --progress-bar off "$(TORCH)"
	$(PIP) install --progress-bar off -e ".[test,cli,viz,vendors]"
	$(PIP) install --progress-bar off --no-deps stepaudio2-minicpmo==0.1.1 moshi==0.2.13
	@touch $@

demo: $(STAMP)
	$(BIN)/cadence-fx demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest --timeout 900 $(PROCESSES) $(PYTEST_ARGS)

gpu-test: $(if $(GPU_PYTHON),,$(STAMP))
	@$(or $(GPU_PYTHON),$(BIN)/python) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	    echo "make: torch sees no CUDA device; name an environment that does with GPU_PYTHON=/path/to/python3" >&2; \
	    exit 1; }
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -m gpu $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist graphs *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
