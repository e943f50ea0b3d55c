# Each target sets up .venv by itself. PYTHON is the interpreter that it is made of (3.10 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYSPARK_PYTHON := $(abspath $(BIN)/python)
export SPARK_LOCAL_IP := 127.0.0.1
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test soak asan check bench clean

$(VENV)/%.installed: pyproject.toml $(wildcard spark_klog/records/_kernel*.p*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	touch $@

demo: $(VENV)/demo.installed
	$(BIN)/python jobs/demo.py

test: $(VENV)/test.installed
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=30 $(ARGS)

# The long runs of which CI has a short slice: tens of kills, a storm of rebalances, ten minutes of fuzzing for each target.
soak: $(VENV)/test.installed
	SPARK_KLOG_KILLS=30 $(BIN)/python -m pytest --timeout=3600 -k 'kill or acknowledged' tests/broker tests/zookeeper tests/jobs tests/log tests/spark $(ARGS)
	SPARK_KLOG_FUZZ_SECONDS=600 $(BIN)/python -m pytest --timeout=3600 tests/fuzz tests/broker/test_api_fuzz.py tests/broker/test_fetch_sessions.py $(ARGS)

# The native kernel under AddressSanitizer and UndefinedBehaviorSanitizer.
asan: $(VENV)/test.installed
	$(BIN)/python -m tests.fuzz.asan

check: $(VENV)/check.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/test.installed
	$(BIN)/python -m benchmarks.run $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info spark_klog/records/_kernel.c spark_klog/records/*.so demo test-logs
