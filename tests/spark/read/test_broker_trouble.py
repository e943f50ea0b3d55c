"""A running query while brokers stop, leaders move, and logs lose their oldest records."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_klog.spark.listener import ProgressListener, SourceProgress
from tests.spark.support import (
    Group,
    Job,
    consume,
    create_topic,
    delete_records,
    error_of,
    offsets_of,
    produce,
    reported_losses,
    set_topic,
    values,
    wait_for,
)
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import Kafka

# test_source_stream.py has a broker that is killed, test_real_kafka.py and test_loss.py deleted records
pytestmark = [pytest.mark.test_all("again")]

SECONDS = 120
#: Retention checks and deletes files at once; a killed broker is noticed as soon as ZooKeeper allows.
_SETTINGS = {
    "log.retention.check.interval.ms": 200,
    "log.initial.task.delay.ms": 100,
    "log.segment.delete.delay.ms": 0,
    "zookeeper.session.timeout.ms": 6000,
    "offsets.topic.replication.factor": 2,
}
Server = Kafka | KlogBroker


class Waves(threading.Thread):
    """Produces small waves of distinct records until `stop` is called."""

    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        super().__init__(daemon=True)
        self._servers, self._topic, self._partitions = servers, topic, partitions
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self.sent = 0

    def run(self) -> None:
        try:
            while not self._done.wait(0.2):
                produce(self._servers, self._topic, values(50, self.sent, self._partitions))
                self.sent += 50
        except BaseException as error:
            self._failure = error

    def stop(self) -> None:
        self._done.set()
        self.join()
        if self._failure is not None:
            raise self._failure


def _goes_on(job: Job, query: StreamingQuery, waves: Waves, what: str) -> None:
    """Wait until the query has read records that are sent from now on."""
    goal = sum(job.committed().values()) + 200
    sent = waves.sent + 200
    wait_for(lambda: waves.sent >= sent and sum(job.committed().values()) >= goal, f"rows after {what}", SECONDS, query)


def _all_read_once(
    job: Job, query: StreamingQuery, servers: str, topic: str, sent: int, group: Group | None = None
) -> None:
    """Wait for the end and stop the query: it has written exactly the records that confluent-kafka reads."""
    there = consume(servers, topic)
    wait_for(lambda: sum(job.committed().values()) >= len(there), "the end", SECONDS, query)
    if group is not None:  # its offsets follow Spark's commit with the next trigger
        wait_for(lambda: group.offsets() == job.committed(), "the group's offsets", SECONDS, query)
    assert query.isActive
    query.stop()
    found = sorted((row.partition, row.offset, bytes(row.value)) for row in job.result.collect())
    assert found == [(record.partition, record.offset, record.value) for record in there]
    # A producer that lost a response sends again, so the topic itself may have duplicates.
    assert {value for *_, value in found} == {record.value for record in values(sent)}


#: `test_a_leader_that_moves` stops and kills brokers of Kafka in other runs, too.
_soak = pytest.mark.skipif(os.environ.get("SPARK_KLOG_KAFKAS") != "all", reason="part of make soak")


@pytest.fixture(params=["klog", pytest.param("kafka", marks=[pytest.mark.peer, _soak])])
def server(request: pytest.FixtureRequest, server_dir: Path) -> Iterator[Server]:
    made: Server = KlogBroker(server_dir) if request.param == "klog" else Kafka("3.9.1", server_dir)
    with made:
        yield made


def test_a_broker_that_stops_and_comes_back(spark: SparkSession, server: Server, topic: str, tmp_path: Path) -> None:
    servers = server.bootstrap_servers
    create_topic(servers, topic, 2)
    job = Job(spark, servers, tmp_path, subscribe=topic, maxOffsetsPerTrigger="1000")
    query = job.start(processingTime="100 milliseconds")
    waves = Waves(servers, topic, 2)
    waves.start()
    try:
        _goes_on(job, query, waves, "the start")
        for end in (server.kill, server.stop):
            end()
            time.sleep(1)  # time for the query to notice
            server.start()
            _goes_on(job, query, waves, end.__name__)
        waves.stop()
        _all_read_once(job, query, servers, topic, waves.sent)
    finally:
        query.stop()


@pytest.fixture(scope="module")
def brokers(module_server_dir: Path) -> Iterator[tuple[Kafka, Kafka]]:
    """A cluster of two Apache Kafka brokers."""
    with ExitStack() as stack:
        one = stack.enter_context(Kafka("3.9.1", module_server_dir / "one", _SETTINGS))
        yield one, stack.enter_context(Kafka("3.9.1", module_server_dir / "two", _SETTINGS, beside=one))


def _partitions(servers: str, topic: str) -> dict[int, Any]:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    found: dict[int, Any] = admin.list_topics(topic, timeout=30).topics[topic].partitions
    return found


@pytest.mark.peer
def test_a_leader_that_moves(spark: SparkSession, brokers: tuple[Kafka, Kafka], topic: str, tmp_path: Path) -> None:
    servers = ",".join(broker.bootstrap_servers for broker in brokers)
    create_topic(servers, topic, 2, replicas=2)
    options = {"kafka.group.id": topic, "commitOffsets": "true", "maxOffsetsPerTrigger": "1000"}
    job = Job(spark, servers, tmp_path, subscribe=topic, **options)
    query = job.start(processingTime="100 milliseconds")
    waves = Waves(servers, topic, 2)
    waves.start()
    group = Group(servers, topic, topic, 2)
    try:
        _goes_on(job, query, waves, "the start")
        for leader, other, end in ((brokers[0], brokers[1], "stop"), (brokers[1], brokers[0], "kill")):
            led = {entry.leader for entry in _partitions(servers, topic).values()}
            assert leader.broker_id in led
            getattr(leader, end)()

            def moved(to: Kafka = other) -> bool:
                return {entry.leader for entry in _partitions(to.bootstrap_servers, topic).values()} == {to.broker_id}

            wait_for(moved, f"the new leader after {end}", SECONDS, query)
            _goes_on(job, query, waves, f"the leader's {end}")
            leader.start()
            wait_for(
                lambda: all(len(entry.isrs) == 2 for entry in _partitions(servers, topic).values()),
                "both replicas are there",
                SECONDS,
                query,
            )
            _goes_on(job, query, waves, f"the return after {end}")
        waves.stop()
        _all_read_once(job, query, servers, topic, waves.sent, group)
    finally:
        query.stop()
        group.close()


def _delete_records(servers: str, topic: str) -> None:
    """Delete the records before offset 700 of partition 0 and before 650 of partition 1."""
    delete_records(servers, topic, {0: 700, 1: 650})


def _expire(servers: str, topic: str) -> None:
    """Let retention delete the segments that hold only old records."""
    set_topic(servers, topic, "retention.ms", "86400000")


def _available(servers: str, topic: str) -> dict[tuple[str, int], tuple[int, int]]:
    """[first offset, end) of both partitions."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "not-used", "log_level": 0})
    try:
        return {
            (topic, number): consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=30)
            for number in range(2)
        }
    finally:
        consumer.close()


