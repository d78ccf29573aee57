# make demo    a small GPT trained with torch's kernels and trainfast's, side by side
# make demo-graphs   graph networks fed from source, files, positions and a graph cache
# make test    every capability on the best backend and the scalar one, in minutes
# make test-all   everything that pytest can run on this machine
# make check   make lint: formatting, lint, types; and make stubs: warnings as errors,
#              CUDA for all GPUs, stubs
# make wheel   in dist/: the wheel for every Python from 3.11, every torch from 2.6 and
#              every Linux with glibc 2.34, audited; and the sdist
# make compat  tests that wheel beside several versions of torch (GBs from the index)
# make gpu     on a machine with a GPU, build for it, test, sanitize, measure: all parts
#              of .ci/gpu, ten minutes each
# TRAINFAST_CUDA=1 make ...   with CUDA on a machine without a GPU, too
# make docs    the documentation site; a broken link is an error
# make clean   removes what was built and .venv
#
# Needed: a C compiler, make, and Python 3.11 or newer (another: make PYTHON=python3.12).

PYTHON ?= python3
RUN := .venv/bin/python
WORKERS ?= auto
# pytest-xdist may be missing where no package index is reached: one process, then.
PARALLEL = $(shell $(RUN) -c "import xdist" 2>/dev/null && echo "-n $(WORKERS) --dist worksteal")
INSTALLED := .venv/.installed
C_FILES := find csrc cuda tests benchmarks -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \
    -o -name '*.cpp' | grep -v /vec_

.PHONY: demo demo-graphs test test-all check lint stubs wheel compat gpu docs build clean
unexport PYTHONDONTWRITEBYTECODE # or every process compiles all Python files again
.NOTPARALLEL: # one pip at a time; setup.py compiles in parallel by itself

demo: .venv/.demo build
	$(RUN) examples/char_transformer.py

demo-graphs: .venv/.demo-graphs build
	$(RUN) examples/graph_syntax_trees.py
	$(RUN) examples/trajectories.py

test: .venv/.test build
	$(RUN) -m pytest --quick $(PARALLEL)

test-all: .venv/.test build
	$(RUN) -m pytest $(PARALLEL)

# Builds into trainfast/ only what has changed; setup.py knows what that is.
build: $(INSTALLED)
	@$(RUN) setup.py -q build_ext --inplace

# The package points at this folder, so that an installation is done once.
$(INSTALLED): .venv/.build pyproject.toml
	@$(RUN) setup.py -q build_ext --inplace
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
	    --no-build-isolation --editable .
	@touch $@

.venv/.%: pyproject.toml .ci/venv.py
	@$(PYTHON) .ci/venv.py $*
	@touch $@

# .test and .demo build nothing, but need what the build needs for tests of packaging.
.venv/.test .venv/.demo .venv/.demo-graphs .venv/.dev .venv/.wheel .venv/.docs: \
    .venv/.build
# What an earlier `make` without TRAINFAST_CUDA=1 has not brought.
ifeq ($(TRAINFAST_CUDA),1)
.venv/.build: .venv/.nvrtc
endif
.venv/.oracles: .venv/.test # so that the torch that they find is ours
.venv/.clients: .venv/.oracles build/clients/.installed

# timm apart: torchvision, which it needs, breaks other packages where its C++ part was
# built for another torch than ours.
build/clients/.installed: .venv/.test
	-$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps \
	    --upgrade --target build/clients timm==1.0.31 torchvision==0.28.0
	@mkdir -p build/clients && touch $@

check: lint stubs

lint: .venv/.dev .venv/.test
	$(C_FILES) | xargs .venv/bin/clang-format --dry-run -Werror
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(RUN) -m mypy

stubs: .venv/.dev .venv/.test build
	TRAINFAST_WERROR=1 $(RUN) setup.py -q build --build-lib build/check
	if command -v clang >/dev/null; then \
	    CC=clang TRAINFAST_WERROR=1 TRAINFAST_CUDA=0 $(RUN) setup.py -q build \
	        --build-lib build/check-clang; fi
	cd build/check && ../../$(RUN) -m mypy.stubtest \
	    --mypy-config-file ../../pyproject.toml trainfast._core

wheel: .venv/.wheel
	@$(RUN) .ci/wheel.py

compat: wheel
	$(RUN) .ci/compat.py $(TORCH)

gpu: .venv/.test build
	@status=0; for part in correctness sanitize attention rest; do \
	    PYTHON=$(RUN) .ci/gpu $$part || status=1; done; exit $$status

docs: .venv/.docs
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

clean:
	rm -rf build dist *.egg-info .venv .pytest_cache .ruff_cache .mypy_cache
	rm -f trainfast/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
