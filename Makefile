# Every target sets up what it needs: a virtual environment with what locks/ pins by hash, made once and again when
# pyproject.toml or the locks change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread a process: the tests run two at a time, and tiny tensors lose time with more.
export OMP_NUM_THREADS ?= 1

# Triton lies in a folder of its own, since a whole gigabyte is of use to its own tests alone; the CPU build of torch
# does not ask for it.
TRITON := .triton
TRITON_READY := $(TRITON)/.ready

# NVFlare pins some packages to one version, so it has an environment of its own, with all of ours in it.
NVFLARE := .venv-nvflare
NVFLARE_READY := $(NVFLARE)/.ready

.PHONY: help demo test test-quick test-kernels test-nvflare test-newest test-oldest mutants lint format docs audit sbom lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Every file that is installed has a hash in locks/: torch for CPUs alone where there is one, else the index's own. The
# last line adds the package itself, and what a torch for GPUs asks for beyond the locks, by version alone.
LOCKED := -m pip install --quiet --require-hashes --no-deps
$(READY): pyproject.toml constraints.txt $(wildcard locks/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fednorm needs Python 3.11 or newer; try make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(LOCKED) -r locks/torch_cpu.txt || $(BIN)/python $(LOCKED) -r locks/torch.txt
	$(BIN)/python $(LOCKED) -r locks/requirements.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)  ## what label skew does to BatchNorm, and what repairs it: a few minutes on two cores
	$(BIN)/fednorm demo

test: lint  ## everything that must hold: lint, types, tests, doctests
	$(BIN)/python -m pytest -n 2

test-quick: $(READY)  ## the tests without the slow ones
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-kernels: $(READY) $(TRITON_READY)  ## the Triton kernels without a GPU: played by an interpreter, compiled for GPUs
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/test_kernels.py tests/test_kernel_rounds.py
	PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -n 2 tests/test_kernel_builds.py

$(TRITON_READY): locks/triton.txt
	$(BIN)/python $(LOCKED) --upgrade --target $(TRITON) -r locks/triton.txt
	@touch $@

test-nvflare: $(NVFLARE_READY)  ## methods on NVFlare: its simulator, a POC, edge devices; all on loopback
	$(NVFLARE)/bin/python -m pytest -n 2 tests/nvflare src/fednorm/nvflare

$(NVFLARE_READY): pyproject.toml constraints.txt constraints-nvflare.txt $(wildcard locks/*.txt)
	test -x $(NVFLARE)/bin/python || $(PYTHON) -m venv $(NVFLARE)
	$(NVFLARE)/bin/python $(LOCKED) -r locks/torch_cpu.txt || $(NVFLARE)/bin/python $(LOCKED) -r locks/torch.txt
	$(NVFLARE)/bin/python $(LOCKED) -r locks/requirements.txt
	$(NVFLARE)/bin/python $(LOCKED) --no-build-isolation -r locks/nvflare.txt
	$(NVFLARE)/bin/python -m pip install --quiet --no-build-isolation -c constraints.txt -c constraints-nvflare.txt -e '.[dev,nvflare]'
	@touch $@

# Users get the newest torch, clusters have old ones, and both bring gigabytes for GPUs: in environments of their own, by
# hand. OTHER=DIR puts one elsewhere. All else is as pinned, but for what torch and the Triton that comes with it have an
# opinion on.
OTHER = .venv-newest
OTHER_TORCH = torch
test-oldest: OTHER = .venv-oldest
test-oldest: OTHER_TORCH = torch==2.11.0 numpy<2.4
test-oldest: test-newest  ## the tests with the oldest torch that is admitted; pulls gigabytes, by hand
test-newest:  ## the tests with the newest torch there is; pulls gigabytes, by hand
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -Ev '^(torch|setuptools|numpy)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --upgrade -c $(OTHER)/constraints.txt $(patsubst %,'%',$(OTHER_TORCH)) ml-dtypes -e '.[dev]'
	$(OTHER)/bin/python -c 'import torch; print("torch", torch.__version__)'
	$(OTHER)/bin/python -m pytest -n 2 $(TESTS)

mutants: $(READY)  ## put mistakes into the package, one by one, and see which the tests notice: an hour (N=300 SEED=0)
	$(BIN)/python tools/mutants.py map
	$(BIN)/python tools/mutants.py run --number $(or $(N),300) --seed $(or $(SEED),0)

lint: $(READY)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)  ## let ruff put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## write the generated pages of docs/
	$(BIN)/python tools/make_docs.py
	$(BIN)/python tools/make_methods_page.py
	$(BIN)/python tools/make_records_page.py
	$(BIN)/python tools/make_settings_page.py
	$(BIN)/python tools/make_api_page.py
	$(BIN)/python tools/make_results_page.py
	$(BIN)/python tools/make_reliability_page.py

audit: $(READY)  ## known holes of what the locks pin; needs a source of advisories
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/python tools/audit.py

sbom: $(READY)  ## dist/sbom.json: what the locks pin, as CycloneDX, to go with a release
	$(BIN)/python tools/make_sbom.py

lock: $(READY)  ## write locks/ anew, with the hashes of what constraints.txt pins
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python tools/make_lock.py

clean:  ## remove the virtual environment and all caches; runs stay
	rm -rf $(VENV) $(NVFLARE) $(TRITON) .venv-newest .venv-oldest .mutants .pytest_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
