# `make help` lists the targets. Everything is installed into .venv; nothing outside this folder is touched, except that
# `make test` installs GoogleTest, Chromium, Java, Maven, Prometheus and Redis by apt where they are missing and it may.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# Where torch comes from. The default index's build for Linux x86-64 carries CUDA: about 0.9 GB to download and 5 GB on
# disk. For the CPU-only build (about 0.2 GB): make test TORCH_INDEX_URL=<torch's CPU wheel index>
TORCH_INDEX_URL ?=
# Steps to leave out by name: SKIP="native-tests browser-tests kafka promtool redis".
SKIP ?=
# The same as an expression of pytest's markers, such as `not browser and not kafka`; empty if nothing is left out.
LEFT_OUT = $(patsubst browser-tests,browser,$(filter browser-tests kafka kserve promtool redis,$(SKIP)))
MARKERS = not compose $(LEFT_OUT:%=and not %)
# Workers of pytest: one more than cores, as tests wait for I/O, leases and timers; with more, fleets of a dozen processes
# run side by side and take longer together than one after the other. Eight at the most, as a worker starts servers of its
# own (a Kafka, Redis clusters, an S3) and may need 2 GB with them.
WORKERS ?= $(shell cores=$$(nproc 2> /dev/null || sysctl -n hw.ncpu); n=$$(( cores + 1 )); echo $$(( n < 8 ? n : 8 )))
BENCH ?=
DEMO ?=

BIN := $(VENV)/bin
# Not abspath, which takes a path that holds spaces for several.
BIN_PATH := $(if $(filter /%,$(BIN)),$(BIN),$(CURDIR)/$(BIN))
export PATH := $(BIN_PATH):$(PATH)

# Idle workers steal from busy ones; with one worker the tests run in pytest's own process, where -s and --pdb work.
PYTEST = $(BIN)/python -m pytest -n $(patsubst 1,0,$(WORKERS)) --dist worksteal

.PHONY: help setup build demo docs test test-long test-compose test-tools unit oldest lint native-test bench wheel clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@ops/check-machine "$(PYTHON)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip

setup: $(BIN)/python ## Install freshet with gateway, inference, console and client (no torch) into .venv.
	$(BIN)/pip install -q ".[gateway,inference,console,client,replay]"

demo: setup ## Install and run `freshet demo`; DEMO="--seconds 60" passes arguments. Ctrl-C ends it.
	$(BIN)/freshet demo $(DEMO)

READY_TO_TEST := $(VENV)/.test-installed
$(READY_TO_TEST): pyproject.toml | $(BIN)/python
	@echo "Installing what the tests need. torch is the large part: about 0.9 GB to download and 5 GB on disk from the default index"
	@echo "(TORCH_INDEX_URL=... takes another, such as torch's CPU-only one, about 0.2 GB)."
	$(BIN)/pip install -q $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) "torch==2.13.0"
	$(BIN)/pip install -q "nanobind>=2.4" "scikit-build-core>=0.10" "cmake>=3.18" ninja
	$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; e = p["optional-dependencies"]; \
	  print("\n".join(d for d in p["dependencies"] + sum(e.values(), []) if not d.startswith("freshet")))' > $(VENV)/requirements.txt
	$(BIN)/pip install -q -r $(VENV)/requirements.txt
	touch $@

build: $(READY_TO_TEST) ## Build the native core in place, for work on the code.
	$(BIN)/cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE="$(BIN_PATH)/python" > /dev/null
	MAKEFLAGS= $(BIN)/cmake --build build/dev

docs: build ## Write docs/reference/ and Grafana's boards anew; a test names what is stale.
	PYTHONPATH=services $(BIN)/python -m ops.reference
	$(BIN)/python -m ops.boards

test-tools:
	@ops/find-browser "$(SKIP)"
	@ops/install-kafka "$(SKIP)"
	@PYTHON="$(PYTHON)" ops/install-kserve "$(SKIP)"
	@ops/install-promtool "$(SKIP)"
	@ops/install-redis "$(SKIP)"

