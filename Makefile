# LeasedJob. `make` lists the targets.
#
# Variables: KUBECONFIG=path (make demo, make e2e: a cluster of yours; only when given on make's command line),
# LEASEDJOB_CACHE=path (built programs, images and clusters; default ~/.cache/leasedjob), PYTHON=python3.11, PYTEST=options,
# KUBERNETES=1.34 (make test, integration, e2e, soak, programs, cluster-up, demo: a minor version other than the newest).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
PYTEST ?=
KUBERNETES ?=
# Each version has a test cluster of its own: one that is up is never taken for another.
TEST_CLUSTER ?= test$(addprefix -,$(subst .,,$(KUBERNETES)))
# These tests wait more than they compute: more of them at a time than cores.
WORKERS ?= 3
E2E_WORKERS ?= 4
MINUTES ?= 20
SEED ?=

# A kubeconfig counts only when it is named for this call: the one of the environment may be anybody's cluster.
ifeq ($(origin KUBECONFIG),command line)
export LEASEDJOB_KUBECONFIG := $(KUBECONFIG)
endif
unexport KUBECONFIG

ifneq ($(KUBERNETES),)
ifeq ($(wildcard tests/cluster/go/kube-$(KUBERNETES)/go.mod),)
$(error KUBERNETES=$(KUBERNETES): there is no such version here; there are $(patsubst tests/cluster/go/kube-%/go.mod,%,$(sort $(wildcard tests/cluster/go/kube-*/go.mod))))
endif
export LEASEDJOB_KUBERNETES := $(KUBERNETES)
endif

BIN := .venv/bin
CLUSTER := $(BIN)/python -m tests.cluster
VENV := .venv/.installed

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up --------------------------------------------------------------------------------------------------------------
.PHONY: venv
venv: $(VENV) ## Install what development needs into .venv

$(VENV): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; name it: make PYTHON=python3.13 ..." >&2; exit 1; }
	@echo "installing the Python packages into .venv (a minute or two the first time):"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { echo "error: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -u -m pip install --disable-pip-version-check --progress-bar off --editable . --group dev \
	  | sed -nu 's/^\(Collecting\|Downloading\|Building\|Installing\) /  &/p'
	@touch $@

# --- try it --------------------------------------------------------------------------------------------------------------
.PHONY: demo demo-down
demo: $(VENV) ## Get a cluster, install LeasedJob, run examples/01-hello for two ticks
	@$(BIN)/python -m tests.cluster.demo up

demo-down: $(VENV) ## Remove everything that make demo made
	@$(BIN)/python -m tests.cluster.demo down

# --- checks --------------------------------------------------------------------------------------------------------------
.PHONY: test lint verify generate unit integration e2e bench chaos soak
test: lint verify ## All checks: what CI runs
	@scripts/test.sh

lint: $(VENV) ## Style, types, directions of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy -p tests.cluster -p tests.upgrade -p bench -p docsite
	@PYTHONPATH=operator $(BIN)/lint-imports --no-cache

generate: $(VENV) ## Write the generated files: the CRDs, pages of the reference
	@$(BIN)/python -m leasedjob.api.crd
	@$(BIN)/python -m docsite

verify: $(VENV) ## Check that the generated files are current, and that the documentation builds
	@$(BIN)/python -m leasedjob.api.crd --check
	@$(BIN)/python -m docsite --check
	@$(MAKE) --no-print-directory docs

.PHONY: sbom audit reproduce
sbom: $(VENV) ## Write a bill of materials for each image into build/sbom
	@if ls wheels/*.whl > /dev/null 2>&1; then set -- --wheels wheels; else set --; fi; $(BIN)/python scripts/sbom.py "$$@"

audit: $(VENV) ## Known vulnerabilities of what the images install (network); AUDIT=required fails without an answer
	@BIN=$(BIN) scripts/audit.sh

reproduce: $(VENV) ## Build the images twice from nothing and compare their digests
	@$(BIN)/python -m tests.cluster.reproduce

.PHONY: snapshots
snapshots: $(VENV) ## Write the chart's manifests that the tests compare with; read what changed in them
	@LEASEDJOB_UPDATE_SNAPSHOTS=yes $(BIN)/pytest -q -p no:xdist tests/unit/test_chart_snapshots.py

# The variable: MkDocs' theme would tell of another version of MkDocs at each build.
.PHONY: docs docs-serve
docs: $(VENV) ## Build the documentation into build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docs-serve: $(VENV) ## Show the documentation on http://127.0.0.1:8000, built anew at each change
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

unit: $(VENV) ## Tests that need nothing but Python
	@$(BIN)/pytest -q -rs $(wildcard tests/unit tests/properties tests/contract) -n 2 -m "not soak" $(PYTEST)

integration: $(VENV) ## Tests on a real PostgreSQL, and on a real API server without nodes
	@BIN=$(BIN) WORKERS=$(WORKERS) PYTEST="$(PYTEST)" scripts/integration.sh

e2e: $(VENV) ## Tests on a real cluster, which is brought up if none is
	@BIN=$(BIN) TEST_CLUSTER=$(TEST_CLUSTER) E2E_WORKERS=$(E2E_WORKERS) PYTEST="$(PYTEST)" scripts/e2e.sh

bench: $(VENV) ## Measure beside peers, some minutes; BENCH="lease claim" names what
	@$(BIN)/python -c 'import croniter, cronsim' 2> /dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --group bench
	@$(BIN)/python -m bench $(BENCH)

chaos: $(VENV) ## Two real clusters, holders, faults at random, a verdict; MINUTES=20 SEED=n
	@$(BIN)/python -u -m tests.chaos_cluster run --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --results bench/results

soak: $(VENV) ## The long variants of the tests: hours; what they measure is printed
	@code=0; export SOAK=yes BIN=$(BIN) PYTEST="$(PYTEST)"; \
	WORKERS=1 scripts/integration.sh || code=1; \
	TEST_CLUSTER=$(TEST_CLUSTER) E2E_WORKERS=1 scripts/e2e.sh || code=1; \
	exit $$code

# --- the test cluster ------------------------------------------------------------------------------------------------------
.PHONY: programs cluster-up cluster-down
programs: $(VENV) ## Build Kubernetes' programs into the cache: minutes the first time
	@$(CLUSTER) build

cluster-up: $(VENV) ## Bring the test cluster up, with PostgreSQL and the images
	@$(CLUSTER) up $(TEST_CLUSTER)
	@$(CLUSTER) postgres $(TEST_CLUSTER)
	@$(CLUSTER) images $(TEST_CLUSTER)

cluster-down: $(VENV) ## Remove the test cluster
	@$(CLUSTER) down $(TEST_CLUSTER)

.PHONY: clean
clean: ## Remove .venv and what tools left; built programs stay in the cache
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
