# make demo: compile, draw and train a U-Net on the GPUs there are, else on two CPU devices.    make test: the test
# suite.    make standin: tests on a stand-in accelerator, which needs a C++ compiler.    make lint: ruff and mypy.
#
# The first call makes .venv and installs pipec with all it needs there. To use an environment of your own, with the
# torch it has (2.11 or newer; a GPU build is fine):    make test PYTHON=/path/to/python

BASE   ?= python3
VENV   := .venv
PYTHON := $(VENV)/bin/python
# One exact version, so that pip takes a plain CPU build of it where one is at hand.
TORCH  ?= torch==2.13.0

ifeq ($(PYTHON),$(VENV)/bin/python)
  READY := $(VENV)/installed
else
  READY := own-environment
endif

# glibc: keep freed tensors for the next step instead of giving their pages back to the system (docs/contracts.md).
DEMO_ENV := MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=1073741824

.PHONY: demo test standin lint gallery clean own-environment

demo: $(READY)
	$(DEMO_ENV) $(PYTHON) examples/unet.py $(DEMO)

# Two files at a time: most of the tests wait, for other processes say, most of their time.
test: $(READY)
	$(PYTHON) -m pytest -n 2 --dist loadfile $(TEST)

standin: $(READY)
	$(PYTHON) -m pytest tests/standin

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

gallery: $(READY)
	$(PYTHON) viz/make.py

$(VENV)/installed: pyproject.toml
	@$(BASE) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else "pipec needs Python 3.10 or newer, \
	but $(BASE) is %d.%d; say which to use: make BASE=python3.12" % v[:2])'
	@test -x $(PYTHON) || $(BASE) -m venv $(VENV) || $(BASE) -m venv --clear --without-pip $(VENV)
	@$(PYTHON) -m pip --version > /dev/null 2>&1 || $(BASE) -m pip --python $(PYTHON) install pip
	@echo 'Installing $(TORCH) and what pipec needs into $(VENV); this happens once and can take minutes.'
	$(PYTHON) -m pip install -qq '$(TORCH)'
	$(PYTHON) -m pip install -qq --editable '.[dev]'
	@touch $@

own-environment:
	$(PYTHON) -m pip install -qq --editable '.[dev]'

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
