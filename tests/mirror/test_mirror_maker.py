"""The mirror copies the same records as MirrorMaker 2 of Kafka 3.9.1.

Part of `make soak` (SPARK_KLOG_KAFKAS=all): MirrorMaker takes most of a minute to start.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest

from spark_klog.client import Admin
from tests.mirror.records import PARTITIONS, produce_all_shapes
from tests.support.clients.mirrors import Seen, mirror_once, read_topic
from tests.support.servers.kafka import NEWEST
from tests.support.servers.mirror_maker import mirror_maker, mirror_maker_libs
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(os.environ.get("SPARK_KLOG_KAFKAS") != "all", reason="part of make soak"),
]
_SECONDS = 240.0


def _wait_for_topic(servers: str, topic: str, deadline: float) -> None:
    with Admin({"bootstrap.servers": servers}) as admin:
        while all(one.name != topic for one in admin.list_topics()):
            assert time.monotonic() < deadline, f"MirrorMaker has not made {topic}"
            time.sleep(0.5)


@pytest.mark.timeout(600)
def test_the_same_records_as_mirror_maker(shared_kafkas: SharedKafkas, server_dir: Path) -> None:
    source, target = (shared_kafkas.get(version).bootstrap_servers for version in ("3.9.1", NEWEST))
    topic, alias = f"both-{uuid.uuid4().hex[:8]}", f"mm{uuid.uuid4().hex[:6]}"
    with Admin({"bootstrap.servers": source}) as admin:
        # the records' timestamps are years old
        admin.create_topic(topic, PARTITIONS, replication_factor=1, configs={"retention.ms": "-1"})
    produce_all_shapes(source, topic)
    before = read_topic(source, topic, PARTITIONS)
    more = {f"{alias}.consumer.isolation.level": "read_committed"}
    theirs: list[list[Seen]] = []
    with mirror_maker(mirror_maker_libs(), source, target, alias, topic, server_dir, more, PARTITIONS) as process:
        deadline = time.monotonic() + _SECONDS
        _wait_for_topic(target, f"{alias}.{topic}", deadline)
        while sum(map(len, theirs)) < sum(map(len, before)):
            assert process.poll() is None, (server_dir / f"{alias}.log").read_text()[-2000:]
            assert time.monotonic() < deadline, sum(map(len, theirs))
            theirs = read_topic(target, f"{alias}.{topic}", PARTITIONS)
    for number, more_arguments in enumerate(((), ("--exactly-once",))):
        prefix = f"klog{number}."
        mirror_once(source, target, "--topics", topic, "--name", prefix + topic, "--prefix", prefix, *more_arguments)
        ours = read_topic(target, prefix + topic, PARTITIONS)
        assert ours == before
        assert ours == theirs
