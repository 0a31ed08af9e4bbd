# Daily commands. `make help` explains them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLUSTER := PYTHONPATH=cluster $(BIN)/python -m foremoe_cluster
STAMP := $(VENV)/.installed
# Beside the tests that need no kernels; the others wait for each kernel until it is there.
COMPILE_KERNELS := $(BIN)/python -c 'from foremoe.planner import warm_up; warm_up()'
SOURCES := worker operator cluster tests benchmarks examples
# A cluster of your own: `make demo KUBECONFIG=... IMAGE=...` leaves the embedded one alone.
ifneq ($(origin KUBECONFIG),undefined)
DEMO_ARGS := --kubeconfig '$(KUBECONFIG)'
endif
ifneq ($(origin IMAGE),undefined)
DEMO_ARGS += --image '$(IMAGE)'
endif
ifneq ($(origin OPERATOR_IMAGE),undefined)
DEMO_ARGS += --operator-image '$(OPERATOR_IMAGE)'
endif

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMP) ## Make .venv with all extras, at the pinned versions

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3"; exit 1; }
	@echo "== setup: $(VENV) with all extras (torch, ray and verl are about 2 GB)"
	@$(PYTHON) -m venv $(VENV) || { echo "venv is missing: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install -q --upgrade -c constraints.txt pip setuptools wheel
	@# What setuptools says of any editable installation is no news here.
	@PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install -q -c constraints.txt -e '.[operator,worker,dev]'
	@touch $@

.PHONY: demo
demo: setup ## One command on a fresh machine: cluster, images, operator, an example job to completion
	@$(CLUSTER) demo $(DEMO_ARGS)

.PHONY: cluster-up
cluster-up: setup ## Start the embedded Kubernetes on this machine (root, Debian 12)
	@$(CLUSTER) up

.PHONY: cluster-down
cluster-down: setup ## Remove the embedded Kubernetes; images and programs are kept for next time
	@$(CLUSTER) down

.PHONY: cluster-kubeconfig
cluster-kubeconfig: setup ## Print the path of the embedded cluster's kubeconfig
	@$(CLUSTER) kubeconfig

.PHONY: cluster-prove
cluster-prove: setup ## Prove that up + down leaves the machine as found
	@$(CLUSTER) prove-clean

.PHONY: images
images: setup ## Build the operator and worker images and load them into the embedded cluster
	@$(CLUSTER) images

.PHONY: test
test: lint ## Everything that passes on a CPU machine: unit, distributed, real cluster, real pods
	@$(CLUSTER) packages --with-browser
	@$(CLUSTER) build
	@$(COMPILE_KERNELS) & $(BIN)/pytest -q -m 'not cluster and not e2e' -n 2 --dist loadfile --no-loadscope-reorder
	@$(CLUSTER) prove-clean
	@$(CLUSTER) up && $(CLUSTER) images
	@status=0; $(BIN)/pytest -q -m 'cluster or e2e' || status=$$?; $(CLUSTER) down; exit $$status

.PHONY: test-fast
test-fast: setup ## Unit and distributed tests, without a cluster
	@$(COMPILE_KERNELS) & $(BIN)/pytest -q -m 'not cluster and not e2e and not browser' -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: lint
lint: setup ## Style, types, layers, spelling
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/lint-imports
	@$(BIN)/mypy
	@$(BIN)/codespell $(SOURCES) docs charts README.md CHANGELOG.md CONTRIBUTING.md

.PHONY: format
format: setup ## Rewrite the sources in the house style
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

.PHONY: crds
crds: setup ## Regenerate crds/ and the chart's copy from the models
	@$(BIN)/python -m foremoe_operator.api.generate

.PHONY: clean
clean: ## Remove build output and caches of this checkout (not the environment)
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
