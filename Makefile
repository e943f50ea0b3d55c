# Each target sets up .venv by itself. PYTHON is the interpreter that it is made of (3.10 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYSPARK_PYTHON := $(abspath $(BIN)/python)
export SPARK_LOCAL_IP := 127.0.0.1
BUILD_DOCS := $(BIN)/python docs/publish.py build/docs
export PATH := $(abspath $(BIN)):$(PATH)
# If it is set, each Python process of a test compiles all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all soak matrix asan report-card check docs links site publish-site bench dist test-dist rehearsal clean

$(VENV)/%.installed: pyproject.toml $(wildcard spark_klog/records/kernels/_kernel*.p* spark_klog/schemas/_builders.pxi spark_klog/schemas/avro/_avro*.p* spark_klog/schemas/protobuf/_protobuf*.p*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	touch $@

# An archive of Spark's classes, with which its JVMs start with half the CPU.
$(VENV)/spark-home.made: $(VENV)/test.installed tests/support/spark/spark_home.py
	$(BIN)/python -m tests.support.spark.spark_home
	touch $@

demo: $(VENV)/demo.installed
	$(BIN)/klog demo

# `make check` runs tests/papers. The last line of a run has its processor seconds, which do not depend on what else goes on.
PYTEST := $(BIN)/python -m tests.support.runs.processor_seconds $(BIN)/python -m pytest --ignore=tests/papers --dist=loadfile --durations=30

# What CI runs: 1,000 processor seconds, which is ten minutes on two cores. Property tests have the same examples each time.
test: $(VENV)/test.installed $(VENV)/spark-home.made
	$(PYTEST) --numprocesses=4 --quick --hypothesis-profile=ci $(ARGS)

# What `make test` leaves out as well: other versions of Kafka, clients, codecs and mechanisms.
test-all: $(VENV)/test.installed $(VENV)/spark-home.made
	$(PYTEST) --numprocesses=6 $(ARGS)

# The long runs of which `make test-all` and the report card have a short slice: tens of kills, a storm of rebalances, ten minutes of
# fuzzing for each target, an hour of the log's model, 90 minutes of all programs beside each other. CI has the slice alone.
soak: export SPARK_KLOG_SOAK := 1
soak: $(VENV)/test.installed $(VENV)/spark-home.made
	SPARK_KLOG_KILLS=30 $(BIN)/python -m pytest --timeout=3600 -k '(kill or acknowledged) and not table_kills' tests/broker tests/zookeeper tests/jobs tests/load tests/log tests/restore tests/spark $(ARGS)
	SPARK_KLOG_RUNS=200 $(BIN)/python -m pytest --timeout=3600 tests/load/test_year.py $(ARGS)
	SPARK_KLOG_UPSERTS=2000 $(BIN)/python -m pytest --timeout=7200 tests/tables/test_upserts.py -k many_tables $(ARGS)
	SPARK_KLOG_KILLS=50 $(BIN)/python -m pytest --timeout=7200 tests/load/test_table_kills.py tests/load/test_by_topic.py tests/load/test_real_lakes.py tests/load/test_outages.py tests/load/test_debezium.py tests/tables/test_streams.py $(ARGS)
	SPARK_KLOG_KAFKAS=all $(BIN)/python -m pytest tests/broker/clients/test_client_matrix.py tests/client tests/zookeeper/test_connector_beside_kafka.py tests/spark/read/test_broker_trouble.py tests/spark/test_security_kafka.py tests/spark/test_kerberos.py $(ARGS)
	SPARK_KLOG_KILLS=20 SPARK_KLOG_KAFKAS=all $(BIN)/python -m pytest --timeout=3600 tests/mirror $(ARGS)
	SPARK_KLOG_MASTERS=all $(BIN)/python -m pytest tests/spark/test_cluster_masters.py tests/spark/standalone $(ARGS)
	SPARK_KLOG_MODEL_SECONDS=3600 $(BIN)/python -m pytest --timeout=7200 tests/log/test_log_model.py $(ARGS)
	SPARK_KLOG_REGISTRY_SECONDS=20 $(BIN)/python -m pytest --timeout=3600 tests/schemas/registry/test_largest_requests.py $(ARGS)
	SPARK_KLOG_FUZZ_SECONDS=600 $(BIN)/python -m pytest --timeout=3600 tests/fuzz tests/broker/handlers/test_api_fuzz.py tests/broker/handlers/test_fetch_sessions.py tests/broker/handlers/test_changes_at_once.py $(ARGS)
	SPARK_KLOG_FUZZ_SECONDS=3600 SPARK_KLOG_ANSWER_MS=1000 SPARK_KLOG_LOOP_MS=100 $(BIN)/python -m pytest -k 'hostile_values or longest_values' tests/broker/handlers/test_api_fuzz.py $(ARGS)
	SPARK_KLOG_SCRIPTED=full $(BIN)/python -m pytest --timeout=3600 tests/spark/test_scripted_brokers.py $(ARGS)
	SPARK_KLOG_PRODUCER_SECONDS=600 $(BIN)/python -m pytest --timeout=3600 tests/client/producer/test_producer_scripts.py tests/client/producer/test_producer_brokers.py tests/spark/write/test_producer_cache.py $(ARGS)
	SPARK_KLOG_INTERRUPT_SECONDS=600 $(BIN)/python -m pytest --timeout=3600 tests/client/test_interrupts.py tests/cli/test_consume_produce.py $(ARGS)
	SPARK_KLOG_FAULT_SECONDS=600 $(BIN)/python -m pytest --timeout=3600 tests/client/test_random_faults.py tests/client/consumer/test_consumer_faults.py tests/client/net/test_tcp_faults.py tests/client/consumer/test_member_epochs.py $(ARGS)
	SPARK_KLOG_EXACTLY_ONCE=full $(BIN)/python -m pytest --timeout=3600 tests/spark/exactly_once $(ARGS)
	SPARK_KLOG_WEEK_SECONDS=5400 $(BIN)/python -m pytest --timeout=7200 tests/week $(ARGS)
	SPARK_KLOG_ROUND_TRIP=1000000 $(BIN)/python -m pytest --timeout=3600 tests/spark/test_round_trip.py $(ARGS)
	$(BIN)/python -m pytest --timeout=3600 tests/tables/test_filters.py tests/tables/test_delta_spark.py tests/tables/test_unclear_commits.py tests/tables/test_iceberg_sequences.py tests/tables/test_iceberg_history.py tests/load/test_table_neighbours.py tests/load/test_two_runs.py tests/load/test_upserts.py tests/load/test_tables.py tests/load/test_table_rows.py tests/load/test_iceberg.py tests/load/test_checkpoints.py tests/load/test_compaction.py tests/load/test_inferred_schemas.py tests/load/test_letter_tables.py $(ARGS)
	$(BIN)/python -m pytest --timeout=3600 tests/schemas/json_schema tests/schemas/protobuf/test_properties.py tests/schemas/avro tests/spark/functions/test_schema_functions.py tests/broker/clients/test_franz_go_suite.py tests/broker/clients/test_aiokafka_suite.py tests/broker/groups/test_groups_of_kafka.py tests/broker/metadata/test_topic_journal.py tests/broker/metadata/test_topic_sequences.py tests/notebooks tests/jobs/test_demo.py tests/load/test_follow.py tests/broker/transactions/test_transactions_2.py tests/client/consumer/test_dead_letters.py tests/aio/test_many_clients.py tests/cli/test_dead_letters_command.py tests/spark/read/test_letter_topic.py tests/release/test_wheels.py tests/release/test_sizes.py tests/jobs/test_load_of_rows.py tests/spark/read/test_schema_stream_kills.py $(ARGS)

# pyspark 4.0 to 4.3, each with a Python of its own (see tests/support/spark/pyspark_versions.py): in environments of the cache.
matrix: $(VENV)/test.installed $(VENV)/spark-home.made
	SPARK_KLOG_MATRIX=all $(BIN)/python -m pytest tests/spark/test_oldest_pyspark.py tests/spark/read/test_checkpoint_switch.py tests/spark/read/test_available_now.py tests/spark/test_beside_jvm.py tests/jobs/test_packaging.py tests/jobs/test_extras.py $(ARGS)
	$(BIN)/python -m tests.spark.matrix $(ARGS)

# The native kernel under AddressSanitizer and UndefinedBehaviorSanitizer.
asan: $(VENV)/test.installed
	$(BIN)/python -m tests.fuzz.asan

# docs/reference/report-card.md, from parts that are run where it stopped; ARGS="franz-go --whole" for a part, all of it.
report-card: $(VENV)/test.installed $(VENV)/spark-home.made
	$(BIN)/python -m tests.report_card $(ARGS)

# All of tests is collected, to see that its modules can be imported; tests/papers is run.
check: $(VENV)/check.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet --no-header --disable-warnings -k papers tests
	$(BUILD_DOCS)

# The version's pages, into build/docs/VERSION.
docs: $(VENV)/docs.installed
	$(BUILD_DOCS)
	@echo build/docs/index.html

# The links of the pages to elsewhere, each of which is fetched: it takes a network.
links: $(VENV)/docs.installed
	$(BIN)/python -m sphinx --builder linkcheck --quiet docs build/links

# The version's pages added to a copy of the site in build/docs, as build/site.tar, which keeps the links `stable` and `latest`.
site: docs
	touch build/docs/.nojekyll  # GitHub's own builder would leave out folders such as _static
	tar --exclude=./.git -cf build/site.tar -C build/docs .

# The archive into the branch that the site is served from, of which build/docs is a checkout.
SITE_REMOTE ?= https://x-access-token:$(GITHUB_TOKEN)@github.com/$(GITHUB_REPOSITORY)
publish-site:
	tar -xf build/site.tar -C build/docs
	git -C build/docs add --all
	git -C build/docs -c user.name=release -c user.email=release@localhost commit --quiet --message "Pages of $(GITHUB_REF_NAME)"
	@git -C build/docs push --quiet "$(SITE_REMOTE)" HEAD:gh-pages

bench: $(VENV)/test.installed
	$(BIN)/python -m benchmarks.run $(ARGS)

# A release of the last commit, checked, in dist/: sdist, wheels for all platforms, SBOM. It is built twice, to the same bytes.
dist: $(VENV)/test.installed
	$(BIN)/python -m release.dist $(ARGS)

# What `make dist` made, on this machine: each Python that is here installs it from an index, and runs tests and the demo. What has
# passed for these files is not done again: after a stop or a failure a call goes on, and ARGS=--again begins anew.
test-dist: $(VENV)/test.installed
	test -d dist || $(MAKE) dist ARGS=
	$(BIN)/python -m release.installs $(ARGS)

# What the release's workflow runs, here, from an empty clone of the last commit: hours, in parts. What has passed for the commit is
# not done again. ARGS="--only dist" for commands with that word, ARGS=--again from a new clone.
rehearsal: $(VENV)/test.installed
	$(BIN)/python -m release.rehearsal $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info spark_klog/records/kernels/_kernel.c spark_klog/records/kernels/*.so spark_klog/schemas/avro/_avro.c spark_klog/schemas/avro/*.so spark_klog/schemas/protobuf/_protobuf.c spark_klog/schemas/protobuf/*.so demo test-logs
