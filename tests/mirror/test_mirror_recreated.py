"""Source topics that are deleted and created again between two refreshes of the mirror.

SPARK_KLOG_KAFKAS=all adds real Kafka brokers.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from typing import Any

import pytest
from confluent_kafka import Producer

from spark_klog.client import Admin, Producer as KlogProducer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import DataLossError, ErrorCode, KlogError, ProtocolError
from spark_klog.mirror.mirror import Mirror
from spark_klog.mirror.settings import MirrorSettings
from tests.support.clients.mirrors import SECONDS, read_topic
from tests.support.clients.topics import make_topic
from tests.support.servers.kafka import Version
from tests.support.servers.shared_kafka import SharedKafkas

_SOURCES: list[Version | None] = [None, *(["3.9.1"] if os.environ.get("SPARK_KLOG_KAFKAS") == "all" else [])]
_PARTITIONS = 2


def _fill(servers: str, topic: str, name: str, count: int) -> list[list[bytes]]:
    """Create a topic with records; return their values by partition."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            make_topic(servers, topic, _PARTITIONS)
        except ProtocolError as error:
            # the deletion of the old topic may not be done yet
            if error.code != ErrorCode.TOPIC_ALREADY_EXISTS or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            break
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    found: list[list[bytes]] = [[] for _ in range(_PARTITIONS)]
    for number in range(count):
        value = b"%s %d" % (name.encode(), number)
        found[number % _PARTITIONS].append(value)
        producer.produce(topic, value, None, number % _PARTITIONS)
    assert producer.flush(SECONDS) == 0
    return found


class _Running(threading.Thread):
    """A mirror in a thread that looks for topics only when it starts."""

    def __init__(self, source: str, target: str, topic: str, **more: Any) -> None:
        super().__init__(daemon=True)
        sides = {"bootstrap.servers": source}, {"bootstrap.servers": target}
        self.mirror = Mirror(MirrorSettings(*sides, topics=re.compile(topic), name=topic, refresh_seconds=3600, **more))
        self.error: KlogError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.mirror.run()
        except KlogError as error:
            self.error = error

    def wait_for(self, records: int) -> None:
        deadline = time.monotonic() + SECONDS
        while self.mirror.totals.records < records:
            assert self.is_alive(), self.error
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def finish(self) -> None:
        self.mirror.stop()
        self.join(SECONDS)
        assert not self.is_alive()


@pytest.mark.parametrize("is_exact", [False, True], ids=["at least once", "exactly once"])
@pytest.mark.parametrize("version", _SOURCES)
def test_created_again_with_more_records(
    version: Version | None,
    is_exact: bool,
    cluster: EmbeddedCluster,
    target: EmbeddedCluster,
    shared_kafkas: SharedKafkas,
) -> None:
    topic = f"t-{uuid.uuid4().hex[:8]}"
    source = cluster.bootstrap_servers if version is None else shared_kafkas.get(version).bootstrap_servers
    old = _fill(source, topic, "old", 20)
    one = _Running(source, target.bootstrap_servers, topic, exactly_once=is_exact, recreated="begin")
    one.wait_for(20)
    with Admin({"bootstrap.servers": source}) as admin:
        admin.delete_topic(topic)
    new = _fill(source, topic, "new", 100)
    one.wait_for(120)
    one.finish()
    assert one.error is None
    assert one.mirror.totals.records == 120
    copies = read_topic(target.bootstrap_servers, topic, _PARTITIONS)
    assert [[seen.value for seen in part] for part in copies] == [a + b for a, b in zip(old, new, strict=True)]


def test_nothing_of_the_new_topic_is_copied_unless_it_is_wanted(
    cluster: EmbeddedCluster, target: EmbeddedCluster
) -> None:
    topic = f"t-{uuid.uuid4().hex[:8]}"
    source = cluster.bootstrap_servers
    old = _fill(source, topic, "old", 20)
    one = _Running(source, target.bootstrap_servers, topic)
    one.wait_for(20)
    with Admin({"bootstrap.servers": source}) as admin:
        admin.delete_topic(topic)
    _fill(source, topic, "new", 100)
    one.join(SECONDS)
    assert isinstance(one.error, DataLossError)
    assert "created again" in str(one.error)
    copies = read_topic(target.bootstrap_servers, topic, _PARTITIONS)
    assert [[seen.value for seen in part] for part in copies] == old


def test_an_open_transaction_does_not_make_the_log_shorter(cluster: EmbeddedCluster, target: EmbeddedCluster) -> None:
    """A read_uncommitted run copies its records; for a read_committed run the log ends earlier; it goes on."""
    topic, servers = f"t-{uuid.uuid4().hex[:8]}", cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    with KlogProducer({"bootstrap.servers": servers, "transactional.id": topic}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"open")
        producer.flush()
        for level, copied in (("read_uncommitted", 1), ("read_committed", 0)):
            source = {"bootstrap.servers": servers, "isolation.level": level}
            to = {"bootstrap.servers": target.bootstrap_servers}
            mirror = Mirror(MirrorSettings(source, to, name=topic, topics=re.compile(topic)))
            assert mirror.run(until_end=True).records == copied
        producer.commit_transaction()
    assert [seen.value for seen in read_topic(target.bootstrap_servers, topic, 1)[0]] == [b"open"]
