# `make demo` and `make test` do all set-up by themselves, in .venv; a second call goes straight to work.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test check browser trackers privacy flower deployment bench bench-gpu docs site package clean

demo: $(STAMP)
	$(BIN)/apfl run --out runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not slow and not gpu and not browser and not deployment" $(TESTS)

check: $(STAMP)
	scripts/check

browser: $(STAMP)
	$(BIN)/python -m pytest -m browser tests/report

trackers: .venv/.trackers
	$(BIN)/python -m pytest tests/report/test_trackers.py

# What `make test` skips if dp-accounting is not installed.
privacy: .venv/.privacy
	$(BIN)/python -m pytest tests/maths/test_privacy.py tests/methods/test_private.py tests/methods/test_attacks.py \
		tests/federate/private

# What `make test` skips if Flower is not installed.
flower: .venv/.flower
	$(BIN)/python -m pytest -n auto -m "not slow and not gpu and not browser and not deployment" tests/federate tests/cli/test_federate_cli.py

deployment: .venv/.flower
	$(BIN)/python -m pytest -m "deployment and not slow" --durations=0 $(or $(TESTS),tests)

bench: $(STAMP)
	$(BIN)/python benchmarks/peers.py --out runs/bench.json --plot runs/bench.svg

bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py

# Runs the tutorials too: all together take about half a minute of processor time.
docs: $(STAMP)
	$(BIN)/python -m sphinx -W -q docs docs/_build

# The docs of this tree and of every tag, side by side, with a switch between them.
site: $(STAMP)
	scripts/site docs/_build/site

# Wheel and sdist, tried in an empty environment; the image is built if there is a builder, and only linted otherwise (`make test`).
package: $(STAMP)
	scripts/package
	@if docker info >/dev/null 2>&1; then docker build --quiet --tag apfl .; else echo "no builder of images here: linted only"; fi

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs,hub,efficientnet,tables,onnx]"
	touch $(STAMP)

.venv/.flower: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[flower]"
	touch $@

.venv/.privacy: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[privacy]"
	touch $@

.venv/.trackers: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[mlflow,wandb]"
	touch $@

clean:
	rm -rf .venv runs docs/_build docs/tutorials docs/sg_execution_times.rst
