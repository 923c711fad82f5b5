# make demo: a CNN learns the digits on two virtual devices. make test: all tests. make bench: all
# benchmarks but the long ones and those for GPUs. Each first creates a virtual environment in .venv from requirements.lock.
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,$(shell $(p) -c 'import sys; (3,11) <= sys.version_info < (3,14) and print("$(p)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
LOWEST := .venv-lowest
EXTRAS := .venv-extras
NEEDS_PYTHON = test -n "$(PYTHON)" || { echo "ddl needs Python 3.11, 3.12 or 3.13; none was found. Set PYTHON=/path/to/python." >&2; exit 1; }
UV := uv>=0.9,<1

.PHONY: demo test coverage release-check table extras lowest bench lint check api lock clean

demo: $(VENV)/.installed
	rm -rf runs/demo
	$(BIN)/python -m ddl.main --gin_file=configs/digits_cnn.gin --model_dir=runs/demo \
	  --strategy=mirrored --num_virtual_devices=2

# Tests start processes, which then find compiled modules, also where Python is told to write none.
test: $(VENV)/.installed
	$(BIN)/python -m compileall -q ddl
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=30 --durations-min=5

# The share of the lines of ddl/ that the tests run, also in processes of their own. Slower than the tests alone.
coverage: $(VENV)/.installed
	rm -f .coverage .coverage.*
	-$(BIN)/coverage run -m pytest -n $(WORKERS) --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# The check before a release: the table of parity, the tests of large extras, and some tests with the lowest versions allowed.
release-check: table extras lowest

# Each layer of Keras on 1, 2 and 4 devices: the table of docs/parity.md.
table: $(VENV)/.installed
	$(BIN)/python -m pytest -m release -s tests/layers

# The tests of all extras, with those that the lock file leaves out. Their packages stand in an environment of their own, which also
# sees those of .venv: TensorFlow is not installed again.
extras: $(VENV)/.installed
	rm -rf $(EXTRAS)
	$(BIN)/python -m venv $(EXTRAS)
	printf 'import site; site.addsitedir("%s")\n' \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  > "$$($(EXTRAS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages_of_ddl.pth"
	$(EXTRAS)/bin/python -m pip install --quiet --disable-pip-version-check "$(UV)"
	$(EXTRAS)/bin/uv pip compile --quiet --no-emit-index-url --python $(EXTRAS)/bin/python -c requirements.lock \
	  --extra test --extra tables --extra arrayrecord --extra tfds --extra huggingface --extra keras-hub \
	  --extra mlflow --extra wandb pyproject.toml -o $(EXTRAS)/requirements.txt
	$(EXTRAS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(EXTRAS)/requirements.txt
	$(EXTRAS)/bin/python -m pytest -n $(WORKERS) tests/data/readers tests/models/test_keras_models.py tests/run/test_trackers.py

# The lowest versions that pyproject.toml allows, with the tests of the modules that use them.
lowest:
	@$(NEEDS_PYTHON)
	rm -rf $(LOWEST)
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check "$(UV)"
	$(LOWEST)/bin/uv pip compile --quiet --resolution lowest-direct --no-emit-index-url \
	  --python $(LOWEST)/bin/python \
	  --extra test --extra tables --extra arrayrecord pyproject.toml -o $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -r $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(LOWEST)/bin/tensorboard --version
	$(LOWEST)/bin/python -m pytest -n $(WORKERS) tests/test_main.py tests/test_output.py \
	  tests/cli tests/config tests/run/test_writers.py tests/run/test_console.py tests/data/readers/test_records.py tests/data/readers/test_table.py \
	  tests/metrics/test_history.py

bench: $(VENV)/.installed benchmarks/peers
	$(BIN)/python -m benchmarks

# The packages that benchmarks compare with ddl, in a folder outside the environment. They are installed
# without their dependencies: of these the benchmarks need TensorFlow alone.
benchmarks/peers: benchmarks/peers.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ -r $<
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# The pages of docs/api, from the docstrings of the public names.
api: $(VENV)/.installed
	$(BIN)/python docs/api/write.py

# The tested versions of all packages that the extras need.
lock: $(VENV)/.installed
	$(BIN)/pip install --quiet "$(UV)"
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url \
	  --no-emit-find-links --no-annotate --extra dev --custom-compile-command "make lock" --upgrade pyproject.toml -o requirements.lock

$(VENV)/.installed: pyproject.toml requirements.lock
	@$(NEEDS_PYTHON)
	@echo "Creating $(VENV) and installing TensorFlow and the other packages. This takes a minute or more."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) $(EXTRAS) benchmarks/peers runs/demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
