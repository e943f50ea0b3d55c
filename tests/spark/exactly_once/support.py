"""Helpers for exactly-once tests: produce numbers to TOPIC-from, and count each number in a topic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.spark.support import Sent, consume, produce
from tests.support.clients.transactional.java import JavaClient
from tests.support.runs.soak import in_soak
from tests.support.servers.kafka import NEWEST, Version
from tests.support.servers.shared_kafka import SharedKafkas

PARTITIONS = 3
OURS = "ours"
#: Parameters of a fixture by `brokers_of`: our broker, Kafka in test-all, and an older one in make soak.
_KAFKA = [pytest.mark.peer, pytest.mark.test_all("version")]
OURS_AND_KAFKA = [
    OURS,
    pytest.param(NEWEST, marks=_KAFKA),
    pytest.param("3.9.1", marks=[*_KAFKA, in_soak]),
]


@contextmanager
def brokers_of(
    which: Version, folder: Path, kafkas: SharedKafkas, settings: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Bootstrap servers of our broker, with `settings` in a folder of its own, or of a version of Kafka."""
    if which == OURS:
        with EmbeddedCluster(data_dir=folder, settings=settings) as cluster:
            yield cluster.bootstrap_servers
    else:
        yield kafkas.get(which).bootstrap_servers


def fill(servers: str, topic: str, first: int, end: int) -> None:
    produce(servers, f"{topic}-from", [Sent(b"%d" % n, partition=n % PARTITIONS) for n in range(first, end)])


def read(servers: str, topic: str, *, committed: bool = True) -> Counter[str]:
    level = "read_committed" if committed else "read_uncommitted"
    return Counter((record.value or b"").decode() for record in consume(servers, topic, isolation_level=level))


def read_by_java(servers: str, topic: str, folder: Path) -> Counter[str]:
    """The committed values, none of which has a space, read by the newest Java client. Takes Kafka's jars."""
    with JavaClient(NEWEST, servers, folder / "java.log") as java:
        level = "isolation.level=read_committed"
        return Counter(value for n in range(PARTITIONS) for value in java.ask("read", topic, str(n), level))


def once(records: int) -> Counter[str]:
    return Counter(str(n) for n in range(records))
