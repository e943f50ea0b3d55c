"""Writes as of Spark's sink while brokers are killed, leaders move and responses are lost.

Two brokers of Kafka 3.9.1 take long to start: their test runs only with SPARK_KLOG_PRODUCER_SECONDS (`make soak`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient

from spark_klog.broker.faults import Drop, ErrorAnswer, Fault
from spark_klog.client.producer.producer import Producer
from spark_klog.embedded import EmbeddedCluster
from tests.spark.support import consume, create_topic
from tests.support.servers.kafka import Kafka
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("driver")

_IS_SOAK = "SPARK_KLOG_PRODUCER_SECONDS" in os.environ
ROWS, PARTITIONS, BATCH = 20_000 if _IS_SOAK else 8_000, 4, 100
TOPIC = "t"
#: The shortest session timeout that ZooKeeper allows, so that the cluster soon notices a killed broker.
_KAFKA = {"zookeeper.session.timeout.ms": 6000, "offsets.topic.replication.factor": 2}


def _write(servers: str, trouble: dict[int, Callable[[], None]]) -> None:
    """Write numbers 0 to `ROWS` - 1, every other batch with keys; `trouble[N]` runs before the batch from N."""
    settings = {"batch.size": "2000", "max.request.size": "4000", "request.timeout.ms": "5000"}
    with Producer({"bootstrap.servers": servers, **settings}) as producer:
        for start in range(0, ROWS, BATCH):
            trouble.get(start, lambda: None)()
            numbers = range(start, start + BATCH)
            keys = [b"%d" % (number % 7) if start // BATCH % 2 else None for number in numbers]
            values = [b"%0100d" % number for number in numbers]
            rows = pa.record_batch([pa.array(keys, pa.binary()), pa.array(values)], ["key", "value"])
            producer.send_arrow(rows, TOPIC)


def _check(servers: str) -> None:
    """Check that each number was written once and that numbers ascend within a partition."""
    there = consume(servers, TOPIC)
    assert Counter(record.value for record in there) == {b"%0100d" % number: 1 for number in range(ROWS)}
    for partition in range(PARTITIONS):
        found = [record.value or b"" for record in there if record.partition == partition]
        assert found == sorted(found)
        assert len(found) > ROWS // PARTITIONS // 4


def test_a_broker_that_is_killed_and_answers_that_are_lost() -> None:
    lost = [Fault(Drop(after=True), api="Produce", skip=skip, count=1) for skip in (3, 20, 60)]
    with EmbeddedCluster(brokers=2, faults=lost) as cluster:
        create_topic(cluster.bootstrap_servers, TOPIC, PARTITIONS)
        trouble = {
            ROWS // 4: lambda: cluster.kill(1),
            ROWS // 8 * 3: lambda: cluster.restart(1),
            ROWS // 8 * 5: lambda: (cluster.kill(0), cluster.restart(0)),
        }
        _write(cluster.bootstrap_servers, trouble)  # type: ignore[arg-type]
        assert all(count for fault, count in cluster.faults_fired().items())
        _check(cluster.bootstrap_servers)


@pytest.mark.peer
@pytest.mark.skipif(not _IS_SOAK, reason="part of make soak")
def test_a_leader_of_kafkas_that_moves(tmp_path: Path) -> None:
    with ExitStack() as stack:
        one = stack.enter_context(Kafka("3.9.1", tmp_path / "one", _KAFKA))
        two = stack.enter_context(Kafka("3.9.1", tmp_path / "two", _KAFKA, beside=one))
        servers = f"{one.bootstrap_servers},{two.bootstrap_servers}"
        create_topic(servers, TOPIC, PARTITIONS, replicas=2)

        def leaders() -> set[int]:
            admin = AdminClient({"bootstrap.servers": one.bootstrap_servers, "log_level": 0})
            return {entry.leader for entry in admin.list_topics(TOPIC, timeout=30).topics[TOPIC].partitions.values()}

        assert leaders() == {one.broker_id, two.broker_id}
        _write(servers, {ROWS // 5 * 2: two.kill})
        wait_until(lambda: leaders() == {one.broker_id})
        _check(servers)


def test_a_broker_that_refuses_for_long_is_logged_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    """With a full disk a broker rejects each partition's batches about once a second until delivery.timeout.ms."""
    full = Fault(ErrorAnswer("KAFKA_STORAGE_ERROR"), api="Produce", count=12)
    with EmbeddedCluster(faults=[full]) as cluster:
        create_topic(cluster.bootstrap_servers, "full", 1)
        settings = {"bootstrap.servers": cluster.bootstrap_servers, "retry.backoff.max.ms": "100"}
        with Producer(settings) as producer:
            assert producer.send("full", b"x", partition=0).result(60).offset == 0
        assert cluster.faults_fired()[full] == 12
    lines = [
        record for record in caplog.records if record.levelname == "WARNING" and "are sent again" in record.getMessage()
    ]
    attempts = [int(match[1]) for record in lines if (match := re.search(r"attempt (\d+)\)", record.getMessage()))]
    assert attempts == [1, 2, 4, 8]
