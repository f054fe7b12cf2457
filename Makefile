# make demo | test | test-sparse | test-pyg | test-emulated | test-all | soak | fuzz | build | lint | format | docs | wheel |
# test-wheel. Everything goes into .venv; nothing else on the machine is touched. `make soak` and `make fuzz` take MINUTES=10.
# `make test-all` runs the four before it with every case; they alone run cases that hold every pair of parameters.
# Needs Python 3.11 or 3.12 with its venv module, a C++17 compiler, and the package registry.

PYTHON ?= python3
TEST_JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# The versions the project is run with; those of DGL, PyG and the test tools are in pyproject.toml.
TORCH ?= torch==2.13.0
BUILD_TOOLS := "setuptools>=70.1" wheel "pybind11>=2.12" "cmake>=3.20" ninja
# PyPI's torch for Linux brings gigabytes of CUDA libraries, which a machine without a GPU does not need.
# So its own index of CPU builds is asked as well, where it can be reached (CPU_TORCH_INDEX= leaves it out).
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CPU_TORCH_INDEX ?= $(if $(HAS_GPU),,https://download.pytorch.org/whl/cpu)
REACHED = $(BIN)/python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/torch/", timeout=10)' 2>/dev/null
# The CUDA half takes minutes to compile: by default only where there is a GPU to run it.
export GNNACCEL_CUDA ?= $(if $(HAS_GPU),AUTO,OFF)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A flag set in the shell must not reach pip, pytest and the runs "without".
unexport GNNACCEL GNNACCEL_VERBOSE GNNACCEL_PROFILE GNNACCEL_CUDA_GRAPHS

.PHONY: demo test test-emulated test-sparse test-pyg test-all soak fuzz build lint format docs wheel test-wheel clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12) and "the pinned tools need Python 3.11 or 3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/torch.done: $(BIN)/python
	$(BIN)/pip install -q $(BUILD_TOOLS)
	@extra=; if [ -n "$(CPU_TORCH_INDEX)" ] && $(REACHED) "$(CPU_TORCH_INDEX)"; then \
	  extra="--extra-index-url $(CPU_TORCH_INDEX)"; fi; \
	set -x; $(BIN)/pip install -q "$(TORCH)" $$extra
	touch $@

$(VENV)/test.done: $(VENV)/torch.done pyproject.toml setup.py gnnaccel.pth
	$(BIN)/pip install -q --no-build-isolation -e ".[test]"
	touch $@

# By name: the package is installed by now, so that this fetches the tools alone and builds nothing.
$(VENV)/lint.done: $(VENV)/test.done
	$(BIN)/pip install -q "gnnaccel[lint]"
	touch $@

$(VENV)/docs.done: $(VENV)/test.done
	$(BIN)/pip install -q "gnnaccel[docs]"
	touch $@

# Only what changed is compiled again.
build: $(VENV)/test.done
	$(BIN)/python setup.py -q build_ext --inplace

demo: build
	@echo; echo "== examples/dgl_gcn.py, DGL alone (GNNACCEL=compat: its wheel cannot be imported otherwise)"
	GNNACCEL=compat $(BIN)/python examples/dgl_gcn.py
	@echo; echo "== the same script, unmodified, with gnnaccel"
	GNNACCEL=1 GNNACCEL_PROFILE=1 $(BIN)/python examples/dgl_gcn.py
	@echo; echo "== examples/pyg_gat.py, PyTorch Geometric alone"
	$(BIN)/python examples/pyg_gat.py
	@echo; echo "== the same script, unmodified, with gnnaccel"
	GNNACCEL=1 GNNACCEL_PROFILE=1 $(BIN)/python examples/pyg_gat.py
	@echo; echo "== GCN and GAT of both frameworks, alone and with gnnaccel, on a generated graph of half a million edges"
	$(BIN)/gnnaccel compare --framework dgl,pyg --model gcn,gat --dataset generated --hidden 32 --heads 2 --epochs 8 --repeats 1

# In TEST_JOBS processes; one that has done its tests takes half of those that another has left. Warnings of users' own are
# not carried between the processes: that would import DGL where nothing has made it importable.
PARALLEL := -n $(TEST_JOBS) --dist worksteal -W ignore::UserWarning

test: build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs $(PARALLEL) tests

# Full products of the lists that tests are parametrised with, as before a release (tests/pairwise.py).
test-all: export PYTEST_ADDOPTS := --all
test-all: NO_SPARSE =
test-all: test test-sparse test-pyg test-emulated

