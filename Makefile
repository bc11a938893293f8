# Every target sets up first, so any of them works right after a clone. Later runs skip the set-up
# unless requirements/ or pyproject.toml changed.
# ARGS is passed to the program: make demo ARGS="--seed 1", make test ARGS="tests/dataflow -x".

PYTHON := .venv/bin/python
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --no-deps
# PyTorch's index has CPU builds that PyPI lacks. It is used only if pip's configured index has none.
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: setup demo test check lint types bench bench-peers clean
.DEFAULT_GOAL := setup

setup: .venv/.weft-installed

demo: setup
	@$(PYTHON) examples/grpo_arithmetic.py $(ARGS)

# Always write byte code: the tests start some two hundred processes that import Weft.
test: setup .venv/.compiled
	@PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "not gpu and not slow and not thorough" $(ARGS)

check: lint types

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: setup
	$(PYTHON) -m basedpyright

bench: setup
	@$(PYTHON) benchmarks/steps/grpo_step.py $(ARGS)

bench-peers: setup .venv-peers/.requirements-installed

clean:
	rm -rf .venv .venv-peers build dist weft.egg-info

# Stamps are written last, so that the next run repeats an interrupted set-up.
.venv/.requirements-installed: requirements/cpu.txt
	$(call install,.venv,$<)

# Packages are installed without byte code, because programs import only a quarter of the modules.
# Tests compile all of it beforehand, because a compiler warning about a package would fail them.
.venv/.compiled: .venv/.requirements-installed
	@$(PYTHON) -W ignore -m compileall -qq -j 0 -x '/tests?/' .venv/lib || true
	@touch $@

.venv-peers/.requirements-installed: requirements/peers.txt
	$(call install,.venv-peers,$<)

.venv/.weft-installed: pyproject.toml .venv/.requirements-installed
	@$(PYTHON) $(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

# $(call install,ENVIRONMENT,LOCK) builds a virtual environment from a lock. The lock is complete, so
# --no-deps keeps out packages that break a CPU install (CONTRIBUTING.md lists them). Builds that
# PyPI cannot have (NAME==VERSION+LABEL) come first, so that a missing one fails within seconds.
define install
@set -eu; \
for python in python3.11 python3 none; do \
	if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
done; \
if [ $$python = none ]; then echo "weft: needs Python 3.11 or newer with its venv module (python3.11 or python3 on PATH)" >&2; exit 2; fi; \
echo "weft: installing the $$(grep -c == $(2)) packages of $(2) into $(1)/, once; takes a few minutes ..."; \
if [ -e $(1)/.requirements-installed ]; then clear=; else clear=--clear; fi; \
$$python -m venv $$clear $(1); \
pip="$(1)/bin/python $(PIP_INSTALL) --no-compile"; \
builds=$$(grep -E '^[^#]*==[^#]*[+]' $(2) || true); \
if [ -n "$$builds" ] && ! said=$$($$pip $$builds 2>&1); then \
	case "$$said" in *"No matching distribution"*) ;; *) echo "$$said" >&2; exit 1;; esac; \
	echo "weft: pip, as it is configured, does not find" $$builds "; trying $(TORCH_INDEX) ..."; \
	$$pip --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX) $$builds || { \
		echo "weft: pip finds no" $$builds "at $(TORCH_INDEX) either. Name an index that has it, 'make setup TORCH_INDEX=URL'," \
			"or a folder with its wheel, 'PIP_FIND_LINKS=FOLDER make setup'" >&2; exit 1; }; \
fi; \
$$pip --requirement $(2) || { echo "weft: pip could not install $(2)" >&2; exit 1; }; \
touch $(1)/.requirements-installed; \
echo "weft: $(1)/ is ready"
endef
