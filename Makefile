VENV := .venv
PY := $(VENV)/bin/python

.PHONY: proto lint
proto:  ## regenerate nanocp/wire/v1 from proto/
	$(PY) -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. --pyi_out=. proto/nanocp/wire/v1/*.proto

lint:  ## ruff, mypy, import rules
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy && $(VENV)/bin/lint-imports
