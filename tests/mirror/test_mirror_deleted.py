"""Delete source topics while a mirror copies other topics, and while it looks for its start offsets."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from spark_klog.base.names import TopicPartition
from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.mirror import mirror as mirror_module
from spark_klog.mirror.mirror import Mirror, Session
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.mirror.topics import MirroredTopics
from tests.support.clients.mirrors import SECONDS, read_topic
from tests.support.clients.topics import make_topic
from tests.support.waiting import wait_until

_PARTITIONS = 2


def _write(servers: str, topic: str, text: str, count: int) -> list[list[bytes]]:
    """Write records to the partitions in turn; return their values by partition."""
    found: list[list[bytes]] = [[] for _ in range(_PARTITIONS)]
    with Producer({"bootstrap.servers": servers}) as producer:
        for number in range(count):
            value = f"{text} {number}".encode()
            producer.send(topic, value, partition=number % _PARTITIONS)
            found[number % _PARTITIONS].append(value)
    return found


def _delete(servers: str, topic: str) -> None:
    """Delete a topic, and wait until it is gone."""
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.delete_topic(topic)
        wait_until(lambda: all(one.name != topic for one in admin.list_topics()), seconds=SECONDS)


def _make_again(servers: str, topic: str, count: int) -> list[list[bytes]]:
    _delete(servers, topic)
    make_topic(servers, topic, _PARTITIONS)
    return _write(servers, topic, "new", count)


def _copied(target: EmbeddedCluster, topic: str) -> list[list[bytes | None]]:
    return [[seen.value for seen in part] for part in read_topic(target.bootstrap_servers, topic, _PARTITIONS)]


class _Topics:
    """Two source topics with records, and a mirror of them; a call that waits for a timeout would take ten minutes."""

    def __init__(self, cluster: EmbeddedCluster, target: EmbeddedCluster) -> None:
        name = f"t-{uuid.uuid4().hex[:8]}"
        self.source, self._target, self._name = cluster.bootstrap_servers, target, name
        self.stays, self.goes = f"{name}-stays", f"{name}-goes"
        self.old = {}
        for topic in (self.stays, self.goes):
            make_topic(self.source, topic, _PARTITIONS)
            self.old[topic] = _write(self.source, topic, "old", 20)

    def mirror(self, **more: Any) -> Mirror:
        first = {"bootstrap.servers": self.source, "default.api.timeout.ms": "600000"}
        second = {"bootstrap.servers": self._target.bootstrap_servers}
        topics = re.compile(f"{self._name}-.*")
        return Mirror(MirrorSettings(first, second, name=self._name, topics=topics, refresh_seconds=3600, **more))


@pytest.fixture
def topics(cluster: EmbeddedCluster, target: EmbeddedCluster) -> _Topics:
    return _Topics(cluster, target)


def _at_first_step(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Call `action` when the mirror has found the source's end offsets, before it copies anything."""
    real, was_called = Session._step, threading.Event()

    def step(session: Session) -> None:
        if not was_called.is_set():
            was_called.set()
            action()
        real(session)

    monkeypatch.setattr(Session, "_step", step)


def test_others_are_copied_on(topics: _Topics, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "_LAG_SECONDS", 0.2)
    mirror = topics.mirror()
    thread = threading.Thread(target=mirror.run, daemon=True)
    thread.start()
    wait_until(lambda: mirror.totals.records == 40, seconds=SECONDS)
    _delete(topics.source, topics.goes)
    more = _write(topics.source, topics.stays, "more", 20)
    wait_until(lambda: mirror.totals.records == 60, seconds=SECONDS)
    wait_until(lambda: mirror.totals.partitions == _PARTITIONS, seconds=SECONDS)  # at once, not at the next refresh
    mirror.stop()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert mirror.totals.restarts == 0
    old = topics.old[topics.stays]
    assert _copied(target, topics.stays) == [a + b for a, b in zip(old, more, strict=True)]
    assert _copied(target, topics.goes) == topics.old[topics.goes]  # the copy stays


def test_until_end_stops_without_what_was_deleted(
    topics: _Topics, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "_GONE_SECONDS", 0.3)
    _at_first_step(monkeypatch, lambda: _delete(topics.source, topics.goes))
    totals = topics.mirror().run(until_end=True)
    assert (totals.records, totals.partitions, totals.lag, totals.restarts) == (20, _PARTITIONS, 0, 0)
    assert _copied(target, topics.stays) == topics.old[topics.stays]
    assert _copied(target, topics.goes) == [[], []]


def test_until_end_waits_for_a_topic_that_is_missing_for_a_moment(
    topics: _Topics, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that has just started does not list the topic for a moment."""
    real_list, real_step = Admin.list_topics, Session._step
    found: list[int] = []

    def list_topics(admin: Admin, **more: Any) -> Any:
        return [one for one in real_list(admin, **more) if one.name != topics.goes]

    def step(session: Session) -> None:
        if not found:
            with monkeypatch.context() as patch:
                patch.setattr(Admin, "list_topics", list_topics)
                session._follow()
                found.append(session.totals.partitions)
        real_step(session)

    monkeypatch.setattr(Session, "_step", step)
    totals = topics.mirror().run(until_end=True)
    assert found == [2 * _PARTITIONS]
    assert totals.records == 40
    assert _copied(target, topics.goes) == topics.old[topics.goes]


def test_until_end_copies_the_topic_that_was_made_anew(
    topics: _Topics, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    new: list[list[bytes]] = []
    _at_first_step(monkeypatch, lambda: new.extend(_make_again(topics.source, topics.goes, 30)))
    totals = topics.mirror(recreated="begin").run(until_end=True)
    assert (totals.records, totals.lag, totals.restarts) == (50, 0, 0)
    assert _copied(target, topics.goes) == new


def test_made_anew_while_the_mirror_begins(
    topics: _Topics, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror has read the old topic's id, and then finds that the log ends before its position."""
    topics.mirror().run(until_end=True)
    real = MirroredTopics.refresh
    new: list[list[bytes]] = []

    def refresh(found: MirroredTopics, patience: float = 0.0) -> list[TopicPartition]:
        keys = real(found, patience)
        if not new:
            new.extend(_make_again(topics.source, topics.goes, 6))
        return keys

    monkeypatch.setattr(MirroredTopics, "refresh", refresh)
    mirror, old = topics.mirror(recreated="begin"), topics.old[topics.goes]
    totals = mirror.run(until_end=True)
    assert totals.records == 6
    assert _copied(target, topics.goes) == [a + b for a, b in zip(old, new, strict=True)]


def test_deleted_while_the_mirror_makes_topics(
    topics: _Topics, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror has listed a topic, but the topic is gone when the mirror describes it."""
    real, was_called = Admin.describe_topics, threading.Event()

    def describe_topics(admin: Admin, names: Any) -> Any:
        if not was_called.is_set():
            was_called.set()
            _delete(topics.source, topics.goes)
        return real(admin, names)

    monkeypatch.setattr(Admin, "describe_topics", describe_topics)
    mirror = topics.mirror()
    thread = threading.Thread(target=mirror.run, daemon=True)
    thread.start()
    wait_until(lambda: mirror.totals.records == 20, seconds=SECONDS)
    mirror.stop()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert mirror.totals.restarts == 0
    assert _copied(target, topics.stays) == topics.old[topics.stays]
    with Admin({"bootstrap.servers": target.bootstrap_servers}) as admin:
        assert all(one.name != topics.goes for one in admin.list_topics())
