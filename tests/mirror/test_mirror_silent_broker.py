"""A source of which one broker is silent: the records of the others are not held up, and somebody says so."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spark_klog.client import Admin
from spark_klog.mirror import mirror as mirror_module
from spark_klog.mirror.mirror import GroupTranslation, Mirror
from spark_klog.mirror.progress import PartitionMap
from spark_klog.mirror.settings import MirrorSettings
from tests.support.brokers.simulated_cluster import SimulatedCluster, topic_name
from tests.support.waiting import wait_until

TOPICS, PARTITIONS, BROKERS = 4, 4, 4
#: Seconds of the look at the source's ends, and how long a record may wait: less than a look.
LOOK, SOON = 3.0, 1.5


@pytest.fixture
def sides() -> Iterator[tuple[SimulatedCluster, SimulatedCluster]]:
    with (
        SimulatedCluster(TOPICS, PARTITIONS, BROKERS, 20) as source,
        SimulatedCluster(TOPICS, PARTITIONS, BROKERS, 0) as target,
    ):
        yield source, target


def _settings(sides: tuple[SimulatedCluster, SimulatedCluster], **more: Any) -> MirrorSettings:
    source, target = ({"bootstrap.servers": side.bootstrap_servers} for side in sides)
    return MirrorSettings(source, target, **more)


@contextmanager
def _running(settings: MirrorSettings) -> Iterator[Mirror]:
    mirror = Mirror(settings)
    thread = threading.Thread(target=mirror.run, daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        mirror.stop()
        thread.join(30)
    assert not thread.is_alive()


def test_a_silent_source_broker_delays_no_others(
    sides: tuple[SimulatedCluster, SimulatedCluster],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mirror_module, "_LAG_SECONDS", 0.1)
    monkeypatch.setattr(mirror_module, "_LOOK_MS", LOOK * 1000)
    source = sides[0]
    with _running(_settings(sides, start="latest")) as mirror:
        wait_until(lambda: mirror.totals.lag == 0 and mirror.totals.partitions == TOPICS * PARTITIONS, seconds=30)
        source.tell("slow", node=3, seconds=1000)
        assert max(_waits(source, mirror)) < SOON
        told = [record.getMessage() for record in caplog.records if "silent leader" in record.getMessage()]
        assert 1 <= len(told) <= 3
        assert f":{source.ports[3]} did not answer" in told[0]
        assert "t00000-3" in told[0]
        source.tell("slow", node=3)
        wait_until(lambda: "all leaders of the source answer again" in caplog.messages, seconds=30)
    assert mirror.totals.restarts == 0


def test_a_broker_that_is_silent_when_a_mirror_begins_delays_no_others(
    sides: tuple[SimulatedCluster, SimulatedCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its partitions are looked at beside the copying, too, and mirrored when it answers."""
    monkeypatch.setattr(mirror_module, "_LAG_SECONDS", 0.1)
    monkeypatch.setattr(mirror_module, "_LOOK_MS", LOOK * 1000)
    source = sides[0]
    source.tell("slow", node=3, seconds=1000)
    with _running(_settings(sides)) as mirror:
        wait_until(lambda: mirror.totals.partitions == TOPICS * (PARTITIONS - 1), seconds=30)
        wait_until(lambda: mirror.totals.records == 20 * TOPICS * (PARTITIONS - 1), seconds=30)
        assert max(_waits(source, mirror, 1)) < SOON
        source.tell("slow", node=3)
        wait_until(lambda: mirror.totals.partitions == TOPICS * PARTITIONS, seconds=30)
        wait_until(lambda: mirror.totals.lag == 0, seconds=30)
    assert mirror.totals.restarts == 0


def _waits(source: SimulatedCluster, mirror: Mirror, looks: int = 2) -> list[float]:
    """How many seconds the records waited that came during so many looks."""
    waits = []
    end = time.monotonic() + looks * LOOK
    while time.monotonic() < end:
        before, begin = mirror.totals.records, time.monotonic()
        source.tell("append", every=1, records=1)
        wait_until(lambda: mirror.totals.records > before, seconds=30)  # noqa: B023 - called at once
        waits.append(time.monotonic() - begin)
        time.sleep(0.1)
    return waits


def test_partitions_without_a_leader_are_one_line(
    sides: tuple[SimulatedCluster, SimulatedCluster],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mirror_module, "_LAG_SECONDS", 0.1)
    sides[0].tell("stop", node=3)
    with _running(_settings(sides)) as mirror:
        wait_until(lambda: mirror.totals.partitions == TOPICS * (PARTITIONS - 1), seconds=30)
        sides[0].tell("forget")  # and it looks for them again and again
        wait_until(lambda: sides[0].figures()["requests"].get("Metadata", 0) > 5, seconds=30)
    (line,) = [line for line in caplog.messages if "no leader answers" in line]
    assert line.endswith(": t00000-3, t00001-2, t00002-1, t00003-0")


def test_translation_asks_for_what_a_group_has(sides: tuple[SimulatedCluster, SimulatedCluster]) -> None:
    """Not for all mirrored partitions of each group; offsets of others are left out."""
    settings = _settings(sides, groups=re.compile("g.*"))
    maps = {}
    for number in range(TOPICS - 1):
        for partition in range(PARTITIONS):
            known = maps[topic_name(number), partition] = PartitionMap()
            known.copied(0, 20, 0)
            known.moved(20)
    with Admin(settings.source_admin()) as source, Admin(settings.target_client()) as target:
        source.alter_group_offsets("g1", {(topic_name(0), 1): 5, (topic_name(TOPICS - 1), 0): 5}).check()
        sides[0].tell("forget")
        assert GroupTranslation(settings, source, target).translate(maps) == 1
        assert sides[0].figures()["partitions"]["OffsetFetch"] == 2
        there = target.list_group_offsets("g1")
    assert {key: entry.offset for key, entry in there.items()} == {(topic_name(0), 1): 5}
