# Every target works on a fresh machine with Python 3.10+ and a package index: it makes .venv, installs what it needs
# there (once, and again when pyproject.toml or constraints.txt change) and runs.
#
#   make test ACTIVE=1        use the python that is active, install nothing
#   make test PYTHON=/a/path  make .venv from this python

ACTIVE ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
MACHINE_CODE_ARGS ?=
PERF_ARGS ?=
GPU_TEST_XML ?= gpu-test.xml
GPU_RESULT ?= perf_output/gpu.json
# More workers than this only multiply the time and memory of importing torch.
MAX_WORKERS ?= 16

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

ifeq ($(ACTIVE),)
RUN := .venv/bin/python
installed = .venv/.installed-$(1)
else
RUN := $(or $(shell command -v python),python3)
installed =
endif

# A name on the path may be a launcher without an interpreter behind it, or lack what `venv` needs: try each.
define FIND_PYTHON
for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11 python3.10 python); do \
  if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; \
  then python=$$candidate; break; fi; \
done; \
if [ -z "$${python:-}" ]; then \
  echo 'No Python 3.10 to 3.14 with venv and ensurepip found (Debian: install python3-venv); set PYTHON=/path/to/python.' >&2; \
  exit 1; \
fi
endef

# One thread per worker: the workers fill the cores, and tiny tensors gain nothing from threads.
PYTEST := env OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(RUN) -m pytest
PARALLEL := -n auto --maxprocesses $(MAX_WORKERS) --dist worksteal
# What `make test` leaves to a GPU or to the night.
DAILY := -m 'not gpu and not nightly'
# The torch of a GPU machine is not the pinned one: what it warns of is shown and fails nothing.
GPU_TEST = env -u TRITON_INTERPRET $(RUN) -m pytest tests -m gpu --device cuda -W default --junitxml=$(GPU_TEST_XML) $(PYTEST_ARGS)
GPU_CHECK := import sys, torch; torch.cuda.is_available() or sys.exit(f"make gpu and gpu-test need a CUDA device, and torch \
{torch.__version__} of {sys.executable} sees none. ACTIVE=1 takes the python that is active.")

.PHONY: help demo test test-front test-kernels test-models nightly fuzz gpu gpu-test check perf machine-code doctest docs dist clean

help:
	@echo 'make demo      a network with derivatives in its loss: torch, torch repaired, and compiled, in a minute'
	@echo 'make test      every test that needs no GPU, the examples in the docs included'
	@echo 'make test-models  models of transformers, diffusers and timm, unedited'
	@echo 'make nightly   what takes long: full grids, all machine code, third orders compiled'
	@echo 'make fuzz      thousands of drawn calls of each record (FUZZ_EXAMPLES=5000)'
	@echo 'make gpu       on a machine with a GPU (CUDA): gpu-test, operators judged there, measurements and their pages'
	@echo 'make gpu-test  the records and the tests of kernels on the compiled kernels (CUDA)'
	@echo 'make check     ruff, format, pyright, codespell'
	@echo 'make machine-code  bring the table of machine code in docs/perf up to date (no GPU needed)'
	@echo 'make perf      measure every kernel beside its peers, on the GPU if there is one (PERF_ARGS=--quick: few of them)'
	@echo 'make doctest   run the examples in docs and README'
	@echo 'make docs      build the site into ./site; broken links and other warnings are errors'
	@echo 'make dist      build the wheel and the sdist of the last commit (needs the package "build")'
	@echo 'make clean     remove what the targets made'
	@echo 'ACTIVE=1 uses the python that is active and installs nothing.'

.venv/bin/python:
	@$(FIND_PYTHON); "$$python" -m venv ".venv"

.venv/.installed-%: pyproject.toml constraints.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@touch $@

demo: $(call installed,demo)
	@mkdir -p perf_output
	PYTHONPATH=. $(RUN) docs/examples/pinn.py --output perf_output/demo.png $(DEMO_ARGS)

