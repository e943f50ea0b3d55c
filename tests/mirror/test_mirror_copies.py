"""Copies that were deleted at the target, and advice that touches one topic only."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, DataLossError
from spark_klog.mirror.mirror import Mirror
from spark_klog.mirror.settings import MirrorSettings
from tests.support.clients.mirrors import SECONDS, read_topic
from tests.support.clients.topics import make_topic
from tests.support.waiting import wait_until


def _write(servers: str, topic: str, text: str, count: int) -> list[bytes]:
    values = [f"{text} {number}".encode() for number in range(count)]
    with Producer({"bootstrap.servers": servers}) as producer:
        for value in values:
            producer.send(topic, value, partition=0)
    return values


def _delete(servers: str, topic: str) -> None:
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.delete_topic(topic)
        wait_until(lambda: all(one.name != topic for one in admin.list_topics()), seconds=SECONDS)


class _Sides:
    """A source with two topics, and what a mirror of them has copied."""

    def __init__(self, cluster: EmbeddedCluster, target: EmbeddedCluster, *, is_exact: bool) -> None:
        self.source, self.target = cluster.bootstrap_servers, target.bootstrap_servers
        self.name = f"t-{uuid.uuid4().hex[:8]}"
        self.first, self.other = f"{self.name}-first", f"{self.name}-other"
        self.more: dict[str, Any] = {"exactly_once": is_exact}
        self.values = {}
        for topic in (self.first, self.other):
            make_topic(self.source, topic, 1)
            self.values[topic] = _write(self.source, topic, "old", 100)
        assert self.run() == 200

    def run(self, **more: Any) -> int:
        sides = {"bootstrap.servers": self.source}, {"bootstrap.servers": self.target}
        settings = MirrorSettings(*sides, name=self.name, topics=re.compile(f"{self.name}-.*"), **{**self.more, **more})
        return Mirror(settings).run(until_end=True).records

    def copied(self, topic: str) -> list[bytes | None]:
        return [seen.value for seen in read_topic(self.target, topic, 1)[0]]


@pytest.fixture
def sides(cluster: EmbeddedCluster, target: EmbeddedCluster) -> Callable[..., _Sides]:
    return lambda is_exact=False: _Sides(cluster, target, is_exact=is_exact)


def test_a_copy_that_was_deleted(sides: Callable[..., _Sides]) -> None:
    both = sides(is_exact=True)
    both.values[both.first] += _write(both.source, both.first, "more", 10)
    _delete(both.target, both.first)
    remedy = rf"in it\. Have it copied again \(--copy-again {both.first}"
    with pytest.raises(DataLossError, match=rf"the copy of topic {both.first} was deleted.*{remedy}"):
        both.run()
    assert both.copied(both.first) == []
    assert both.run(copy_again=frozenset({both.first})) == 110
    assert both.run(copy_again=frozenset({both.first})) == 0  # its copy has records
    for topic in (both.first, both.other):
        assert both.copied(topic) == both.values[topic]


def test_a_copy_that_others_have_made_again(sides: Callable[..., _Sides]) -> None:
    """It is longer than the first one."""
    both = sides()
    _delete(both.target, both.first)
    make_topic(both.target, both.first, 1)
    _write(both.target, both.first, "another's", 150)
    for more in ({}, {"copy_again": frozenset({both.first})}):
        with pytest.raises(DataLossError, match=r"created again.*\. Delete its copy, and"):
            both.run(**more)
    assert len(both.copied(both.first)) == 150


def test_a_copy_that_retention_has_emptied(sides: Callable[..., _Sides]) -> None:
    """The option may still be in the command that runs each hour."""
    both = sides()
    with Admin({"bootstrap.servers": both.target}) as admin:
        admin.delete_records({(both.first, 0): 100})
    _write(both.source, both.first, "more", 10)
    assert both.run(copy_again=frozenset({both.first})) == 10


def test_a_copy_that_is_shorter_without_ids_of_topics(
    sides: Callable[..., _Sides], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_klog.client.admin.topics._id", lambda _: None)
    both = sides()
    _delete(both.target, both.first)
    make_topic(both.target, both.first, 1)
    with pytest.raises(DataLossError, match="ends at offset 0 at the target, but was written up to 100"):
        both.run()
    assert both.run(copy_again=frozenset({both.first})) == 100
    assert both.copied(both.first) == both.values[both.first]


def test_the_advice_for_a_source_topic_touches_no_other(sides: Callable[..., _Sides]) -> None:
    both = sides(is_exact=True)
    _delete(both.source, both.first)
    make_topic(both.source, both.first, 1)
    new = _write(both.source, both.first, "new", 30)
    with pytest.raises(
        DataLossError, match=rf"Delete its copy, and have it copied again \(--copy-again {both.first}\)"
    ):
        both.run()
    _delete(both.target, both.first)
    assert both.run(copy_again=frozenset({both.first})) == 30
    assert both.run() == 0
    assert both.copied(both.first) == new
    assert both.copied(both.other) == both.values[both.other]


def test_a_topic_that_is_left_out_can_not_be_copied_again() -> None:
    with pytest.raises(ConfigError, match="topic clicks is to be copied again, but the mirror leaves it out"):
        MirrorSettings({}, {}, topics=re.compile("orders"), copy_again=frozenset({"clicks"}))
