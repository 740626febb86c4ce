# Everything runs from a virtual environment that `make install` makes; all other targets install first if need be.
#
#   make serve [PORT=8000] [WEIGHTS=weights] [ARGS="--max-running 64"]
#   make test [JOBS=4] [ARGS="tests/test_page.py"]
#   make train DATA="books notes.txt" [OUT=out] [ARGS="--preset nano --max-minutes 10"]
#   make clients [ONLY="openai-3 llm"]          real clients of /v1/completions, each in an environment of its own
#   make peers [ARGS="--models default,C"]      other engines and servers beside ours, installed on first use
#   make install TORCH=torch==2.12.0            another torch than the pinned one
#   make install PIP_ARGS="--index-url URL"     an index of CPU builds, an offline folder (--no-index --find-links DIR)

PYTHON ?= python3
PIP_ARGS ?=
PORT ?=
WEIGHTS ?=
OUT ?= out
DATA ?=
ARGS ?=
ONLY ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# The torch that was asked for last stays; asking for another one installs again.
TORCH ?= $(or $(shell cat $(VENV)/torch 2>/dev/null),torch==2.13.0)

.DEFAULT_GOAL := help
FORCE:

.PHONY: help FORCE install serve test train bench peers lint clients

help:
	@sed -n '3,9s/^# *//p' Makefile; echo "targets: install serve test train bench peers lint clients"

# The native kernels, where there is a C++ compiler; a moment where they are built already. torch computes without them.
install: $(VENV)/installed
	@$(BIN)/python -m app compile --quiet || true

$(VENV)/torch: FORCE
	@mkdir -p $(VENV); echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/torch
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: inkstream needs Python 3.11 or newer; point to one with PYTHON=python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment (Debian: apt install python3-venv)"; exit 2; }
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(VENV)/constraints.txt "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(VENV)/constraints.txt -e ".[dev]"
	@touch $@

serve: install
	@exec $(BIN)/python -m app serve $(if $(PORT),--port $(PORT)) $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(ARGS)

# JOBS test processes, a file each, and what they start: so many threads as there are cores in each of them would be in
# each other's way, and those that spin would starve the others. Tests of what threads change ask for their number.
# JOBS=0: all in one process, as --pdb needs it.
test: install
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

train: install
	@test -n "$(DATA)" || { echo 'error: say what to train on: make train DATA="path ..."'; exit 2; }
	@exec $(BIN)/python -m model.train --data $(DATA) --out "$(OUT)" $(or $(ARGS),--max-minutes 60)

bench: install
	$(BIN)/python -m benchmarks.local $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(ARGS)

peers: install
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m benchmarks.peers $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clients: install
	PYTHONPATH=tests PIP_ARGS="$(PIP_ARGS)" OMP_WAIT_POLICY=PASSIVE $(BIN)/python tests/clients/run.py $(ONLY) $(ARGS)
