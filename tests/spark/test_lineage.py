"""OpenLineage events of streams: real queries on our broker, a real server for the events, and their published form."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from openlineage.client import OpenLineageClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_klog.lineage.datasets import folder_use, kafka_namespace
from spark_klog.spark.lineage import LineageListener
from spark_klog.spark.listener import observed
from spark_klog.spark.plans import qualified
from tests.jobs.support import environment
from tests.support.servers.openlineage import LineageServer, check_event, lineage_server

from .support import consume, create_topic, error_of, produce, read, values, wait_for

Event = dict[str, Any]
Ranges = dict[tuple[str, int], tuple[int, int]]
_PROGRAM = Path(__file__).with_name("lineage_program.py")
_ENDS = ("COMPLETE", "FAIL", "ABORT")


@pytest.fixture
def server() -> Iterator[LineageServer]:
    with lineage_server() as running:
        yield running


@pytest.fixture
def lineage(spark: SparkSession, server: LineageServer) -> Iterator[LineageListener]:
    client = OpenLineageClient(config={"transport": {"type": "http", "url": server.url}})
    listener = LineageListener(spark, client=client, namespace="tests")
    spark.streams.addListener(listener)
    yield listener
    spark.streams.removeListener(listener)
    listener.close()


def events_of(server: LineageServer, query: StreamingQuery) -> list[Event]:
    """All events of a run of a query that has ended; each is valid."""
    run = str(query.runId)

    def of_run() -> list[Event]:
        return [event for event in server.events if event["run"]["runId"] == run]

    wait_for(lambda: any(event["eventType"] in _ENDS for event in of_run()), "the event of the end")
    events = of_run()
    for event in events:
        check_event(event)
    assert events[0]["eventType"] == "START"
    assert {event["eventType"] for event in events[1:-1]} <= {"RUNNING"}
    assert len({event["job"]["name"] for event in events}) == 1
    return events


def ranges_of(event: Event) -> Ranges:
    """The offsets that an event's inputs name, by topic and partition."""
    return {
        (dataset["name"], item["partition"]): (item["start"], item["end"])
        for dataset in event["inputs"]
        for item in dataset["inputFacets"].get("klog_offsetRanges", {"partitions": []})["partitions"]
    }


def names_of(datasets: list[Event]) -> list[tuple[str, str]]:
    return sorted((dataset["namespace"], dataset["name"]) for dataset in datasets)


def check_continuous(events: list[Event], start: Ranges) -> Ranges:
    """Each RUNNING event begins where the one before has ended; the last event has the offsets of all of them."""
    position = {key: bounds[0] for key, bounds in start.items()}
    for event in events:
        if event["eventType"] == "RUNNING":
            for key, (first, end) in ranges_of(event).items():
                assert position[key] == first < end
                position[key] = end
    total = ranges_of(events[-1])
    assert total == {key: (start[key][0], end) for key, end in position.items() if end > start[key][0]}
    return total


def stream(spark: SparkSession, servers: str, topics: str, **options: Any) -> DataFrame:
    reader = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", topics)
    return reader.option("startingOffsets", "earliest").options(**options).load()


def run(writer: Any, checkpoint: Path) -> StreamingQuery:
    """Run a query with what there is to read."""
    query: StreamingQuery = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination(120)
    return query


@pytest.fixture
def two_partitions(servers: str, topic: str) -> str:
    """A topic with 300 records in two partitions, and one without records for the output, named with `-out`."""
    create_topic(servers, topic, 2)
    create_topic(servers, f"{topic}-out", 1)
    produce(servers, topic, values(300, partitions=2))
    return topic