def _wanted_and_available(error: str) -> dict[tuple[str, int], tuple[int, int, int, int]]:
    """The ranges that an error lists with the cause "retention"."""
    form = re.compile(r"([\w-]+)-(\d+): wanted \[(\d+), (\d+)\), available \[(\d+), (\d+)\) \(retention\)")
    found = {}
    for topic, partition, *numbers in form.findall(error):
        first, end, low, high = map(int, numbers)
        found[topic, int(partition)] = first, end, low, high
    return found


@pytest.mark.peer
@pytest.mark.parametrize(
    "remove", [pytest.param(_delete_records, id="deleted", marks=_soak), pytest.param(_expire, id="expired")]
)
def test_oldest_records_that_go_while_the_query_is_behind(
    spark: SparkSession,
    brokers: tuple[Kafka, Kafka],
    topic: str,
    tmp_path: Path,
    remove: Callable[[str, str], None],
) -> None:
    servers = ",".join(broker.bootstrap_servers for broker in brokers)
    create_topic(servers, topic, 2, 1, **{"segment.bytes": "1024", "retention.ms": "-1"})
    now = time.time_ns() // 1_000_000
    sent = [record._replace(timestamp=now) if n >= 1500 else record for n, record in enumerate(values(2000, 0, 2))]
    produce(servers, topic, sent, batch_num_messages=20)
    job = Job(spark, servers, tmp_path, subscribe=topic, maxOffsetsPerTrigger="100")

    query = job.start(processingTime="1 second")
    try:
        wait_for(lambda: len(job.committed()) > 0, "the first batch", SECONDS, query)
        remove(servers, topic)
        error = error_of(lambda: query.awaitTermination(SECONDS))
    finally:
        query.stop()
    there = _available(servers, topic)
    assert all(low > 600 and high == 1000 for low, high in there.values()), there
    # The plan or a task found the loss; a task names only its own partition.
    named = _wanted_and_available(error)
    assert named
    read = job.committed()
    for key, (first, end, low, high) in named.items():
        assert read[key] <= first < end <= low
        assert (low, high) == there[key]

    # The next run fails, too: it skips nothing by itself, and starts at the checkpoint's offsets.
    query = job.start(availableNow=True)
    error = error_of(lambda: query.awaitTermination(SECONDS))
    named = _wanted_and_available(error)
    assert job.committed() == read
    assert {key: (first, low, high) for key, (first, _, low, high) in named.items()} == {
        key: (read[key], *there[key]) for key in there
    }
    assert "set failOnDataLoss=false or report" in error

    job.options["failOnDataLoss"] = "report"
    told: list[SourceProgress] = []
    listener = ProgressListener(told.append)
    spark.streams.addListener(listener)
    try:
        query = job.start(availableNow=True)
        assert query.awaitTermination(SECONDS)
        wait_for(lambda: len(told) >= len(query.recentProgress), "the listener's events", 20)
    finally:
        spark.streams.removeListener(listener)
    gone = sorted((*key, offset) for key in there for offset in range(read[key], there[key][0]))
    assert offsets_of(job.result) == sorted((*key, n) for key in there for n in range(1000) if (*key, n) not in gone)
    assert _offsets(reported_losses(query)) == gone
    assert _offsets(item for progress in told for item in progress.lost) == gone


def _offsets(ranges: Iterable[dict[str, Any]]) -> list[tuple[str, int, int]]:
    found = []
    for item in ranges:
        assert item["cause"] == "retention"
        assert item["available_start"] >= item["end"]
        found += [(item["topic"], item["partition"], offset) for offset in range(item["start"], item["end"])]
    return sorted(found)
