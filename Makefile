# Two commands on a fresh machine:   make train   runs the main job,   make test   passes the tests.
# Both build .venv first if it is missing (plain venv and pip).

VENV ?= .venv
BIN := $(VENV)/bin
ENGINES_VENV ?= .venv-engines
GPU_VERSIONS_VENV ?= .venv-gpu-versions
ARGS ?=
# Files of tests that run at once; most of them wait for processes of their own. The files with the longest tests begin.
TEST_WORKERS ?= 2
AT_ONCE = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
TESTS = $(BIN)/python -m pytest tests $(AT_ONCE)

.PHONY: deploy train test test-slow lint types unit engines gpu-versions recipes setup setup-engines clean

setup: $(VENV)/.train

setup-engines: $(ENGINES_VENV)/.test

train: $(VENV)/.train
	$(BIN)/fp8-grpo train $(ARGS)

# The deployments of prefect.yaml on the Prefect server that PREFECT_API_URL or the active profile names.
deploy: $(VENV)/.train
	$(BIN)/prefect work-pool inspect fp8-grpo >/dev/null 2>&1 || $(BIN)/prefect work-pool create fp8-grpo --type process
	$(BIN)/prefect --no-prompt deploy --all

test: lint types unit engines

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

unit: $(VENV)/.test
	$(TESTS) -m "not slow and not gpu"

# Threads that wait for their turn on a core spin.
unit engines test-slow gpu-versions: export OMP_NUM_THREADS = 1

# What needs vLLM or Megatron, in an environment of its own, so that the one of `make train` stays light: of vLLM the
# recipes at both ends here, the three between them and Megatron with the slow tests. Megatron on CPU changes its process,
# so that its contract has a call of its own.
BOTH_ENDS := vllm and not fp8_rollout and not (fp8_e2e and not fp8_e2e_kv)
engines: $(ENGINES_VENV)/.test
	$(ENGINES_VENV)/bin/python -m pytest tests/contract tests/engines $(AT_ONCE) -m "not slow and not gpu" -k "$(BOTH_ENDS)"

test-slow: $(VENV)/.test $(ENGINES_VENV)/.test
	$(TESTS) -m "slow and not gpu"
	$(ENGINES_VENV)/bin/python -m pytest tests/contract tests/engines $(AT_ONCE) -m "not slow and not gpu" \
		-k "(vllm and not ($(BOTH_ENDS))) or test_megatron_model or test_megatron_ranks"
	$(ENGINES_VENV)/bin/python -m pytest tests/contract $(AT_ONCE) -m "not slow and not gpu" -k megatron
	$(ENGINES_VENV)/bin/python -m pytest tests/engines $(AT_ONCE) -m "slow and not gpu"
	$(MAKE) --no-print-directory gpu-versions

# The Python code of the versions that GPU machines have (vLLM 0.26, torch 2.11), run on CPU: what is vLLM's own, and the
# contract under the recipe that has everything on. They need Python 3.12.
gpu-versions:
	@if reason=$$(bash infra/find_python.sh 3.12 2>&1 >/dev/null); then \
		$(MAKE) --no-print-directory $(GPU_VERSIONS_VENV)/.test && \
		$(GPU_VERSIONS_VENV)/bin/python -m pytest tests/contract tests/engines $(AT_ONCE) -m "not slow and not gpu" \
			-k "vllm and (fp8_e2e_kv or test_vllm_ or rounds_keys)"; \
	else \
		echo "gpu-versions: SKIPPED, $$reason: vLLM 0.26 and torch 2.11 were not tested"; \
	fi

# The table of recipes in the README: 5 recipes x 3 seeds, about 15 minutes on 2 cores.
recipes: $(VENV)/.test
	$(BIN)/python -m tests.benchmarks.recipe_table $(ARGS)

$(VENV)/.train: pyproject.toml
	bash infra/setup_venv.sh $(VENV) .
	touch $@

$(VENV)/.test: $(VENV)/.train
	bash infra/setup_venv.sh $(VENV) ".[dev]"
	touch $@

$(ENGINES_VENV)/.test: pyproject.toml infra/setup_engines_venv.sh
	bash infra/setup_engines_venv.sh $(ENGINES_VENV) 3.11
	touch $@

$(GPU_VERSIONS_VENV)/.test: pyproject.toml infra/setup_engines_venv.sh infra/gpu_versions.txt
	bash infra/setup_engines_venv.sh $(GPU_VERSIONS_VENV) 3.12
	touch $@

clean:
	rm -rf $(VENV) $(ENGINES_VENV) $(GPU_VERSIONS_VENV) .mypy_cache .ruff_cache build *.egg-info