def test_a_stream_from_topic_to_topic(
    spark: SparkSession,
    servers: str,
    two_partitions: str,
    server: LineageServer,
    lineage: LineageListener,
    tmp_path: Path,
) -> None:
    topic, out = two_partitions, f"{two_partitions}-out"
    rows = observed(stream(spark, servers, topic).select("value"), out)
    sink = {"kafka.bootstrap.servers": servers, "topic": out}
    query = run(rows.writeStream.queryName(topic).format("klog").options(**sink), tmp_path)
    events = events_of(server, query)
    namespace = kafka_namespace(servers)
    assert [event["eventType"] for event in events] == ["START", "RUNNING", "COMPLETE"]
    start, running, complete = events
    assert names_of(start["inputs"]) == [(namespace, topic)]
    read = check_continuous(events, {(topic, 0): (0, 0), (topic, 1): (0, 0)})
    seen = consume(servers, topic)
    counts = Counter(record.partition for record in seen)
    assert read == {(topic, number): (0, count) for number, count in counts.items()}
    assert running["run"]["facets"]["klog_query"]["batchId"] == 0
    for event in (running, complete):
        assert names_of(event["inputs"]) == [(namespace, topic)]
        assert names_of(event["outputs"]) == [(namespace, out)]
        written = event["outputs"][0]["outputFacets"]["outputStatistics"]
        assert (written["rowCount"], written["size"]) == (300, sum(len(record.value or b"") for record in seen))
        assert event["inputs"][0]["inputFacets"]["inputStatistics"]["rowCount"] == len(seen)
    assert len(consume(servers, out)) == 300
    job = start["job"]
    assert (job["namespace"], job["name"].rpartition(".")[2]) == ("tests", topic.lower())
    assert job["facets"]["jobType"]["processingType"] == "STREAMING"


@pytest.mark.test_all("long")
def test_for_each_batch_with_two_outputs_and_a_restart(
    spark: SparkSession,
    servers: str,
    two_partitions: str,
    server: LineageServer,
    lineage: LineageListener,
    tmp_path: Path,
) -> None:
    topic, namespace = two_partitions, kafka_namespace(servers)
    outputs = [f"{topic}-even", f"{topic}-odd"]

    def split(rows: DataFrame, batch: int) -> None:
        for index, name in enumerate(outputs):
            to = {"kafka.bootstrap.servers": servers, "topic": name, "createTopics": "1"}
            part = rows.where(f"offset % 2 = {index}").select("value")
            part.write.format("klog").options(**to).mode("append").save()
            lineage.wrote(name, bootstrap_servers=servers if index else None)
        lineage.wrote(folder="s3a://bucket/seen")

    def once() -> StreamingQuery:
        return run(stream(spark, servers, topic).writeStream.queryName(topic).foreachBatch(split), tmp_path)

    first = once()
    produce(servers, topic, values(100, start=300, partitions=2))
    second = once()
    assert (first.id, first.runId) != (second.id, second.runId)
    events = [events_of(server, query) for query in (first, second)]
    read = check_continuous(events[0], {(topic, 0): (0, 0), (topic, 1): (0, 0)})
    assert read == {(topic, 0): (0, 150), (topic, 1): (0, 150)}
    read = check_continuous(events[1], {key: (end, end) for key, (_, end) in read.items()})
    assert read == {(topic, 0): (150, 200), (topic, 1): (150, 200)}
    for event in (event for of_run in events for event in of_run if event["eventType"] != "START"):
        assert names_of(event["outputs"]) == [*((namespace, name) for name in outputs), ("s3://bucket", "seen")]
    assert events[0][0]["job"]["name"] == events[1][0]["job"]["name"]
    queries = {event["run"]["facets"]["klog_query"]["queryId"] for of_run in events for event in of_run}
    assert queries == {str(first.id)}
    assert len(consume(servers, outputs[0])) == len(consume(servers, outputs[1])) == 200


