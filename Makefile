# Every target works from a bare clone; `make help` lists them.
PY := .venv/bin/python
.DEFAULT_GOAL := help

.PHONY: help setup demo test quick gpu check fix docs clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup:  ## make .venv with everything installed
	@tools/setup.sh

demo: setup  ## a video from text and one from a picture (CPU is enough)
	@tools/demo.sh

# Tests that start many processes and count what is left on the host. Two at a time where each
# worker may have an IPC namespace of its own (tests/conftest.py), else one after the other.
APART := multirank numa ranks server bench/test_register.py memory/test_kills.py \
	memory/test_sharing.py pipeline/test_failures.py pipeline/test_lazy_load.py \
	pipeline/test_release.py pipeline/test_weight_server.py test_infer.py
TWO := -n 2 --dist loadfile --no-loadscope-reorder
IF_APART := $(shell unshare --ipc true 2>/dev/null && echo "$(TWO)")
# Not in `make quick` either.
LONG := bench demo matrix tools pipeline/test_against_diffusers.py pipeline/test_libraries.py \
	pipeline/test_ready_configs.py pipeline/test_vae_fast.py pipeline/test_vae_sweep.py \
	streaming/test_disk.py synth/test_models.py test_startup.py
TOGETHER := $(TWO) $(addprefix --ignore=tests/,$(APART))

test: setup check  ## all tests (10 minutes on 2 cores, 20 on slow ones)
	@tools/system_packages.sh
	$(PY) -m pytest $(TOGETHER)
	$(PY) -m pytest $(IF_APART) $(addprefix tests/,$(APART))

quick: setup  ## a first answer within a minute
	$(PY) -m pytest -q -m "not slow and not numa_vm" -x $(TOGETHER) \
		$(addprefix --ignore=tests/,$(LONG))

gpu: setup  ## the tests that need one or two GPUs
	$(PY) -m pytest -m "gpu or multigpu"

check: setup  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

fix: setup  ## let ruff format and repair
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: setup  ## write docs/configuration.md anew
	$(PY) -m shared_offload.config > docs/configuration.md

clean:  ## remove .venv, build and demo output
	rm -rf .venv build demo
