# The commands of the README. `make setup` runs first wherever it is needed.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
export CONSERVE_MODELS ?= $(CURDIR)/.demo/models

PATHS ?=
SINCE ?=
BREAK ?=
SCHEMA_EXAMPLES ?= 100
DEPLOY ?=
ENGINE ?= none
BASE ?=
RUNS ?= 20

.PHONY: help setup demo demo-eval harnesses test test-full test-loaded test-notebook test-clients test-evals test-objects test-vllm soak break mutants coverage rehearse-gpu check deploy-check image format bench bench-serve reference docs clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## Make .venv with the locked CPU dependencies
	@QUIET=$(if $(filter setup,$(MAKECMDGOALS)),,1) PYTHON=$(PYTHON) bash tools/setup.sh

demo: setup  ## Run 100 GSM8K questions through the embedded engine and query the answers
	@bash examples/demo.sh

demo-eval: harnesses  ## Run three nights of an evaluation, one with worse weights, which the gate finds
	@bash examples/demo-eval.sh

test: setup  ## Run the tests, the real engine included (about ten minutes on two cores)
	$(BIN)/pytest -n $(WORKERS) -m "not soak and not full"

test-full: setup  ## Also run what is statistical or exhaustive, before a release
	$(BIN)/pytest -n $(WORKERS) -m "not soak" --hypothesis-profile full --timeout 1800 --timeout-method thread

test-loaded: setup  ## Run the tests 20 times with two busy loops beside them, to find what depends on time (RUNS=5 for fewer)
	@bash tools/loaded.sh $(RUNS) $(BIN)/pytest -n $(WORKERS) -m "not soak and not full"

test-notebook: setup  ## Run what needs pandas, polars and a kernel of Jupyter, which are fetched into .notebook
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target .notebook --constraint requirements/cpu.lock -r requirements/notebook.txt
	PYTHONPATH=$(CURDIR):$(CURDIR)/.notebook $(BIN)/pytest tests/unit/test_api.py tests/unit/test_python_docs.py

test-clients: setup  ## Run programs that use OpenAI's batches, fetched into .batch-clients, while the API is killed under them
	@bash tools/batch_clients.sh
	SCHEMA_EXAMPLES=$(SCHEMA_EXAMPLES) $(BIN)/pytest tests/acceptance/test_batch_clients.py tests/acceptance/test_api_description.py

harnesses: setup  # lm-eval and inspect_ai
	@grep -vE '^(fsspec|python-dateutil|urllib3)==' requirements/cpu.lock > .venv/.evals-constraints
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --target .evals --constraint .venv/.evals-constraints -r requirements/evals.txt

test-evals: harnesses  ## Run what needs lm-eval and inspect_ai, which are fetched into .evals
	PYTHONPATH=$(CURDIR):$(CURDIR)/.evals $(BIN)/pytest tests/evals

test-objects: setup  ## Run what needs an S3 server, which is fetched into .objects
	@grep -vE '^(python-dateutil|urllib3|requests|responses|werkzeug|cryptography)==' requirements/cpu.lock > .venv/.objects-constraints
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --target .objects --constraint .venv/.objects-constraints -r requirements/objects.txt
	PYTHONPATH=$(CURDIR):$(CURDIR)/.objects $(BIN)/pytest -m "not soak" tests/unit/test_objects.py tests/unit/test_buckets.py tests/acceptance/test_{bucket_kills,storm}.py

test-vllm:  ## Run what touches the engine on another version of vLLM: make test-vllm VERSION=0.31.0
	@PYTHON=$(PYTHON) bash tools/test_vllm.sh "$(VERSION)"

soak: setup  ## Kill a run 1,000 times and say what the kills hit; 1,000 faults of all kinds; 10,000 iterations that rows leave, 10,000 evictions
	$(BIN)/pytest -m soak --timeout 7200

break: setup  ## Break it on purpose: 1,000 kills, power cuts and more, and one table (BREAK="--break-rounds 2 --break-seed 7")
	$(BIN)/pytest -n $(WORKERS) tests/break --timeout 7200 $(if $(findstring rounds,$(BREAK)),,--break-rounds 20) $(BREAK)

mutants: setup  ## Change the code since SINCE, or all of PATHS, in one place at a time: which changes does no test notice?
	$(BIN)/python -m tools.mutants $(if $(SINCE),--since $(SINCE)) $(PATHS) $(MUTANTS)

coverage: setup  ## Run the tests and print which lines and branches of each folder they run
	$(BIN)/pytest -n $(WORKERS) -m "not soak and not full" --cov=conserve --cov-branch --cov-report=json:.coverage.json
	$(BIN)/python tools/coverage_table.py .coverage.json

rehearse-gpu: setup  ## Run every measurement for a GPU machine on this CPU, with a tiny model (ten minutes or more)
	$(BIN)/python -m tools.gpu.rehearse

check: setup  ## Lint, formatting, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

deploy-check: setup  ## Check deploy/ with Helm, Kubernetes's schemas, promtool, hadolint and more, as far as they are there
	@bash tools/deploy/fetch.sh
	PYTHONPATH=$(CURDIR):$(CURDIR)/.deploy $(BIN)/python -m tools.deploy.check $(DEPLOY)

image:  ## Build the container image with docker, podman or buildah: make image ENGINE=cuda (or cpu, or none)
	@bash tools/deploy/image.sh "$(ENGINE)" $(BASE)

format: setup  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## Measure what docs/benchmarks reports (about an hour)
	$(BIN)/python -m tests.benchmarks

bench-serve: setup  ## Compare the policies of served engines on two cores (about 20 minutes)
	$(BIN)/conserve bench --trace azure_code_2023_10min_bursty --preset cpu --output .bench/serve

reference: setup  ## Write the commands' page and the charts of the documentation
	$(BIN)/python -m tools.docs

docs:  ## Build the documentation into site/; a broken link fails
	@PYTHON=$(PYTHON) bash tools/site.sh

clean:  ## Remove .venv, the built documentation, the demo's store and all caches
	rm -rf .venv .vllm .notebook .batch-clients .evals .objects .deploy .docs .cache site .demo .bench .mutants .loaded .coverage .coverage.json .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
