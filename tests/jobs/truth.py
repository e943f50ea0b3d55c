"""The records produced for a load, the output and report that the load must have, and invariants."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

from confluent_kafka.admin import AdminClient, NewPartitions
from kazoo.client import KazooClient

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import Load, rows_of
from tests.spark.support import Sent, create_topic, produce

_START = 1_700_000_000_000


class Truth:
    """The records produced, and where a load must have them."""

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._sent: dict[tuple[str, int], list[Sent]] = defaultdict(list)

    def create(self, topic: str, partitions: int) -> None:
        create_topic(self._servers, topic, partitions)
        for partition in range(partitions):
            self._sent[topic, partition] = []

    def send(self, topic: str, count: int, partitions: int) -> None:
        """Send distinct records: some without key or value, some with headers."""
        first = sum(map(len, self._sent.values()))
        records = []
        for number in range(first, first + count):
            record = Sent(
                None if number % 11 == 3 else b"value %d of %s" % (number, topic.encode()),
                None if number % 7 == 2 else b"key %d" % (number % 13),
                random.Random(number).randrange(partitions),
                _START + number,
                (("number", b"%d" % number), ("none", None)) if number % 5 == 1 else (),
            )
            records.append(record)
            self._sent[topic, record.partition].append(record)
        produce(self._servers, topic, records)

    def grow(self, topic: str, partitions: int) -> None:
        """Add partitions to a topic."""
        admin = AdminClient({"bootstrap.servers": self._servers, "log_level": 0})
        admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(timeout=30)
        for partition in range(partitions):
            self._sent.setdefault((topic, partition), [])

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows that `rows_of` must return."""
        return [
            (record.key, record.value, *key, offset, record.timestamp, [*record.headers] or None)
            for key, records in sorted(self._sent.items())
            for offset, record in enumerate(records)
        ]

    def ends(self) -> dict[tuple[str, int], int]:
        return {key: len(records) for key, records in self._sent.items()}

    def report(self, before: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
        """The report of a run that began at `before` and loaded the rest."""
        return [
            {
                "topic": key[0],
                "partition": key[1],
                "from": before.get(key, 0),
                "until": len(records),
                "records": len(records) - before.get(key, 0),
                "bytes": sum(len(item.key or b"") + len(item.value or b"") for item in records[before.get(key, 0) :]),
                "lag": 0,
            }
            for key, records in sorted(self._sent.items())
        ]


def zookeeper_offsets(cluster: EmbeddedCluster, group: str) -> dict[tuple[str, int], int]:
    client = KazooClient(cluster.zookeeper_connect)
    client.start()
    try:
        root = f"/consumers/{group}/offsets"
        return {
            (topic, int(partition)): int(client.get(f"{root}/{topic}/{partition}")[0])
            for topic in client.get_children(root)
            for partition in client.get_children(f"{root}/{topic}")
        }
    finally:
        client.stop()
        client.close()


def reported(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The part of a report that `Truth.report` covers, after a check that nothing is missing in it."""
    names = ("topic", "partition", "from", "until", "records", "bytes", "lag")
    assert all(row["gaps"] == {} and row["unexplained"] == 0 and row["error"] == "" for row in rows)
    return [{name: row[name] for name in names} for row in rows]


def check_each_once(load: Load) -> None:
    """Check what holds at any moment: no record is there twice, and each partition has no gap from its beginning."""
    offsets: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in rows_of(load.output):
        offsets[row[2], row[3]].append(row[4])
    for key, found in offsets.items():
        assert found == list(range(len(found))), f"records of {key} are missing or there twice"
