# make reproduce: set up .venv and reproduce the paper on this machine. make test: set up .venv and run every check.
# Another Python or torch, after make clean: make test PYTHON=python3.10 TORCH='torch==2.11.0 torchvision==0.26.0'
PYTHON ?= python3
TORCH ?= torch==2.13.0 torchvision==0.28.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Some images set it. Then no module that is imported is ever cached, and every process of the tests compiles all it needs.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: reproduce test lint pytest docs pictures bench clean

reproduce: $(READY)
	$(BIN)/mvngrad reproduce

# At once, because mypy uses one core only.
test: $(READY)
	$(MAKE) --no-print-directory --jobs=2 lint pytest

# One worker more than cores, because some tests wait for other processes.
pytest: $(READY)
	$(BIN)/python -m pytest -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# First the experiments that need no GPU, for their figures and the report; finished ones are not run again.
docs: $(READY)
	$(BIN)/mvngrad reproduce --runs docs/_build/runs
	$(BIN)/sphinx-build --quiet --fail-on-warning docs docs/_build/html
	@echo docs/_build/html/index.html

pictures: $(READY)
	$(BIN)/python docs/pictures.py

bench: $(READY)
	$(BIN)/python -m benchmarks.step

# Wheels and source distributions of both packages, as the release workflow builds them.
release: $(READY)
	rm -rf dist
	$(BIN)/pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python -m build --quiet --outdir dist/mvngrad .
	$(BIN)/python -m build --quiet --outdir dist/mvngrad-lab lab
	$(BIN)/twine check --strict dist/*/*

# The library's tests with one torch, in an environment of its own, and the table of versions in results/.
torch-floor: RELEASE := torch==2.11.0
torch-pinned: RELEASE := torch==2.13.0
torch-newest: RELEASE := torch
torch-floor torch-pinned torch-newest:
	$(PYTHON) -m venv $(VENV)-$@
	$(VENV)-$@/bin/pip install --quiet --disable-pip-version-check --upgrade pip
	$(VENV)-$@/bin/pip install --quiet --disable-pip-version-check --upgrade '$(RELEASE)'
	$(VENV)-$@/bin/pip install --quiet --disable-pip-version-check '$(RELEASE)' --editable '.[dev]' --editable ./lab
	version=$$($(VENV)-$@/bin/python -c 'import torch; print(torch.__version__.partition("+")[0])'); \
	$(VENV)-$@/bin/python -m pytest tests src -n auto --dist worksteal --record results/torch-$$version.json; \
	status=$$?; $(VENV)-$@/bin/python -m benchmarks.versions; exit $$status

clean:
	rm -rf $(VENV) $(VENV)-torch-* build dist docs/_build

# torch first and by its exact version: a range would fetch the newest build with gigabytes of CUDA. pip first of all:
# the one that Python 3.10 brings had not resolved these requirements after 17 minutes, a current one takes 1. Modules are
# compiled when they are first imported: most never are, and compiling them all would take another minute.
$(READY): pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev,docs]' --editable './lab[postgres,slurm,zoo]'
	touch $@
