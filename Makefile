# Every target sets up what it needs: a virtual environment in .venv, the pinned development versions, this package in
# editable mode, and its compiled libraries, rebuilt when their sources change. On a fresh machine python3 >= 3.10 with
# its headers and venv, a C++ compiler and make are enough; where nvcc and a GPU are found the CUDA library is built as
# well, with DCS_CUDA=ON where nvcc alone is.
#
#   make demo      train PPO on CartPole-v1, a language model and a CRF tagger by the ops; DEMO_ARGS=ppo: the first
#   make test      the test suite (under ten minutes); make test-all adds the long sweeps and test-cpus
#   make test-cpus the tests of the CPU kernels as CPUs without AVX-512, and without AVX2, run them
#   make bench     benchmarks/, CPU and, where there is a GPU, CUDA
#   make lint      ruff, clang-format and mypy; make format applies the formatters
#   make wheel     dist/*.whl for every supported GPU
#   make hub       dist/hub, a kernel repository of the Hugging Face Hub, from that wheel
#   make clean     all of the above away
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH_PIN ?= torch==2.13.0 triton==3.7.1
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=
WHEEL_CUDA_ARCHITECTURES ?= release

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ENV_STAMP := $(VENV)/.stamp-environment
BUILD_STAMP := $(VENV)/.stamp-build
CUDA_CHOICE := $(VENV)/.dcs-cuda
PYTHON_FILES := $(VENV)/.python-files
# A folder counts as a source too: its time changes when a file is added to it or taken away.
NATIVE_SOURCES := $(shell find csrc -type f -o -type d) pyproject.toml
# pip shows nothing of a build, or everything: a line every tenth of the way, and the log's end if it fails.
BUILD_LOG := $(VENV)/build.log
BUILD_PROGRESS := $(BIN)/python .ci/build_progress.py $(BUILD_LOG)
export MPLBACKEND := Agg

.PHONY: help env build demo test test-all test-cpus bench lint format wheel hub clean FORCE
help:
	@sed -n '/^#   make/s/^#   //p' Makefile

# .incomplete marks an environment that an interrupted run left half installed: pip cannot tell, so it is made anew.
$(ENV_STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "python3 >= 3.10 is needed, this is " + sys.version)'
	if [ -e $(VENV)/.incomplete ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then
	  $(PYTHON) -m venv --clear $(VENV)
	fi
	touch $(VENV)/.incomplete
	$(BIN)/python .ci/dev_requirements.py >$(VENV)/requirements.txt
	$(PIP) install $(TORCH_PIN) -r $(VENV)/requirements.txt
	rm $(VENV)/.incomplete
	touch $@

# What DCS_CUDA was last set to for this environment, GPU until it is: the CUDA library takes ten minutes on two cores.
$(CUDA_CHOICE): FORCE | $(ENV_STAMP)
	@choice="$${DCS_CUDA:-$$(cat $@ 2>/dev/null || echo GPU)}"
	[ "$$choice" = "$$(cat $@ 2>/dev/null)" ] || echo "$$choice" >$@

# An editable install finds the modules that there were when it was made, and no others.
$(PYTHON_FILES): FORCE | $(ENV_STAMP)
	@files="$$(find torch_dcs_ops triton_kernels examples -name '*.py' | sort)"
	[ "$$files" = "$$(cat $@ 2>/dev/null)" ] || echo "$$files" >$@

# Development builds are for the GPU at hand (sm_90 without one): a release takes three times as long to compile.
$(BUILD_STAMP): $(ENV_STAMP) $(CUDA_CHOICE) $(PYTHON_FILES) $(NATIVE_SOURCES)
	@for metadata in $(VENV)/lib/python3*/site-packages/torch_dcs_ops-*.dist-info; do
	  [ -e $$metadata/RECORD ] || rm -rf $$metadata  # an interrupted install, which pip refuses to replace
	done
	if [ -z "$${DCS_CUDA_ARCHITECTURES:-}" ]; then
	  if nvidia-smi -L >/dev/null 2>&1; then architectures=native; else architectures=90; fi
	  export DCS_CUDA_ARCHITECTURES=$$architectures
	fi
	export DCS_CUDA="$$(cat $(CUDA_CHOICE))" PATH="$(abspath $(BIN)):$$PATH"
	$(PIP) install -v --no-build-isolation --no-deps -e . 2>&1 | $(BUILD_PROGRESS) \
	  || { tail -n 60 $(BUILD_LOG); exit 1; }
	$(BIN)/python .ci/build_summary.py
	touch $@

env: $(ENV_STAMP)
build: $(BUILD_STAMP)

# Threads that wait for one another sleep instead of spinning: other processes, and the two that run the tests, share the
# cores.
demo test test-all test-cpus: export OMP_WAIT_POLICY := passive

demo: $(BUILD_STAMP)
	@$(BIN)/python -m torch_dcs_ops demo $(DEMO_ARGS)

test: $(BUILD_STAMP)
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -m "not slow" $(PYTEST_ARGS)

test-all: $(BUILD_STAMP)
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)
	$(MAKE) --no-print-directory test-cpus

# Of torch, oneDNN and MKL too, which tests compare with. Inductor's cache does not tell instruction sets apart. What is left
# out runs no CPU kernel, or sets the instruction set itself.
NO_CPU_KERNELS := in_the_interpreter or instruction_set or sm_90 or tiles_fit
test-cpus: $(BUILD_STAMP)
	@for isa in avx2 default; do
	  if [ $$isa = avx2 ]; then onednn=AVX2 mkl=AVX2; else onednn=SSE41 mkl=SSE4_2; fi
	  echo "instruction set: $$isa"
	  CUDA_VISIBLE_DEVICES= TORCH_DCS_CPU_ISA=$$isa ATEN_CPU_CAPABILITY=$$isa ONEDNN_MAX_CPU_ISA=$$onednn \
	    MKL_ENABLE_INSTRUCTIONS=$$mkl TORCHINDUCTOR_CACHE_DIR=$(abspath $(VENV))/inductor-$$isa \
	    $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -m "not slow or each_value or each_pair" \
	      -k "not ($(NO_CPU_KERNELS))" $(PYTEST_ARGS)
	done

bench: $(BUILD_STAMP)
	@$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

CXX_SOURCES = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

lint: $(ENV_STAMP)
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/package/test_types.py  # mypy, over what a user writes

format: $(ENV_STAMP)
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# The manylinux tag is the newest glibc that the libraries ask for: that of the machine that builds them, see CONTRIBUTING.md.
wheel: $(ENV_STAMP)
	@mkdir -p dist
	rm -rf build/linux-wheel
	export DCS_CUDA_ARCHITECTURES="$(WHEEL_CUDA_ARCHITECTURES)" PATH="$(abspath $(BIN)):$$PATH"
	$(PIP) wheel -v --no-build-isolation --no-deps --wheel-dir build/linux-wheel . 2>&1 | $(BUILD_PROGRESS) \
	  || { tail -n 60 $(BUILD_LOG); exit 1; }
	case $$(echo build/linux-wheel/*.whl) in
	  *-any.whl) cp build/linux-wheel/*.whl dist ;;  # pure Python
	  *) auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/linux-wheel/*.whl ;;
	esac
	ls -l dist

hub: wheel
	@$(BIN)/python .ci/hub.py "$$(ls -t dist/torch_dcs_ops-*.whl | head -n 1)" dist/hub

clean:
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