@pytest.mark.test_all("long")
def test_a_query_that_fails(
    spark: SparkSession,
    servers: str,
    two_partitions: str,
    server: LineageServer,
    lineage: LineageListener,
    tmp_path: Path,
) -> None:
    def fail(rows: DataFrame, batch: int) -> None:
        lineage.wrote(f"{two_partitions}-out")
        raise ValueError("no table at s3://KEY:hunter2@bucket, password=hunter3")

    writer = stream(spark, servers, two_partitions).writeStream.foreachBatch(fail)
    query = writer.option("checkpointLocation", str(tmp_path / "a")).start()
    wait_for(lambda: not query.isActive, "the query fails")
    events = events_of(server, query)
    assert [event["eventType"] for event in events] == ["START", "FAIL"]
    message = events[-1]["run"]["facets"]["errorMessage"]["message"]
    assert "ValueError" in message
    assert names_of(events[-1]["inputs"]) == [(kafka_namespace(servers), two_partitions)]
    assert names_of(events[-1]["outputs"]) == [(kafka_namespace(servers), f"{two_partitions}-out")]
    # one of ours: the last line of its text tells what is wrong
    writer = stream(spark, servers, two_partitions, **{"kafka.ssl.key.password": "hunter4"}).writeStream.format("noop")
    query = writer.option("checkpointLocation", str(tmp_path / "b")).start()
    wait_for(lambda: not query.isActive, "the query fails")
    message = events_of(server, query)[-1]["run"]["facets"]["errorMessage"]["message"]
    assert "spark_klog.errors.ConfigError: kafka.ssl.key.password is set, but" in message
    assert b"hunter" not in b"".join(server.bodies)


@pytest.mark.test_all("long")
def test_several_queries_at_once(
    spark: SparkSession, servers: str, topic: str, server: LineageServer, lineage: LineageListener, tmp_path: Path
) -> None:
    names = [f"{topic}-{number}" for number in range(3)]
    for number, name in enumerate(names):
        create_topic(servers, name, 1)
        produce(servers, name, values(50 * (number + 1)))
    queries = []
    for number, name in enumerate(names):
        frame = stream(spark, servers, name)
        if number:  # a join of two sources, in one query
            frame = frame.union(stream(spark, servers, names[0]))
        writer = frame.writeStream.queryName(name).format("noop").option("checkpointLocation", str(tmp_path / name))
        queries.append(writer.trigger(processingTime="100 milliseconds").start())
    expected: list[Ranges] = []
    for number, name in enumerate(names):
        produce(servers, name, values(10))
        expected.append({(name, 0): (0, 50 * (number + 1) + 10)} | ({(names[0], 0): (0, 60)} if number else {}))

    def are_read() -> bool:
        ends: list[Ranges] = [{} for _ in queries]
        for event in list(server.events):
            for index, query in enumerate(queries):
                if event["run"]["runId"] == str(query.runId):
                    ends[index].update(ranges_of(event))
        return all(
            {key: end for key, (_, end) in ends[index].items()}
            == {key: end for key, (_, end) in expected[index].items()}
            for index in range(3)
        )

    wait_for(are_read, "events of all records", query=queries[0])
    for query in queries:
        query.stop()
    for query, ranges in zip(queries, expected, strict=True):
        events = events_of(server, query)
        assert check_continuous(events, dict.fromkeys(ranges, (0, 0))) == ranges
        assert events[-1]["eventType"] == "COMPLETE"
        assert events[-1]["outputs"] == []
    assert len({events_of(server, query)[0]["job"]["name"] for query in queries}) == 3


