"""What holds up a read_committed stream, told before the transaction's timeout; and a sink's own warnings."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, cast

import pytest
from confluent_kafka import Producer

from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import list_offsets
from spark_klog.protocol.tables.records import LATEST
from spark_klog.spark.read import open_transactions
from spark_klog.spark.read.open_transactions import OpenTransactions
from spark_klog.spark.read.source import KlogDataSource
from spark_klog.spark.versions import ReadAllAvailable
from spark_klog.spark.write.exactly_once_driver import warn_if_late, warning_of_open_transaction
from tests.spark.support import create_topic, needs_admission_control, produce, values, wait_for

_SECONDS = 60
T0, T1 = ("t", 0), ("t", 1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_an_end_that_stands_still() -> None:
    clock = Clock()
    tracked = OpenTransactions(clock)
    for second in range(20):  # each second another transaction in T0, one that stays open in T1
        clock.now = float(second)
        tracked.compare({T0: second, T1: 3}, {T0: second + 5, T1: 3 + second})
    assert [(one["partition"], one["records"]) for one in tracked.to_json()] == [(1, 19)]
    assert 0 <= time.time() * 1000 - tracked.to_json()[0]["sinceMs"] < 60_000
    tracked.compare({T0: 30, T1: 22}, {T0: 30, T1: 22})
    assert tracked.to_json() == []


@pytest.fixture
def producer(servers: str, topic: str) -> Producer:
    """A producer with 7 records in an open transaction, whose timeout is 20 s."""
    create_topic(servers, topic, 2)
    settings = {"bootstrap.servers": servers, "transactional.id": topic, "transaction.timeout.ms": 20_000}
    made = Producer({**settings, "log_level": 0})
    made.init_transactions(_SECONDS)
    made.begin_transaction()
    for number in range(7):
        made.produce(topic, b"%d" % number, partition=1)
    assert made.flush(_SECONDS) == 0
    return made


def test_a_warning_before_the_timeout(
    servers: str, topic: str, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    tracked = OpenTransactions(clock)
    with Cluster.connect({"bootstrap.servers": servers, "isolation.level": "read_committed"}) as cluster:
        keys = dict.fromkeys([(topic, 0), (topic, 1)], LATEST)

        def look_at(second: float) -> int:
            clock.now = second
            tracked.look(cluster, list_offsets(cluster, keys))
            return len(caplog.records)

        assert [look_at(second) for second in (1, 4, 8, 10.5, 11.5, 12)] == [0, 0, 0, 0, 1, 1]
        told = caplog.records[0].getMessage()
        assert f"7 offsets of {topic}-1 wait behind an open transaction at offset 0" in told
        assert f"transactional.id {topic}, which is Ongoing, and aborted 20 s after it began" in told
        assert [look_at(second) for second in (60, 72, 100, 192)] == [1, 2, 2, 3], "at intervals that double"
        assert [one["records"] for one in tracked.to_json()] == [7]
        producer.abort_transaction(_SECONDS)
        wait_for(lambda: list_offsets(cluster, keys)[topic, 1] == 8, "the abort")
        assert look_at(1000) == 3
        assert tracked.to_json() == []


def test_slow_look_ups_are_rare(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The stream waits for them: they take a twentieth of its time at most, though the oldest transaction changes."""
    clock, looked_up = Clock(), []

    def look_up(_: Cluster, key: Any) -> open_transactions._Holder:
        looked_up.append(clock.now)
        clock.now += 5.0
        return open_transactions._Holder("nobody tells", 60.0)

    monkeypatch.setattr(open_transactions, "_holder_of", look_up)
    monkeypatch.setattr(open_transactions, "offsets_of_led", lambda *_: ({T0: 10**6, T1: 10**6}, {}))
    tracked = OpenTransactions(clock)
    second = 0.0
    while second < 1000:
        clock.now = second
        tracked.look(cast("Cluster", None), {T0: int(second) // 10, T1: (int(second) + 5) // 10})
        second = max(second, clock.now) + 1
    assert 5 <= len(looked_up) <= 1000 / (20 * 5)
    assert not caplog.records
    for second in (1100, 1200):  # the last one stays
        clock.now = second
        tracked.look(cast("Cluster", None), {T0: 500, T1: 500})
    clock.now = 1300
    tracked.look(cast("Cluster", None), {T0: 500, T1: 500})
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["nobody tells"] * 2


@needs_admission_control
def test_progress_of_a_stream(servers: str, topic: str, producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_transactions, "_PATIENCE", 0.0)
    monkeypatch.setattr(open_transactions, "_INTERVAL", 0.0)
    produce(servers, topic, values(3))
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    for level, expected in (("read_committed", [(1, 7)]), ("read_uncommitted", [])):
        source = KlogDataSource({**options, "kafka.isolation.level": level})
        reader = cast("Any", source.streamReader(source.schema()))
        reader.latestOffset({}, ReadAllAvailable())
        found = json.loads(json.dumps(reader.reportLatestOffset())).get("held up by open transactions", [])
        assert [(one["partition"], one["records"]) for one in found] == expected
        reader.stop()


def test_a_task_that_writes_for_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with warning_of_open_transaction(200, "micro-batch 7", 3):
        deadline = time.monotonic() + _SECONDS
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    with warning_of_open_transaction(60_000, "micro-batch 7", 3):
        pass
    warn_if_late(14.0, 60_000, "micro-batch 8")
    warn_if_late(16.0, 60_000, "micro-batch 9")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "task 3 of micro-batch 7 has written for 0.05 s",
        "micro-batch 9 took 16.0 s until it was decided",
    ]
    assert all("half of kafka.transaction.timeout.ms (" in record.getMessage() for record in caplog.records)
    assert "(30 s)" in caplog.records[-1].getMessage()