# Two at a time: some compile, others use one core or wait for the network.
test: ## Install all that is needed and run every test; WORKERS=1 one after the other.
	@$(MAKE) --jobs=2 --no-print-directory build lint native-test test-tools
	$(PYTEST) -m "$(MARKERS)"

# What the variables mean, and how to run one of these tests by itself, is in CONTRIBUTING.md.
LONG_FORMS = FRESHET_TEST_FAULTS=70 FRESHET_TEST_KILLS=56 FRESHET_TEST_CLOCKS=60 FRESHET_TEST_POISON=500 \
  FRESHET_TEST_SUMS="auto int8 int4 adaquantfl async" FRESHET_TEST_KEYS=1000000 FRESHET_TEST_STEPS=10000 FRESHET_TEST_FRAMES=100000 FRESHET_TEST_SEEDS=1000 FRESHET_TEST_FUZZ_FRAMES=1000000

test-long: build test-tools ## The long forms of storms, soaks and random tests: about two hours on two cores.
	$(LONG_FORMS) $(PYTEST) --timeout 7200 -m "long and $(MARKERS)"
	ops/fuzz-avro --records 1000000
	ops/fuzz-avro --pairs 100000
	ops/fuzz-bodies --bodies 100000
	FUZZ_RUNS=1000000 ops/native-test "$(SKIP)"
	$(MAKE) --no-print-directory bench BENCH="--quick"
	PYTHONPATH=services $(BIN)/python -m bench.kafka --quick

test-compose: build ## Build the images, start docker-compose.yml, kill each service in turn, audit; needs a docker engine.
	docker compose --env-file /dev/null --profile simulator build
	$(BIN)/python -m pytest -s -m compose tests/compose

UNIT = --hypothesis-profile quick tests/unit tests/contract

unit: build ## The quick unit and contract tests, without servers; random tests try fewer examples: under 90 s on two cores.
	$(PYTEST) -m "not kafka and not redis and not slow" $(UNIT)

oldest: build ## The tests of `make unit` and the slow ones on the oldest allowed release of each dependency, in .venv-oldest.
	ops/oldest $(BIN)/python .venv-oldest
	PATH=$(CURDIR)/.venv-oldest/bin:$$PATH .venv-oldest/bin/python -m pytest -n $(WORKERS) -m "not kafka and not redis" $(UNIT)

lint: $(READY_TO_TEST) ## ruff, clang-format, mypy --strict, import-linter, bandit, measures and words of the code (ops/house).
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror services/native/*/*.cpp services/native/*/*.hpp services/native/include/freshet/*.hpp
	$(BIN)/mypy services/freshet tests bench ops
	PYTHONPATH=services $(BIN)/lint-imports
	$(BIN)/bandit -q -c pyproject.toml -r services/freshet
	$(BIN)/python -m ops.house

native-test: $(READY_TO_TEST) ## C++ unit tests and a short fuzz run, under the address and undefined-behaviour sanitizers.
	@ops/native-test "$(SKIP)"

# Measurements named in BENCH, without its options; none stands for all of them.
MEASURED = $(if $(filter --list,$(BENCH)),,$(or $(filter-out --%,$(BENCH)),gateway rank versus_vw))

bench: build ## Measure; BENCH="--quick --json" in 3 minutes, BENCH="table log" for some of it, BENCH=--list for what there is.
	@$(if $(filter gateway rank,$(MEASURED)),command -v wrk > /dev/null || ops/install-package wrk 'name measurements that need none: make bench BENCH="table log"')
	@$(if $(filter versus_vw,$(MEASURED)),$(BIN)/pip install -q pandas)
	PYTHONPATH=services $(BIN)/python -m bench $(BENCH)

wheel: $(BIN)/python ## Build the wheel into dist/.
	$(BIN)/pip install -q build
	$(BIN)/python -m build --wheel

clean: ## Remove build outputs; .venv stays.
	rm -rf build dist services/freshet/_native*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
