# Every target makes its own virtual environment in .venv first; nothing has to be installed by hand.
# It is made anew when pyproject.toml changes. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
TORCH ?= torch==2.13.0
CLIENTS ?= accelerate jax
SEEDS ?= 0:100000
JOBS ?= $(shell nproc)
VENV := .venv
BIN := $(VENV)/bin
# Tests that must not run beside each other, or share a fixture, are in one group, which one process runs. Most of them wait for
# something, so there are more processes than cores.
TEST_JOBS ?= $(shell echo $$(($(JOBS) * 3)))
PARALLEL := --numprocesses $(TEST_JOBS) --dist loadgroup
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install

# Without .pyc files every start would compile the package anew: in the tests, in the demo and in the figures.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo recording test test-all lint bench docs dist simulate soak clean
.DEFAULT_GOAL := help
# The targets share one environment.
.NOTPARALLEL:

help:
	@echo "make demo      a killed worker, a hung one, a lost node: watch a job recover from each"
	@echo "make recording the demo as a picture that moves, docs/images/demo.svg; best on a machine that does nothing else"
	@echo "make test      every test that needs neither root nor torch"
	@echo "make test-all  lint, docs and every test, those with torch too"
	@echo "make lint      ruff and mypy --strict"
	@echo "make docs      the documentation, into site/"
	@echo "make dist      the wheel and the source archive, into dist/, checked and tried alone; the same bytes wherever they are built"
	@echo "make bench     the figures, side by side with 0.1.0, and with torchrun where torch can be installed; BENCHMARKS.md, on a machine at rest"
	@echo "make simulate  a whole cluster on virtual time, for each seed of SEEDS=0:100000, and what 10,000 nodes cost the store"
	@echo "make soak      a thousand random faults on five machines, a thousand cycles of start and kill, a million malformed requests"
	@echo "make clean     remove everything that these targets made"

demo: $(VENV)/.base
	$(BIN)/rallypoint demo

recording: $(VENV)/.base
	$(BIN)/python -m tools.recording docs/images/demo.svg

test: $(VENV)/.test
	$(BIN)/pytest $(PARALLEL) -m "not torch and not root and not soak"

# While torch is installed, all tests are collected once: then none of the processes that run them has to compile them.
test-all: $(VENV)/.all lint docs build/etcd/.debian build/prometheus/.debian build/browser/.ready build/schedulers/.ready
	@$(BIN)/pytest --collect-only -qq > /dev/null & $(MAKE) --no-print-directory $(VENV)/.torch && wait
	$(BIN)/pytest $(PARALLEL) -m "not soak"

soak: $(VENV)/.test
	@$(MAKE) --no-print-directory $(VENV)/.torch || echo "soak: no torch here, so what needs it is skipped"
	$(BIN)/pytest -m soak

simulate: $(VENV)/.test
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(JOBS) --histogram
	$(BIN)/python -m tests.simulation.scale

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	rm -rf site
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir tools/site --doctree-dir build/doctrees docs site

dist: $(VENV)/.base
	@rm -rf dist
	$(PIP) build
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/python -m tools.release.check dist
	@cd dist && sha256sum *

bench: $(VENV)/.base
	@$(MAKE) --no-print-directory $(VENV)/.torch || echo "bench: no torch here, so there is no torchrun to compare with"
	$(BIN)/python -m benchmarks --publish

clean:
	rm -rf $(VENV) build dist site benchmarks/results .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "rallypoint needs Python 3.10 or later; this is " + sys.version)'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip # before 25.1 it writes commands that import re, which costs them 5 ms at every start
	$(PIP) --editable .
	@touch $@

$(VENV)/.test $(VENV)/.lint $(VENV)/.docs: $(VENV)/.%: $(VENV)/.base
	$(PIP) --editable ".[$*]"
	@touch $@

# All three at once take a third of the time.
$(VENV)/.all: $(VENV)/.base
	$(PIP) --editable ".[test,lint,docs]"
	@touch $(VENV)/.test $(VENV)/.lint $(VENV)/.docs $@

# Debian's etcd, an older one than the wheel's, and promtool are only unpacked; without them the tests that want them are skipped.
build/etcd/.debian: PACKAGE := etcd-server
build/prometheus/.debian: PACKAGE := prometheus
build/etcd/.debian build/prometheus/.debian:
	@mkdir -p $(@D)
	@cd $(@D) && apt-get -qq download $(PACKAGE) && dpkg -x $(PACKAGE)_*.deb debian \
		|| echo "Debian's $(PACKAGE) could not be had; the tests that want it are skipped" >&2
	@touch $@

# A browser has too many libraries to be unpacked beside the system; without it the tests of the web page in one are skipped.
build/browser/.ready: $(VENV)/.all
	@mkdir -p $(@D)
	@{ command -v chromium > /dev/null || apt-get -qq install -y --no-install-recommends chromium > /dev/null; } \
		&& $(PIP) playwright && cd $(@D) && tar xzf "$$(npm pack --silent axe-core)" --strip-components=1 package/axe.min.js \
		|| echo "chromium, playwright or axe-core could not be had; the tests that want them are skipped" >&2
	@touch $@

# Slurm and Open MPI load parts of themselves from where they were installed, and sshd refuses to run elsewhere.
build/schedulers/.ready:
	@mkdir -p $(@D)
	@command -v slurmctld > /dev/null && command -v mpirun > /dev/null && test -x /usr/sbin/sshd \
		|| apt-get -qq install -y --no-install-recommends slurmctld slurmd slurm-client munge openmpi-bin openssh-server > /dev/null \
		|| echo "Slurm, Open MPI or sshd could not be had; the tests that want it are skipped" >&2
	@touch $@

# Of torch's thousands of files only those that are used are compiled: by its first start, which is this one.
$(VENV)/.torch: $(VENV)/.base
	@{ $(PIP) --no-compile $(TORCH) numpy && $(BIN)/torchrun --help > /dev/null; } || { echo "$(TORCH) could not be installed; 'make test' runs all that does without it" >&2; exit 1; }
	@$(PIP) --no-compile $(CLIENTS) || echo "not all of $(CLIENTS) could be installed; the tests that run them are skipped" >&2
	@touch $@
