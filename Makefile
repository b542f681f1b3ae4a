# `make demo` and `make test` do all set-up by themselves, in .venv; a second call goes straight to work.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test check browser trackers deployment bench docs clean

demo: $(STAMP)
	$(BIN)/apfl run --out runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not slow and not gpu and not browser and not deployment" $(TESTS)

check: $(STAMP)
	scripts/check

browser: $(STAMP)
	$(BIN)/python -m pytest -m browser tests/report/test_browser.py

trackers: .venv/.trackers
	$(BIN)/python -m pytest tests/report/test_trackers.py

deployment: .venv/.flower
	$(BIN)/python -m pytest -m "deployment and not slow" --durations=0 $(or $(TESTS),tests)

bench: $(STAMP)
	$(BIN)/python benchmarks/foundation.py

docs: $(STAMP)
	$(BIN)/python -m sphinx -W -q docs docs/_build

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs,hub,efficientnet,tables]"
	touch $(STAMP)

.venv/.flower: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[flower]"
	touch $@

.venv/.trackers: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[mlflow,wandb]"
	touch $@

clean:
	rm -rf .venv runs docs/_build
