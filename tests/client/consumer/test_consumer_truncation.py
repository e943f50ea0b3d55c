"""Logs truncated by a new leader (KIP-320): scripted leaders, and committed epochs at our broker and Kafka's."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_klog.client import Committed, Consumer
from spark_klog.errors import LogTruncated
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.clients.consumers import SECONDS, Server, running, short
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.usefixtures("driver")

_OLD, _NEW = [b"old-%d" % number for number in range(20)], [b"new-%d" % number for number in range(20)]


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    """A log of 20 records in two batches, written in leader epoch 3."""
    with ScriptedCluster({"t": 1}, nodes=2) as brokers:
        log = brokers.logs["t", 0]
        log.epoch = 3
        brokers.append("t", 0, _OLD, size=10)
        yield brokers


def _truncate(brokers: ScriptedCluster, end: int, values: list[bytes]) -> None:
    """Elect the other broker, with a log that ends at `end`, and append values."""
    brokers.leaders["t", 0] = 1
    brokers.logs["t", 0].elect(end)
    brokers.append("t", 0, values)


def _consumer(brokers: ScriptedCluster, **settings: Any) -> Consumer:
    given = {name.replace("_", "."): value for name, value in settings.items()}
    return Consumer({"bootstrap.servers": brokers.bootstrap_servers, "fetch.max.wait.ms": 20, **given})


def _values(consumer: Consumer, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < count and time.monotonic() < deadline:
        found += [record.value for record in consumer.poll(0.2)]
    return found


def test_a_log_that_has_grown_past_the_position_again(
    brokers: ScriptedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with _consumer(brokers, auto_offset_reset="latest") as consumer:
        consumer.assign([("t", 0, 0)])
        assert _values(consumer, 20) == _OLD
        _truncate(brokers, 10, _NEW)  # the new log ends at 30, so that position 20 is in range
        assert _values(consumer, 20) == _NEW
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("t-0 was truncated" in text and "offset 20" in text and "offset 10" in text for text in told)


def test_without_a_policy_it_is_an_error(brokers: ScriptedCluster) -> None:
    with _consumer(brokers, auto_offset_reset="none") as consumer:
        consumer.assign([("t", 0, 0)])
        assert _values(consumer, 20) == _OLD
        _truncate(brokers, 10, _NEW)
        for _ in range(2):
            with pytest.raises(LogTruncated) as failed:
                _values(consumer, 1)
            assert (failed.value.position, failed.value.epoch, failed.value.divergence) == (20, 3, 10)
        consumer.seek("t", 0, failed.value.divergence)
        assert _values(consumer, 20) == _NEW


def test_what_was_fetched_from_the_former_leader_is_dropped(brokers: ScriptedCluster) -> None:
    given = {"max_poll_records": 5, "metadata_max_age_ms": 1, "retry_backoff_ms": 1, "auto_offset_reset": "none"}
    with _consumer(brokers, **given) as consumer:
        consumer.assign([("t", 0, 0)])
        assert [record.value for record in consumer.poll(SECONDS)] == _OLD[:5]
        _truncate(brokers, 10, _NEW)  # after the position: no returned record is lost
        time.sleep(0.05)  # the metadata are older than metadata.max.age.ms, and retry.backoff.ms is over
        assert _values(consumer, 25) == _OLD[5:10] + _NEW


def test_a_leader_that_has_everything_changes_nothing(brokers: ScriptedCluster) -> None:
    with _consumer(brokers, auto_offset_reset="none") as consumer:
        consumer.assign([("t", 0, 0)])
        assert _values(consumer, 20) == _OLD
        for _ in range(2):
            _truncate(brokers, brokers.logs["t", 0].end, _NEW)
            assert _values(consumer, 20) == _NEW
        assert brokers.count("OffsetForLeaderEpoch") >= 2


def test_brokers_that_cannot_tell(brokers: ScriptedCluster) -> None:
    """Brokers before Kafka 0.11 have no OffsetForLeaderEpoch."""
    brokers.hidden.add("OffsetForLeaderEpoch")
    with _consumer(brokers, auto_offset_reset="none") as consumer:
        consumer.assign([("t", 0, 0)])
        assert _values(consumer, 20) == _OLD
        _truncate(brokers, 20, _NEW)
        assert _values(consumer, 20) == _NEW


@pytest.fixture(scope="module", params=["klog", pytest.param(NEWEST, marks=pytest.mark.peer)])
def server(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[Server]:
    with running(request.param, module_server_dir / request.param, shared_kafkas) as there:
        yield there


@pytest.mark.parametrize("policy", ["none", "latest"])
def test_a_committed_offset_that_the_log_does_not_reach(server: Server, policy: str) -> None:
    topic = server.topic()
    server.send(topic, short(20))
    given = {"group_id": topic, "enable_auto_commit": False}
    with server.consumer(**given) as consumer:
        consumer.assign([(topic, 0, 0)])
        assert len(_values(consumer, 20)) == 20
        consumer.commit()
        mark = consumer.committed([(topic, 0)])[topic, 0]
        assert mark.offset == 20
        assert mark.leader_epoch >= 0
    with server.consumer(**given, auto_offset_reset="none") as consumer:
        consumer.assign([(topic, 0)])
        server.send(topic, short(3))
        assert len(_values(consumer, 3)) == 3  # the committed epoch is that of the log
        consumer.commit({(topic, 0): Committed(1000, mark.leader_epoch)})
    with server.consumer(**given, auto_offset_reset=policy) as consumer:
        consumer.assign([(topic, 0)])
        if policy == "none":
            with pytest.raises(LogTruncated) as failed:
                _values(consumer, 1)
            assert (failed.value.position, failed.value.divergence) == (1000, 23)
        else:
            assert consumer.position(topic, 0) == 23
            server.send(topic, short(4))
            assert len(_values(consumer, 4)) == 4
            assert consumer.position(topic, 0) == 27