# The CUDA kernels without a GPU: compiled for the CPU, run thread by thread under sanitizers.
test-emulated: build
	$(BIN)/python tests/emulation/emulate.py

# torch_sparse publishes no build for this torch: it is compiled from its source package, which takes minutes. It goes
# into a folder of its own, so that every other target still sees an environment without it. Not from pip's cache,
# which would hand out what was compiled for another torch. The tests need no CUDA half of it, and no speed.
SPARSE := $(VENV)/sparse
# Files that take long, and name no matrix of torch_sparse's; `make test-all` runs them too.
NO_SPARSE = tests/test_pyg_compile.py tests/test_pyg_compiled.py
SPARSE_INSTALL = PATH="$(abspath $(BIN)):$$PATH" FORCE_ONLY_CPU=1 MAX_JOBS="$${MAX_JOBS:-2}" CXX=$(abspath scripts/quick_cxx) \
  QUICK_CXX=$(abspath $(VENV))/quick_cxx $(BIN)/pip install -q --no-cache-dir --no-build-isolation --no-deps --target $(SPARSE)

# torch_scatter leaves ninja out, and compiles one file after the other if it is not told otherwise.
$(VENV)/sparse.done: $(VENV)/torch.done
	rm -rf $(SPARSE) $(VENV)/quick_cxx
	printf '[build_ext]\nparallel = %s\n' "$${MAX_JOBS:-2}" >$(VENV)/parallel.cfg
	DIST_EXTRA_CONFIG=$(abspath $(VENV))/parallel.cfg $(SPARSE_INSTALL) torch_scatter==2.1.2
	$(SPARSE_INSTALL) torch_sparse==0.6.18
	PYTHONPATH=$(abspath $(SPARSE)) $(BIN)/python -c 'import torch_sparse'
	rm -rf $(VENV)/quick_cxx $(VENV)/parallel.cfg
	touch $@

test-sparse: build $(VENV)/sparse.done
	PYTHONPATH=$(abspath $(SPARSE)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs $(PARALLEL) \
	  $(filter-out $(NO_SPARSE),$(wildcard tests/test_pyg*.py)) tests/test_examples.py -k pyg

# Every layer with older versions of PyG, each in a folder of its own.
PYGS ?= 2.5.3 2.6.1 2.7.0
PYG_TESTS := tests/test_pyg_matrix.py tests/test_touch.py -k "float32 or second or names_of_pyg"

$(VENV)/pyg-%/done: $(VENV)/torch.done
	rm -rf $(VENV)/pyg-$*
	$(BIN)/pip install -q --no-deps --target $(VENV)/pyg-$* torch_geometric==$*
	touch $@

test-pyg: build $(foreach version,$(PYGS),$(VENV)/pyg-$(version)/done)
	@status=0; for version in $(PYGS); do echo "== PyG $$version"; \
	  PYTHONPATH=$(abspath $(VENV))/pyg-$$version OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PARALLEL) $(PYG_TESTS) || status=1; \
	done; exit $$status

# A long run of mixed training that watches memory and fallbacks; not part of the tests.
soak: build
	$(BIN)/python scripts/soak.py --minutes $(or $(MINUTES),10)

# Random cases against plain torch, PyG and DGL for as long as they are given; `make test` runs some of them.
fuzz: build
	$(BIN)/python tests/fuzz/run.py --minutes $(or $(MINUTES),10)

SOURCES := $(shell git ls-files 'cpp/*.cpp' 'cpp/*.h' 'cuda/*.cpp' 'cuda/*.h' 'cuda/*.cu' 'cuda/*.cuh' 2>/dev/null)

lint: $(VENV)/lint.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py

format: $(VENV)/lint.done
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

# A wheel for this Python, made of the source package, in dist/. Without CUDA, but with GNNACCEL_CUDA=ON make wheel.
wheel: override GNNACCEL_CUDA := $(if $(filter ON,$(GNNACCEL_CUDA)),ON,OFF)
wheel: $(BIN)/python
	$(BIN)/pip install -q "build==1.6.1"
	rm -rf dist
	$(BIN)/python -m build

# The wheel in fresh environments, one for each torch that the registry has a CPU build of (TORCHES="2.6.0 2.13.0").
test-wheel:
	@test -e dist/*.whl || { echo "make test-wheel: no wheel in dist: make wheel first"; exit 1; }
	$(PYTHON) scripts/test_wheel.py dist/*.whl $(if $(TORCHES),--torch $(TORCHES))

# The documentation as a site, in build/site. Strict: a warning, such as of a link that leads nowhere, is an error.
docs: $(VENV)/docs.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info gnnaccel/_C*.so
