"""Move offsets from ZooKeeper to Kafka and back, by the steps of Kafka's documentation; and copy a checkpoint's.

Source: Kafka 1.0 documentation, "Migrating offsets from ZooKeeper to Kafka".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster
from spark_klog.spark.read.source import KlogDataSource
from spark_klog.spark.read.stream import RangePartition
from spark_klog.spark.versions import ReadAllAvailable
from tests.spark.support import Group, Job, Sent, create_topic, produce
from tests.support.clients.klog import klog_lines, klog_refusal

Config = dict[str, str]

STORAGE, DUAL = "kafka.offsets.storage", "kafka.dual.commit.enabled"
BEFORE = {STORAGE: "zookeeper"}
TO_KAFKA, IN_KAFKA = {STORAGE: "kafka", DUAL: "true"}, {STORAGE: "kafka", DUAL: "false"}
TO_ZOOKEEPER, IN_ZOOKEEPER = {STORAGE: "zookeeper", DUAL: "true"}, {STORAGE: "zookeeper", DUAL: "false"}
#: The configurations of the group's two consumers, bounce by bounce.
ROLL = [
    (BEFORE, BEFORE),
    (TO_KAFKA, BEFORE),
    (TO_KAFKA, TO_KAFKA),
    (IN_KAFKA, TO_KAFKA),
    (IN_KAFKA, IN_KAFKA),
    (TO_ZOOKEEPER, IN_KAFKA),
    (TO_ZOOKEEPER, TO_ZOOKEEPER),
    (IN_ZOOKEEPER, IN_ZOOKEEPER),
]


@pytest.fixture(scope="module")
def cluster(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(zookeeper=True, data_dir=module_server_dir / "cluster") as running:
        yield running


class Place:
    """A topic of two partitions, and a group's offsets in ZooKeeper and at its coordinator."""

    def __init__(self, cluster: EmbeddedCluster, topic: str) -> None:
        self.servers, self.topic = cluster.bootstrap_servers, topic
        self.end = 0
        create_topic(self.servers, topic, 2)
        self._group = Group(self.servers, topic, topic, 2)
        self._zookeeper = KazooClient(cluster.zookeeper_connect)
        self._zookeeper.start()
        #: Queries know only the group's offsets: each has a new checkpoint.
        self.options = {
            "kafka.bootstrap.servers": self.servers,
            "kafka.zookeeper.connect": str(cluster.zookeeper_connect),
            "kafka.group.id": topic,
            "commitOffsets": "true",
            "startingOffsets": "group",
        }

    def produce(self) -> None:
        produce(self.servers, self.topic, [Sent(b"v", partition=number) for number in (0, 1) for _ in range(3)])
        self.end += 3

    def check_seen(self, seen: Sequence[tuple[int, int]]) -> None:
        """Check that each record was seen once."""
        assert sorted(seen) == [(partition, offset) for partition in range(2) for offset in range(self.end)]

    def check_stored(self, config: Config) -> None:
        """Check the stored offsets after all consumers have read to the end with `config`."""
        top = f"/consumers/{self.topic}/offsets/{self.topic}"
        in_zookeeper = {number: int(self._zookeeper.get(f"{top}/{number}")[0]) for number in range(2)}
        in_kafka = {number: offset for (_, number), offset in self._group.offsets().items()}
        both = {0: self.end, 1: self.end}
        if config is BEFORE:
            assert (in_kafka, in_zookeeper) == ({}, both)
        elif config in (TO_KAFKA, TO_ZOOKEEPER):
            assert in_kafka == in_zookeeper == both
        else:
            current, other = (in_kafka, in_zookeeper) if config is IN_KAFKA else (in_zookeeper, in_kafka)
            assert current == both
            assert all(offset < self.end for offset in other.values())

    def close(self) -> None:
        self._zookeeper.stop()
        self._zookeeper.close()
        self._group.close()


@pytest.fixture
def place(cluster: EmbeddedCluster, topic: str) -> Iterator[Place]:
    made = Place(cluster, topic)
    yield made
    made.close()


def read(options: Config) -> Iterator[tuple[int, int]]:
    """(partition, offset) of the records up to the end, from a stream reader called in Spark's order."""
    source = KlogDataSource(options)
    reader = source.streamReader(source.schema())
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(start, ReadAllAvailable())
    for task in reader.partitions(start, end):
        assert isinstance(task, RangePartition)
        for batch in reader.read(task):
            yield from zip(batch["partition"].to_pylist(), batch["offset"].to_pylist(), strict=True)
    reader.commit(end)
    reader.stop()


@pytest.mark.test_all("long")
def test_a_rolling_bounce_and_one_back(place: Place) -> None:
    """In each bounce the consumers swap their partitions, so one continues where another config ended."""
    seen: list[tuple[int, int]] = []
    for bounce, configs in enumerate(ROLL):
        place.produce()
        for number, config in enumerate(configs):
            assigned = json.dumps({place.topic: [(bounce + number) % 2]})
            seen += read({**place.options, **config, "assign": assigned})
        place.check_seen(seen)
        if configs[0] is configs[1]:
            place.check_stored(configs[0])


def test_a_checkpoint_gives_a_group_its_offsets(
    spark: SparkSession, cluster: EmbeddedCluster, topic: str, tmp_path: Path
) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    job = Job(spark, servers, tmp_path, subscribe=topic)
    for number in range(2):
        produce(servers, topic, [Sent(b"v", partition=1 - number) for _ in range(5)])
        assert sum(job.run()) == 5
    source, coordinator = f"checkpoint://{job.checkpoint}", f"kafka://{servers}"
    assert job.committed() == {(topic, 0): 5, (topic, 1): 5}
    shown = klog_lines("offsets", "show", "--group", "new", "--from", source)
    assert {(line["topic"], line["partition"]): line["offset"] for line in shown} == job.committed()
    # a planned micro-batch that is not committed: the query would read it again, and so must its successor
    batches = sorted(int(path.name) for path in (job.checkpoint / "commits").glob("[0-9]*") if path.name.isdecimal())
    (job.checkpoint / "commits" / str(batches[-1])).unlink()
    move = ("offsets", "copy", "--group", "new", "--from", source, "--to", coordinator)
    assert [line["new"] for line in klog_lines(*move)] == [0, 5]
    group = Group(servers, "new", topic, 2)
    assert group.offsets() == job.committed() == {(topic, 0): 0, (topic, 1): 5}
    group.close()
    back = ("offsets", "copy", "--group", "new", "--from", coordinator, "--to", source)
    assert "a checkpoint can't be written" in klog_refusal(*back, code=2)
    assert "a checkpoint can't be written" in klog_refusal(*back, "--dry-run", code=2)
