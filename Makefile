# Two targets matter: `make run` trains an agent end to end, `make test` checks everything.
PY := .venv/bin/python
MODEL ?= tiny
SEED ?= 0

.PHONY: run setup test lint protos chaos bench clean

run: setup  ## Train the embedded model end to end and print what it learned
	@.venv/bin/forge run --model $(MODEL) --seed $(SEED)

setup: .venv/.installed  ## Install everything into .venv

.venv/.installed: pyproject.toml constraints.txt
	@test -x $(PY) || python3 -m venv .venv
	@echo "Installing into .venv (a few minutes the first time) ..."
	@$(PY) -m pip install --quiet --upgrade pip
	@$(PY) -m pip install --quiet -c constraints.txt -e ".[all,dev]"
	@touch $@

test: setup  ## The whole default suite: real etcd, real processes
	@$(PY) -m pytest

lint: setup  ## Format, rules, types, import contracts, protos
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@.venv/bin/buf lint

chaos: setup  ## Kill each service in the middle of a run, for real
	@$(PY) -m pytest tests/chaos

protos: .venv-protos/.installed  ## Regenerate the committed stubs
	@PATH="$(CURDIR)/.venv-protos/bin:$$PATH" .venv-protos/bin/python -m grpc_tools.protoc -Iprotos \
		--python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. protos/forge/v1/*.proto

# A generator old enough that its code runs on protobuf 6.x and 7.x alike.
.venv-protos/.installed:
	@python3 -m venv .venv-protos
	@.venv-protos/bin/pip install --quiet grpcio-tools==1.76.0 mypy-protobuf==5.1.0
	@touch $@
