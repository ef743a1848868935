# A newcomer needs `make demo` and `make test`. Each sets up its own virtual environment first.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Three times as many workers as cores, because many tests wait. The tests of a file share servers, so a file stays in one worker.
PYTEST_WORKERS ?= 6
PYTEST := -m pytest -n $(PYTEST_WORKERS) --dist loadfile
# If this is set, every worker compiles every test again in each run.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo demo-fleet test test-oldest cover soak soak-core lint lint-page format bench docs dist pictures clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Sets up the environment $(1) with these requirements, $(2), and options of pip, $(3). uv is used if it is installed, because it is faster; venv and pip
# do the same.
define set_up
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is %s; name another one with: make PYTHON=python3.12" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@if command -v uv >/dev/null 2>&1; then \
		echo "Setting up $(1) with uv"; \
		uv venv --quiet --allow-existing --python "$$(command -v $(PYTHON))" $(1) && \
		uv pip install --quiet --python $(1)/bin/python --constraint constraints.txt $(2); \
	else \
		echo "Setting up $(1) with venv and pip"; \
		$(PYTHON) -m venv $(1) && \
		$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(3) --constraint constraints.txt $(2); \
	fi
	@touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call set_up,$(VENV),--editable '.[dev]')

# The demo needs no development tools. It runs in this folder, so that the package need not be built, and imports little of what it installs: Python
# compiles that itself. Where the development tools are there, it uses their environment.
DEMO_VENV := $(if $(wildcard $(READY)),$(VENV),.demo-venv)

.demo-venv/.ready: pyproject.toml constraints.txt
	@mkdir -p .demo-venv
	@$(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; more = p["optional-dependencies"]; print(*p["dependencies"], *more["server"], *more["cli"], sep="\n")' > .demo-venv/requirements.txt
	$(call set_up,.demo-venv,--requirement .demo-venv/requirements.txt,--no-compile)

demo: $(DEMO_VENV)/.ready ## See the pool at work on this machine
	@$(DEMO_VENV)/bin/python -m gpu_worker_pool demo

demo-fleet: $(READY) ## See a fleet at work, of which the leader is killed; with a database too, where there is a PostgreSQL
	@$(BIN)/python -m examples.fleet_demo

test: $(READY) ## Run all tests
	$(BIN)/python $(PYTEST)

.oldest-venv/.ready: pyproject.toml constraints.txt
	@mkdir -p .oldest-venv
	@$(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*(line.split(",")[0].replace(">=", "==") for extra in ("server", "fleet", "notify") for line in p[extra]), sep="\n")' > .oldest-venv/requirements.txt
	@$(PYTHON) -m venv .oldest-venv
	@.oldest-venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement .oldest-venv/requirements.txt --editable '.[dev]'
	@touch $@

# The exchanges were recorded with newer versions, which send some headers more.
test-oldest: .oldest-venv/.ready ## Run the tests of the server with the lowest versions of its packages
	.oldest-venv/bin/python $(PYTEST) tests/server --ignore tests/server/recorded

cover: $(READY) ## Run all tests and show which code they reach
	$(BIN)/python $(PYTEST) --cov --cov-report=term

# SOAK_MINUTES (10, for each of the three kinds), SOAK_SEED and SOAK_RUN_S are read from the environment or the command line.
soak: $(READY) ## Break a server, a fleet and a fleet without a database for SOAK_MINUTES (10) each, and check what happened
	$(BIN)/python -m tests.e2e.soak
	$(BIN)/python -m tests.cli.jobs.soak

# HISTORIES (100,000) and WORKERS (the processes, 1).
soak-core: $(READY) ## Play HISTORIES (100,000) random histories of the core against the plain model
	$(BIN)/python -m tests.core.soak $(if $(HISTORIES),--histories $(HISTORIES)) $(if $(WORKERS),--workers $(WORKERS))

lint: $(READY) ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lint-page: ## Check the JavaScript of the page (npx fetches oxlint)
	npx --yes oxlint@1 --deny-warnings --ignore-pattern '**/vendor/**' gpu_worker_pool/server/ui/page tests/page/pure.test.mjs

format: $(READY) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# QUICK=1: only see that everything runs. ONLY=PART. BASE=COMMIT to compare with. OPENB=DIR: the folder of the public trace to replay.
bench: $(READY) ## Measure everything in 12 minutes and write docs/why/benchmarks.md (QUICK=1: a fast check)
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(if $(ONLY),--only '$(ONLY)') $(if $(BASE),--base '$(BASE)') $(if $(OPENB),--openb '$(OPENB)')

docs: $(READY) ## Build the site into site/: the documents, and a reference made from the code
	$(BIN)/python scripts/site.py

dist: $(READY) ## Build the source archive and the wheel into dist/
	$(BIN)/python -m build --no-isolation

pictures: $(READY) ## Make the pictures in docs/images from a real server with simulated GPUs
	$(BIN)/python scripts/picture_of_top.py
	$(BIN)/python scripts/pictures_of_page.py

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .demo-venv .oldest-venv .bench-venv* .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .import_linter_cache
