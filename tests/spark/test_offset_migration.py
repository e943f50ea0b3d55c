"""Offsets from ZooKeeper to Kafka and back, by the steps of Kafka's documentation; and out of a checkpoint.

Source: 1.0 documentation, "Migrating offsets from ZooKeeper to Kafka".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_klog.embedded import EmbeddedCluster
from tests.support.klog import klog_lines, klog_refusal

from .support import Group, Job, Sent, create_topic, produce

STORAGE, DUAL = "kafka.offsets.storage", "kafka.dual.commit.enabled"
BEFORE = {STORAGE: "zookeeper"}
TO_KAFKA, IN_KAFKA = {STORAGE: "kafka", DUAL: "true"}, {STORAGE: "kafka", DUAL: "false"}
TO_ZOOKEEPER, IN_ZOOKEEPER = {STORAGE: "zookeeper", DUAL: "true"}, {STORAGE: "zookeeper", DUAL: "false"}
#: What the group's two consumers are configured with, from one bounce to the next.
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
RECORDS = 3


@pytest.fixture
def cluster(make_cluster: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    return make_cluster(zookeeper=True)


class Consumers:
    """Queries whose only memory is the group's offsets: each has a new checkpoint, and reads what is there."""

    def __init__(self, spark: SparkSession, cluster: EmbeddedCluster, topic: str, folder: Path) -> None:
        self._spark, self._topic, self._folder = spark, topic, folder
        self._options = {
            "kafka.bootstrap.servers": cluster.bootstrap_servers,
            "kafka.zookeeper.connect": str(cluster.zookeeper_connect),
            "kafka.group.id": "g",
            "startingOffsets": "group",
        }
        self.seen: list[tuple[int, int]] = []
        self._started = 0

    def start(self, partition: int, config: dict[str, str]) -> StreamingQuery:
        options = {**self._options, **config, "assign": f'{{"{self._topic}":[{partition}]}}'}
        frame = self._spark.readStream.format("klog").options(**options).load()
        self._started += 1
        checkpoint = self._folder / f"checkpoint-{self._started}"
        writer = frame.select("partition", "offset").writeStream.foreachBatch(self._note)
        return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()

    def _note(self, rows: DataFrame, _: int) -> None:
        self.seen += [(row.partition, row.offset) for row in rows.collect()]


@pytest.mark.slow
def test_the_steps_of_the_documentation_and_back(
    spark: SparkSession, cluster: EmbeddedCluster, topic: str, tmp_path: Path
) -> None:
    """In each roll the consumers take over each other's partition, so that one reads on where another config ended."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    consumers = Consumers(spark, cluster, topic, tmp_path)
    group = Group(servers, "g", topic, 2)
    zookeeper = KazooClient(cluster.zookeeper_connect)
    zookeeper.start()

    def in_zookeeper() -> dict[int, int]:
        top = f"/consumers/g/offsets/{topic}"
        return {number: int(zookeeper.get(f"{top}/{number}")[0]) for number in range(2)}

    def in_kafka() -> dict[int, int]:
        return {partition: offset for (_, partition), offset in group.offsets().items()}

    try:
        for bounce, configs in enumerate(ROLL):
            produce(servers, topic, [Sent(b"v", partition=number) for number in (0, 1) for _ in range(RECORDS)])
            end = RECORDS * (bounce + 1)
            queries = [consumers.start((bounce + number) % 2, config) for number, config in enumerate(configs)]
            assert all(query.awaitTermination(60) for query in queries)
            expected = [(partition, offset) for partition in range(2) for offset in range(end)]
            assert sorted(consumers.seen) == expected, f"each record once, after bounce {bounce}"
            both = {0: end, 1: end}
            if configs == (BEFORE, BEFORE):
                assert (in_kafka(), in_zookeeper()) == ({}, both)
            elif configs in ((TO_KAFKA, TO_KAFKA), (TO_ZOOKEEPER, TO_ZOOKEEPER)):
                assert in_kafka() == in_zookeeper() == both
            elif configs == (IN_KAFKA, IN_KAFKA):
                assert in_kafka() == both
                assert all(offset < end for offset in in_zookeeper().values())
            elif configs == (IN_ZOOKEEPER, IN_ZOOKEEPER):
                assert in_zookeeper() == both
                assert all(offset < end for offset in in_kafka().values())
    finally:
        zookeeper.stop()
        zookeeper.close()
        group.close()


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
    # planned and not done: the query would read the batch again, and so must who goes on for it
    batches = sorted(int(path.name) for path in (job.checkpoint / "commits").glob("[0-9]*") if path.name.isdecimal())
    (job.checkpoint / "commits" / str(batches[-1])).unlink()
    move = ("offsets", "copy", "--group", "new", "--from", source, "--to", coordinator)
    assert [line["new"] for line in klog_lines(*move)] == [0, 5]
    group = Group(servers, "new", topic, 2)
    assert group.offsets() == job.committed() == {(topic, 0): 0, (topic, 1): 5}
    group.close()
    back = ("offsets", "copy", "--group", "new", "--from", coordinator, "--to", source)
    assert "a checkpoint can't be written" in klog_refusal(*back)
    assert "a checkpoint can't be written" in klog_refusal(*back, "--dry-run")
