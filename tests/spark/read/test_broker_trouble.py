"""A running query while brokers of Kafka stop and are killed, and leaders move."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.support import (
    Group,
    Job,
    consume,
    create_topic,
    produce,
    values,
    wait_for,
)
from tests.support.servers.kafka import Kafka

# test_source_stream.py has a broker of ours that is killed, test_real_kafka.py and test_loss.py deleted records
pytestmark = [pytest.mark.peer, pytest.mark.test_all("kill")]

SECONDS = 120
#: A killed broker is noticed as soon as ZooKeeper allows.
_SETTINGS = {
    "zookeeper.session.timeout.ms": 6000,
    "offsets.topic.replication.factor": 2,
}


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
