"""A mirror that gets another prefix, and one whose source hides a topic for a moment."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest

from spark_klog.client import Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.mirror.mirror import Mirror
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.mirror.topics import MirroredTopics
from tests.support.clients.mirrors import read_topic
from tests.support.clients.topics import make_topic


def _fill(servers: str, count: int) -> str:
    topic = f"t-{uuid.uuid4().hex[:8]}"
    make_topic(servers, topic, 1)
    with Producer({"bootstrap.servers": servers}) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number)
    return topic


def _settings(source: EmbeddedCluster, target: EmbeddedCluster, topic: str, **more: Any) -> MirrorSettings:
    first, second = ({"bootstrap.servers": side.bootstrap_servers} for side in (source, target))
    return MirrorSettings(first, second, topics=re.compile(topic), **more)


def test_another_prefix_begins_anew(cluster: EmbeddedCluster, target: EmbeddedCluster) -> None:
    topic = _fill(cluster.bootstrap_servers, 20)
    for prefix in ("", "a.", "b."):
        Mirror(_settings(cluster, target, topic, prefix=prefix)).run(until_end=True)
    whole = read_topic(cluster.bootstrap_servers, topic, 1)
    for prefix in ("", "a.", "b."):
        assert read_topic(target.bootstrap_servers, prefix + topic, 1) == whole


def test_a_topic_that_is_hidden_for_a_moment(
    cluster: EmbeddedCluster, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction contains what was copied before, so it must contain the progress too."""
    topic = _fill(cluster.bootstrap_servers, 20)
    settings = _settings(
        cluster, target, topic, name=topic, exactly_once=True, commit_seconds=59.0, refresh_seconds=0.0
    )
    mirror = Mirror(settings)
    real = MirroredTopics.refresh

    def refresh(topics: MirroredTopics, patience: float = 0.0) -> list[tuple[str, int]]:
        if not mirror.totals.records:
            return real(topics, patience)
        mirror.stop()
        return []

    with monkeypatch.context() as patch:
        patch.setattr(MirroredTopics, "refresh", refresh)
        assert mirror.run().records == 20
    assert Mirror(settings).run(until_end=True).records == 0
    whole = read_topic(cluster.bootstrap_servers, topic, 1)
    assert read_topic(target.bootstrap_servers, topic, 1) == whole
