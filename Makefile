# Every target first sets up what it needs: it finds a Python >= 3.11, creates .venv, installs the pinned packages and,
# for sandboxes, system packages. Later calls find the stamp files and start immediately; a change of pyproject.toml or
# constraints.txt updates .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
STAMP := $(VENV)/.installed
SYSTEM := $(VENV)/.system
ARGS ?=

# The missing Debian and Ubuntu packages that sandboxes need.
MISSING := $(strip $(shell \
  command -v bwrap >/dev/null || echo bubblewrap; \
  command -v catatonit >/dev/null || echo catatonit; \
  command -v setpriv >/dev/null || echo util-linux))

# The browser for the dashboard tests.
BROWSER := $(VENV)/.browser
NO_BROWSER := $(strip $(shell command -v chromium >/dev/null || echo chromium))

# Tried in this order. A name that exists may be too old or an empty shim, so each one is run.
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

# Container images often disable bytecode files. Without them every process compiles all of its imports, and every test
# worker rewrites all assertions: collecting the tests then takes 27 s of CPU time per worker instead of 10 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run mixed test test-slow test-docker test-cgroup-v2 lint bench docs clean
help: ## list the targets
	@echo "make TARGET [ARGS=...]"
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)$$/  \1\t\2/p' Makefile | expand -t 18

# A second call replaces the run of the first; ARGS=--resume continues it.
run: $(STAMP) $(SYSTEM) ## train a policy on three tasks at once, in five minutes; see build/runs/multitask/report.html
	@$(VENV)/bin/tangram train examples/multitask.toml $(if $(findstring --resume,$(ARGS)),,--fresh) $(ARGS)

mixed: $(STAMP) $(SYSTEM) ## run coding, search and distillation on shared pools; see build/mixed.html
	@$(VENV)/bin/python examples/mixed/mixed.py --report build/mixed.html $(ARGS)

# Two more than cores, because tests also wait for processes; limited, because on a large machine the workers would
# mostly spend their time starting.
WORKERS = $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 7 ? cores + 2 : 8)))
test: $(STAMP) $(SYSTEM) $(BROWSER) ## run the tests, or those that ARGS selects: ARGS="tests/core -x"
	@$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not docker and not slow" $(ARGS)

test-slow: $(STAMP) $(SYSTEM) $(BROWSER) ## run the tests of whole programs: examples, benchmarks, kills; ARGS as for test
	@$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

test-docker: $(STAMP) $(SYSTEM) ## run the tests that need a Docker engine, on private engines; ARGS as for test
	@$(VENV)/bin/python -m tools.docker_tests -n $(WORKERS) --dist worksteal $(ARGS)

test-cgroup-v2: $(STAMP) $(SYSTEM) ## run tests on a kernel with cgroup v2, in a virtual machine; ARGS as for test
	@tools/test-cgroup-v2 $(ARGS)

lint: $(STAMP) ## check format, lint rules and types
	@$(VENV)/bin/ruff format --check src tests docs examples tools
	$(VENV)/bin/ruff check src tests docs examples tools
	$(VENV)/bin/mypy

bench: $(STAMP) $(SYSTEM) ## run the benchmarks; ARGS=--quick for short ones
	@$(VENV)/bin/tangram bench all $(ARGS)

docs: $(STAMP) ## regenerate the reference pages of docs/ and the outputs shown in the documentation
	@$(VENV)/bin/python -m tools.reference.pages
	$(VENV)/bin/python docs/outputs.py

clean: ## delete build/ and all caches, but not .venv
	@rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv whose Python does not start (removed by a system upgrade, or an interrupted creation) counts as absent.
ifneq ($(shell $(VENV)/bin/python -c 'import pip' 2>&1 || echo broken),)
$(STAMP): FORCE
endif
# Each call tries again to install missing packages.
ifneq ($(MISSING),)
$(SYSTEM): FORCE
endif
ifneq ($(NO_BROWSER),)
$(BROWSER): FORCE
endif
.PHONY: FORCE
FORCE:

# If the packages cannot be installed, prints the command that installs them and continues without sandboxes.
$(SYSTEM): | $(STAMP)
	@touch $@
	if [ -z "$(MISSING)" ]; then exit 0; fi
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	  echo "installing $(MISSING)"
	  export DEBIAN_FRONTEND=noninteractive
	  # Existing package lists usually suffice; if not, update them first.
	  apt-get install -y -qq --no-install-recommends $(MISSING) >/dev/null 2>&1 && exit 0
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $(MISSING) >/dev/null && exit 0
	fi
	echo "Sandboxes need packages that are not installed: $(MISSING). On Debian or Ubuntu:" >&2
	echo "    sudo apt-get install $(MISSING)" >&2
	echo "Continuing without sandboxes: their tests are skipped; --backend process runs commands without isolation." >&2

$(BROWSER): | $(STAMP)
	@touch $@
	if [ -z "$(NO_BROWSER)" ]; then exit 0; fi
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	  echo "installing $(NO_BROWSER)"
	  export DEBIAN_FRONTEND=noninteractive
	  apt-get install -y -qq --no-install-recommends $(NO_BROWSER) >/dev/null 2>&1 && exit 0
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $(NO_BROWSER) >/dev/null && exit 0
	fi
	echo "Continuing without a browser: dashboard tests are skipped. On Debian: sudo apt-get install chromium" >&2

# Installs the build backend first and builds in .venv, because constraints do not apply to pip's isolated builds.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(VENV)/bin/python -c 'import pip' 2>/dev/null; then
	  python=
	  for candidate in $(PYTHONS); do
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi
	  done
	  if [ -z "$$python" ]; then
	    echo "Tangram needs Python >= 3.11; none of these commands runs one: $(PYTHONS)." >&2
	    echo "Install it (Debian 12 or later, Ubuntu 24.04 or later: apt-get install python3 python3-venv) and try again." >&2
	    exit 1
	  fi
	  if ! $$python -c 'import ensurepip, venv' 2>/dev/null; then
	    if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	      echo "$$python cannot create virtual environments. Install its venv package and try again:" >&2
	      echo "    sudo apt-get install $$python-venv" >&2
	      exit 1
	    fi
	    echo "installing $$python-venv"
	    export DEBIAN_FRONTEND=noninteractive
	    # Existing package lists usually suffice; if not, update them first.
	    apt-get install -y -qq --no-install-recommends "$$python-venv" >/dev/null 2>&1 || {
	      apt-get update -qq
	      apt-get install -y -qq --no-install-recommends "$$python-venv" >/dev/null
	    }
	  fi
	  echo "creating $(VENV) with $$($$python -V)"
	  $$python -m venv --clear $(VENV)
	fi
	echo "installing packages into $(VENV)"
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt hatchling editables
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@