test: test-front test-kernels doctest

# Compiled code needs triton as it is, kernel tests need its interpreter, and an import decides which: two processes.
test-front: $(call installed,test)
	env -u TRITON_INTERPRET $(PYTEST) tests --ignore=tests/kernels --ignore=tests/models $(PARALLEL) $(DAILY) $(PYTEST_ARGS)

test-kernels: $(call installed,test)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels $(PARALLEL) $(DAILY) $(PYTEST_ARGS)

# Apart from `test`, which needs none of the libraries that they are from.
test-models: $(call installed,models)
	env -u TRITON_INTERPRET $(PYTEST) tests/models $(PARALLEL) $(DAILY) $(PYTEST_ARGS)

nightly: $(call installed,models)
	env -u TRITON_INTERPRET $(PYTEST) tests --ignore=tests/kernels $(PARALLEL) -m nightly $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels $(PARALLEL) -m nightly $(PYTEST_ARGS)
	for chip in sm_80 sm_90; do env -u TRITON_INTERPRET $(PYTEST) tests/kernels --device $$chip $(PARALLEL) $(PYTEST_ARGS) || exit 1; done

fuzz: $(call installed,test)
	FUZZ_EXAMPLES=$(or $(FUZZ_EXAMPLES),5000) $(PYTEST) tests/test_fuzz.py $(PARALLEL) $(PYTEST_ARGS)

gpu-test: $(call installed,test)
	@$(RUN) -c '$(GPU_CHECK)'
	$(GPU_TEST)

# Whoever has a card for an hour gets all that it can tell: a test that fails stops nothing, but the exit status says so.
gpu: $(call installed,test)
	@$(RUN) -c '$(GPU_CHECK)'
	rm -f $(GPU_RESULT)
	failed=0; \
	$(GPU_TEST) || failed=1; \
	env -u TRITON_INTERPRET $(RUN) -m perf.torch_derivatives --device cuda || failed=1; \
	env -u TRITON_INTERPRET $(RUN) -m perf run --device cuda --result $(GPU_RESULT) $(PERF_ARGS) || failed=1; \
	env -u TRITON_INTERPRET $(RUN) -m perf compile --device cuda --write || failed=1; \
	[ -f $(GPU_RESULT) ] && $(RUN) -m perf report $(GPU_RESULT) || failed=1; \
	exit $$failed

check: $(call installed,check)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath "$$($(RUN) -c 'import sys; print(sys.executable)')"
	PYTHONPATH=. PATH="$$(dirname "$$($(RUN) -c 'import sys; print(sys.executable)')"):$$PATH" $(RUN) -m pyright \
	  --verifytypes primitives --ignoreexternal --outputjson | $(RUN) .ci/known_types.py
	$(RUN) -m codespell_lib

perf: $(call installed,perf)
	$(RUN) -m perf run $(PERF_ARGS)

machine-code: $(call installed,test)
	env -u TRITON_INTERPRET $(RUN) -m perf.machine_code $(MACHINE_CODE_ARGS)

doctest: $(call installed,test)
	$(PYTEST) --doctest-glob='*.md' docs README.md $(PARALLEL) $(PYTEST_ARGS)

docs: $(call installed,docs)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

# Links and pictures of the README are relative: on a package index they are those of the release.
REPOSITORY := https://github.com/torch-training-primitives/torch-training-primitives
dist:
	rm -rf build/source dist && mkdir -p build/source
	git archive HEAD | tar -x -C build/source
	sed -i -E 's#\]\((docs/[^)]*\.(png|svg))\)#]($(REPOSITORY)/raw/main/\1)#g; s#\]\(((docs/|C)[^)]*)\)#]($(REPOSITORY)/blob/main/\1)#g' build/source/README.md
	python3 -m build --outdir dist build/source

clean:
	rm -rf .venv build dist site *.egg-info perf_output gpu-test.xml .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
