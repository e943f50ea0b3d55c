"""Mirror between real Kafka and our brokers; compare records with confluent-kafka, and log files byte by byte."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from spark_klog.client import Admin
from spark_klog.embedded import EmbeddedCluster
from tests.mirror.records import PARTITIONS, produce_all_shapes
from tests.support.brokers.batches import walk
from tests.support.clients.mirrors import mirror_once, read_partition, read_topic
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.peer
_TIME = 1_700_000_000_000


def _data_batches(logs: list[Path]) -> list[tuple[bytes, int, bytes]]:
    """(timestamps and count, codec, records) of each batch in log files, without control batches."""
    found, data = [], b"".join(log.read_bytes() for log in logs)
    for one in walk(data):
        batch = data[one.position : one.position + one.size]
        attributes = int.from_bytes(batch[21:23], "big")
        if not attributes & 0x20:
            found.append((batch[23:43] + batch[57:61], attributes & 0x0F, batch[61:]))
    return found


def _logs(folder: Path, topic: str, partition: int) -> list[Path]:
    """The segments in order; Kafka rolls a segment if timestamps are a week apart."""
    return sorted(folder.rglob(f"{topic}-{partition}/*.log"))


@pytest.fixture
def ours(cluster: EmbeddedCluster) -> EmbeddedCluster:
    return cluster


def test_from_kafka_to_ours_and_back(shared_kafkas: SharedKafkas, ours: EmbeddedCluster) -> None:
    kafka = shared_kafkas.get(NEWEST)
    topic = f"mirrored-{uuid.uuid4().hex[:8]}"
    with Admin({"bootstrap.servers": kafka.bootstrap_servers}) as admin:
        configs = {"retention.ms": "-1", "max.message.bytes": "2000000", "min.insync.replicas": "1"}
        admin.create_topic(topic, PARTITIONS, replication_factor=1, configs=configs)
    produce_all_shapes(kafka.bootstrap_servers, topic)
    before = read_topic(kafka.bootstrap_servers, topic, PARTITIONS)
    assert sum(map(len, before)) == 5 * 400 + 3 * 20

    there = mirror_once(
        kafka.bootstrap_servers, ours.bootstrap_servers, "--topics", topic, "--name", topic, "--exactly-once"
    )
    assert read_topic(ours.bootstrap_servers, topic, PARTITIONS) == before
    assert (there["records"], there["rebuilt"], there["lag"], there["lost"]) == (2060, 0, 0, 0)
    with Admin({"bootstrap.servers": ours.bootstrap_servers}) as admin:
        found = admin.describe_configs([("topic", topic)]).check()["topic", topic]
        assert {name: found[name].value for name in ("retention.ms", "max.message.bytes")} == {
            "retention.ms": "-1",
            "max.message.bytes": "2000000",
        }

    back = ("--topics", topic, "--prefix", "back.", "--name", f"back-{topic}", "--exactly-once")
    mirror_once(ours.bootstrap_servers, kafka.bootstrap_servers, *back)
    assert read_topic(kafka.bootstrap_servers, f"back.{topic}", PARTITIONS) == before
    for partition in range(PARTITIONS):
        copies = _data_batches(_logs(Path(ours.data_dir), topic, partition))
        assert _data_batches(_logs(kafka.log_dir, f"back.{topic}", partition)) == copies
        originals = _data_batches(_logs(kafka.log_dir, topic, partition))
        # all batches except those of aborted transactions are there, in order, byte for byte
        assert copies == [one for one in originals if one in copies]
        assert len(copies) < len(originals)

    # nothing is left to copy; then a new record is the only one that is copied
    assert mirror_once(ours.bootstrap_servers, kafka.bootstrap_servers, *back)["records"] == 0
    producer = Producer({"bootstrap.servers": ours.bootstrap_servers})
    producer.produce(topic, b"later", None, 1, timestamp=_TIME)
    assert producer.flush(30) == 0
    assert mirror_once(ours.bootstrap_servers, kafka.bootstrap_servers, *back)["records"] == 1
    after = read_topic(kafka.bootstrap_servers, f"back.{topic}", PARTITIONS)
    assert [after[0], after[1][:-1], after[1][-1].value] == [*before, b"later"]


def test_groups(shared_kafkas: SharedKafkas, ours: EmbeddedCluster) -> None:
    kafka = shared_kafkas.get(NEWEST)
    topic = f"groups-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, PARTITIONS)
    produce_all_shapes(kafka.bootstrap_servers, topic)
    group = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": f"g-{topic}", "log_level": 0})
    # within a batch, and within a batch of a transaction
    places = [TopicPartition(topic, 0, 777), TopicPartition(topic, 1, 1018)]
    group.commit(offsets=places, asynchronous=False)
    more = ("--topics", topic, "--name", topic, "--exactly-once", "--commit-interval", "0.01", "--groups", f"g-{topic}")
    told = mirror_once(kafka.bootstrap_servers, ours.bootstrap_servers, *more)
    assert told["groups"] == 1
    moved = Consumer({"bootstrap.servers": ours.bootstrap_servers, "group.id": f"g-{topic}", "log_level": 0})
    for place in moved.committed(places, timeout=30):
        rest = [seen for _, seen in read_partition(ours.bootstrap_servers, topic, place.partition, place.offset)]
        there = places[place.partition].offset
        assert rest == [seen for _, seen in read_partition(kafka.bootstrap_servers, topic, place.partition, there)]
    # the offsets of a group that already consumes at the target, and is ahead there, stay
    ahead = TopicPartition(topic, 0, 900)
    moved.commit(offsets=[ahead], asynchronous=False)
    mirror_once(kafka.bootstrap_servers, ours.bootstrap_servers, *more)
    assert moved.committed([TopicPartition(topic, 0)], timeout=30)[0].offset == 900
    group.close()
    moved.close()


@pytest.mark.test_all("version")
def test_from_the_oldest_kafka_to_the_newest(shared_kafkas: SharedKafkas) -> None:
    old, new = shared_kafkas.get("0.10.2.2"), shared_kafkas.get(NEWEST)
    topic = f"old-{uuid.uuid4().hex[:8]}"
    old.create_topic(topic, PARTITIONS)
    produce_all_shapes(old.bootstrap_servers, topic, is_old=True)
    before = read_topic(old.bootstrap_servers, topic, PARTITIONS)
    told = mirror_once(
        old.bootstrap_servers, new.bootstrap_servers, "--topics", topic, "--name", topic, "--exactly-once"
    )
    assert read_topic(new.bootstrap_servers, topic, PARTITIONS) == before
    assert (told["records"], told["copied"]) == (1600, 0)
    # and back: records without headers become messages again
    back = ("--topics", topic, "--prefix", "back.", "--name", f"back-{topic}")
    mirror_once(new.bootstrap_servers, old.bootstrap_servers, *back)
    assert read_topic(old.bootstrap_servers, f"back.{topic}", PARTITIONS) == before