@pytest.mark.test_all("long")
def test_a_server_that_hangs_costs_the_query_nothing(
    spark: SparkSession,
    servers: str,
    two_partitions: str,
    server: LineageServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.get_stuck()
    client = OpenLineageClient(config={"transport": {"type": "http", "url": server.url, "timeout": 30}})
    listener = LineageListener(spark, client=client, flush_seconds=0.5)
    spark.streams.addListener(listener)
    try:
        began = time.monotonic()
        query = run(stream(spark, servers, two_partitions).writeStream.format("noop"), tmp_path)
        assert query.exception() is None
        assert time.monotonic() - began < 20
        wait_for(lambda: not listener._runs, "the listener hears of the end")
        began = time.monotonic()
        assert not listener.close()
        assert time.monotonic() - began < 5
    finally:
        spark.streams.removeListener(listener)
    assert (listener.emitter.sent, listener.emitter.dropped) == (0, 2)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("events are lost" in line for line in warnings) == 1


@pytest.mark.test_all("long")
def test_files_and_the_file_transport(spark: SparkSession, servers: str, two_partitions: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    transport = {"type": "file", "log_file_path": str(path), "append": True}
    listener = LineageListener(spark, client=OpenLineageClient(config={"transport": transport}))
    spark.streams.addListener(listener)
    try:
        writer = stream(spark, servers, two_partitions).writeStream.format("parquet")
        run(writer.option("path", os.path.relpath(tmp_path / "files")), tmp_path / "a")
        files = spark.readStream.schema("value binary").format("parquet").load(str(tmp_path / "files"))
        topic = {"topic": f"{two_partitions}-out", "kafka.bootstrap.servers": servers}
        run(files.writeStream.format("klog").options(**topic), tmp_path / "b")
        wait_for(lambda: not listener._runs, "the listener hears of the ends")
        assert listener.close()
    finally:
        spark.streams.removeListener(listener)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        check_event(event)
    files_of = [("file", str(tmp_path / "files"))]
    first, second = (event for event in events if event["eventType"] == "COMPLETE")
    assert names_of(first["outputs"]) == names_of(second["inputs"]) == files_of
    assert ranges_of(first) == {(two_partitions, 0): (0, 150), (two_partitions, 1): (0, 150)}
    assert names_of(second["outputs"]) == [(kafka_namespace(servers), f"{two_partitions}-out")]
    assert second["inputs"][0]["inputFacets"]["inputStatistics"]["rowCount"] == 300


def test_paths_are_those_of_the_sessions_file_system(spark: SparkSession, tmp_path: Path) -> None:
    assert folder_use(qualified(spark, "out")).name == os.path.abspath("out")
    session = spark.newSession()
    session.conf.set("fs.defaultFS", "hdfs://127.0.0.1:8020")
    use = folder_use(qualified(session, "/data/out"))
    assert (use.namespace, use.name) == ("hdfs://127.0.0.1:8020", "/data/out")
    assert folder_use(qualified(session, "out")).name.startswith("/user/")
    assert qualified(session, "s3a://bucket/out") == "s3a://bucket/out"


@pytest.mark.test_all("long")
def test_a_listener_that_is_closed_while_a_query_runs(
    spark: SparkSession,
    servers: str,
    two_partitions: str,
    server: LineageServer,
    lineage: LineageListener,
    tmp_path: Path,
) -> None:
    writer = stream(spark, servers, two_partitions).writeStream.format("noop")
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    try:
        wait_for(lambda: any(event["eventType"] == "RUNNING" for event in server.events), "a micro-batch", query=query)
        assert lineage.close()
        events = events_of(server, query)
        assert events[-1]["eventType"] == "ABORT"
        assert ranges_of(events[-1]) == {(two_partitions, 0): (0, 150), (two_partitions, 1): (0, 150)}
    finally:
        query.stop()
    assert lineage.close()
    assert len(events_of(server, query)) == len(events)


@pytest.mark.test_all("long")
def test_a_listener_that_is_removed_before_a_query_ends(
    spark: SparkSession, servers: str, two_partitions: str, server: LineageServer, tmp_path: Path
) -> None:
    """Spark tells it of no end: it looks how the queries have ended."""
    client = OpenLineageClient(config={"transport": {"type": "http", "url": server.url}})
    listener = LineageListener(spark, client=client, flush_seconds=4)
    spark.streams.addListener(listener)

    def fail(rows: DataFrame, batch: int) -> None:
        raise ValueError("it fails")

    writers = [stream(spark, servers, two_partitions).writeStream for _ in range(2)]
    writers = [writers[0].format("noop"), writers[1].foreachBatch(fail)]
    queries = [writer.option("checkpointLocation", str(tmp_path / str(id(writer)))).start() for writer in writers]
    spark.streams.removeListener(listener)
    wait_for(lambda: not queries[1].isActive, "the query fails")
    queries[0].stop()
    assert listener.close()
    assert [events_of(server, query)[-1]["eventType"] for query in queries] == ["COMPLETE", "FAIL"]


@pytest.mark.test_all("long")
def test_a_platform_that_denies_plans(
    spark: SparkSession,
    servers: str,
    two_partitions: str,
    server: LineageServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The offsets are in the progress records; the listener has the cluster's address as an argument."""

    def deny(*_: object) -> None:
        raise PermissionError("py4j.security.Py4JSecurityException")

    monkeypatch.setattr("spark_klog.spark.lineage.stream_execution", deny)
    client = OpenLineageClient(config={"transport": {"type": "http", "url": server.url}})
    listener = LineageListener(spark, client=client, bootstrap_servers=servers)
    spark.streams.addListener(listener)
    try:
        query = run(stream(spark, servers, two_partitions).writeStream.format("noop"), tmp_path)
        events = events_of(server, query)
    finally:
        spark.streams.removeListener(listener)
        listener.close()
    assert [event["eventType"] for event in events] == ["START", "RUNNING", "COMPLETE"]
    assert ranges_of(events[-1]) == {(two_partitions, 0): (0, 150), (two_partitions, 1): (0, 150)}
    assert names_of(events[-1]["inputs"]) == [(kafka_namespace(servers), two_partitions)]
    # other listeners of this process may still hear of their queries
    assert "lineage of a query is incomplete" in caplog.text


@pytest.mark.test_all("long")
def test_batch_queries(
    spark: SparkSession, servers: str, two_partitions: str, server: LineageServer, tmp_path: Path
) -> None:
    topic, out, namespace = two_partitions, f"{two_partitions}-out", kafka_namespace(servers)
    client = OpenLineageClient(config={"transport": {"type": "http", "url": server.url}})
    # events of Spark's other tests come by the same bus
    lineage = LineageListener(spark, client=client, namespace=topic, batches=True)
    spark.streams.addListener(lineage)

    def ended(kind: str, count: int) -> list[Event]:
        """The last events of `count` batch queries."""

        def ends() -> list[Event]:
            batches = [one for one in server.events if one["job"]["facets"]["jobType"]["processingType"] == "BATCH"]
            return [event for event in batches if event["eventType"] == kind]

        wait_for(lambda: len(ends()) >= count, f"{kind} of batch queries")
        found = ends()
        server.events.clear()
        for event in found:
            check_event(event)
        return found

    try:
        rows = read(spark, servers, subscribe=topic)
        sink = {"kafka.bootstrap.servers": servers, "topic": out}
        rows.select("value").write.format("klog").options(**sink).mode("append").save()
        (copy,) = ended("COMPLETE", 1)
        assert ranges_of(copy) == {(topic, number): (0, 150) for number in range(2)}
        assert names_of(copy["outputs"]) == [(namespace, out)]
        assert len(consume(servers, out)) == 300
        written = copy["outputs"][0]["outputFacets"].get("outputStatistics", {}).get("rowCount")
        assert written == 300 or (written is None and not pyspark.__version__.startswith("4.3."))
        assert copy["inputs"][0]["inputFacets"]["inputStatistics"]["rowCount"] == 300
        assert copy["job"]["name"].endswith(f".append.{out.lower()}")

        other = read(spark, servers, assign=json.dumps({out: [0]}), startingOffsets=json.dumps({out: {"0": 290}}))
        assert rows.join(other, "value").groupBy("value").count().count() == 10
        (join,) = ended("COMPLETE", 1)
        expected = {(topic, number): (0, 150) for number in range(2)} | {(out, 0): (290, 300)}
        assert (ranges_of(join), join["outputs"]) == (expected, [])

        spark.range(10).collect()
        rows.write.parquet(str(tmp_path / "files"))
        (files,) = ended("COMPLETE", 1)
        assert names_of(files["outputs"]) == [("file", str(tmp_path / "files"))]
        assert names_of(files["inputs"]) == [(namespace, topic)]

        missing = rows.select("value").write.format("klog").options(**{**sink, "topic": f"{topic}-missing"})
        error_of(missing.mode("append").save)
        (failed,) = ended("FAIL", 1)
        assert names_of(failed["inputs"]) == [(namespace, topic)]
        assert "UNKNOWN_TOPIC_OR_PARTITION" in failed["run"]["facets"]["errorMessage"]["message"]

        def write(batch: DataFrame, number: int) -> None:
            batch.select("value").write.format("klog").options(**sink).mode("append").save()

        query = run(stream(spark, servers, topic).writeStream.foreachBatch(write), tmp_path / "checkpoint")
        (child,) = ended("COMPLETE", 1)
        assert child["run"]["facets"]["parent"]["run"]["runId"] == str(query.runId)
        wait_for(lambda: any(event["eventType"] == "COMPLETE" for event in server.events), "the stream's end")
        assert names_of(child["outputs"]) == [(namespace, out)]
        server.events.clear()
        rows.write.parquet(str(tmp_path / "last"))
    finally:
        spark.streams.removeListener(lineage)
        assert lineage.close()
    assert [event["eventType"] for event in server.events] == ["START", "COMPLETE"]  # Spark tells of it late
    server.events.clear()
    rows.count()
    assert (server.events, lineage.emitter.dropped) == ([], 0)


@pytest.mark.test_all("kill")
def test_the_end_of_a_program(servers: str, two_partitions: str, server: LineageServer, tmp_path: Path) -> None:
    """OPENLINEAGE_URL configures it; one run is killed, the next ones continue from its checkpoint."""
    variables = {"OPENLINEAGE_URL": server.url, "OPENLINEAGE_NAMESPACE": "programs"}

    def start(end: str) -> subprocess.Popen[bytes]:
        given = {"servers": servers, "topic": two_partitions, "checkpoint": str(tmp_path / "checkpoint"), "end": end}
        command = [sys.executable, str(_PROGRAM), json.dumps(given)]
        with (tmp_path / "output").open("ab") as output:
            return subprocess.Popen(command, env=environment(tmp_path) | variables, stdout=output, stderr=output)

    runs: list[list[Event]] = []
    ends = ("killed", "while the query runs", "at the end of the topic", "within a micro-batch")
    for number, end in enumerate(ends):
        if number:
            produce(servers, two_partitions, values(20, partitions=2))
        server.events.clear()
        program = start(end)
        try:
            if end == "killed":
                wait_for(lambda: any(event["eventType"] == "RUNNING" for event in server.events), "a micro-batch", 180)
                program.kill()
            code = program.wait(120)
        finally:
            program.kill()
        assert code == (-9 if end == "killed" else 0), (tmp_path / "output").read_text()
        runs.append(list(server.events))
    for events in runs:
        for event in events:
            check_event(event)
            assert (event["job"]["namespace"], event["job"]["name"].rpartition(".")[2]) == ("programs", "copy")
    assert [events[-1]["eventType"] for events in runs] == ["RUNNING", "ABORT", "COMPLETE", "ABORT"]
    assert len({event["run"]["runId"] for events in runs for event in events}) == 4
    read = [dict(ranges_of(events[-1])) for events in runs[:3]]
    assert read[0] == {(two_partitions, 0): (0, 150), (two_partitions, 1): (0, 150)}
    for number in (0, 1):
        first, second, third = (ranges[two_partitions, number] for ranges in read)
        assert second[0] in first  # the kill may come before Spark has noted the micro-batch as done
        assert second[1] in (150, 160)
        assert third == (second[1], 170)
