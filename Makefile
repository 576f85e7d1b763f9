# make demo: stories, from the shipped model.    make test: everything that is claimed, proven.
# make book: the pages, in _build/html.          make notebooks: the chapters, live.
# make refresh: run the notebooks, save outputs. make export: notebooks -> tinyvllm/*.py.

PYTHON ?= python3
BIN := .venv/bin
BOOK := $(BIN)/jupyter-book build . --toc book/_toc.yml -W -n --keep-going --all
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What is imported is compiled once, and not in each of the many processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
# Two processes test at a time, and models this small only lose by handing work to other threads.
test refresh: export OMP_NUM_THREADS := 1
test refresh: export NUMBA_NUM_THREADS := 1

.PHONY: demo test book notebooks refresh export clean

demo: .venv/installed
	$(BIN)/tinyvllm generate --stats \
	  "Once upon a time, a brave little mouse named Clara lived" \
	  "In a small village by the sea lived" \
	  "Once, a clever little fox called Hugo lived" \
	  "Nora was a patient girl who lived"

# nbval runs the notebooks: the outputs are those of a refresh, and the exercises' solutions pass.
test: .venv/installed-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m book.tools export --check
	$(BIN)/pytest tests --ignore=tests/pages -n 2 --dist worksteal
	$(BIN)/pytest --nbval --nbval-current-env --nbval-cell-timeout 120 notebooks -n 2 --dist loadscope
	$(BOOK)
	$(BIN)/pytest tests/pages -n 2 --dist worksteal -rs

book: .venv/installed-all
	$(BOOK)

notebooks: .venv/installed-all
	$(BIN)/jupyter lab --ServerApp.root_dir=. notebooks/00_tour.ipynb

refresh: .venv/installed-all
	$(BIN)/python -m book.tools refresh

export: .venv/installed-all
	$(BIN)/python -m book.tools export

clean:
	rm -rf .venv _build node_modules

# Installed again only when what is to be installed has changed. Python compiles what it imports, when
# it does: a small part of what is installed.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tinyvllm needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e .
	@touch $@

.venv/installed-all: .venv/installed
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev,book]'
	@touch $@
