"""Which topics a mirror leaves out: copies that would come back, and internal ones that are not named."""

from __future__ import annotations

import re
import uuid

import pytest

from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.mirror.mirror import Mirror
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.mirror.topics import Origins
from tests.support.clients.topics import make_topic


def _topics(servers: str, name: str) -> set[str]:
    with Admin({"bootstrap.servers": servers}) as admin:
        return {one.name for one in admin.list_topics() if one.name.endswith(name)}


def _mirror(source: EmbeddedCluster, target: EmbeddedCluster, prefix: str, name: str, topics: str) -> None:
    sides = {"bootstrap.servers": source.bootstrap_servers}, {"bootstrap.servers": target.bootstrap_servers}
    Mirror(MirrorSettings(*sides, name=name, topics=re.compile(topics), prefix=prefix)).run(until_end=True)


def _make(cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 1)
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        producer.send(topic, b"value")


def test_copies_within_a_cluster_are_not_copied(cluster: EmbeddedCluster) -> None:
    topic = f"clicks{uuid.uuid4().hex[:8]}"
    _make(cluster, topic)
    for _ in range(2):
        for prefix in ("copy.", "backup."):
            _mirror(cluster, cluster, prefix, f"{prefix}{topic}", f".*{topic}")
    assert _topics(cluster.bootstrap_servers, topic) == {topic, f"copy.{topic}", f"backup.{topic}"}


def test_a_cycle_of_clusters(
    cluster: EmbeddedCluster, target: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    topic = f"clicks{uuid.uuid4().hex[:8]}"
    with EmbeddedCluster(data_dir=tmp_path_factory.mktemp("third")) as third:
        clusters = [cluster, target, third]
        for one in clusters:
            _make(one, topic)
        for _ in range(2):
            for number, one in enumerate(clusters):
                to = clusters[(number + 1) % len(clusters)]
                _mirror(one, to, f"{number}.", f"{number}.{topic}", f".*{topic}")
        found = [_topics(one.bootstrap_servers, topic) for one in clusters]
    count = len(clusters)
    for number in range(count):
        before = [(number - step) % count for step in range(1, count)]
        chain = ["".join(f"{one}." for one in before[:length]) for length in range(count)]
        assert found[number] == {prefix + topic for prefix in chain}


def test_a_cycle_that_is_closed_while_a_mirror_runs(
    cluster: EmbeddedCluster, target: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The mirror from the second cluster has read the notes of the one from the first when that copies more."""
    name = uuid.uuid4().hex[:8]
    topic, first, last = f"clicks{name}", f"first{name}.", f"last{name}."
    with EmbeddedCluster(data_dir=tmp_path_factory.mktemp("third")) as third:
        for one in (cluster, third):
            _make(one, topic)
        _mirror(cluster, target, first, f"first-{name}", f".*{topic}")
        sides = {"bootstrap.servers": target.bootstrap_servers}, {"bootstrap.servers": third.bootstrap_servers}
        with Admin(sides[0]) as source, Admin(sides[1]) as goal:
            origins = Origins(MirrorSettings(*sides, topics=re.compile(".*"), prefix="between."), source, goal)
            origins.look(one.name for one in source.list_topics())
            assert not origins.is_from_target(first + topic)
            _mirror(third, cluster, last, f"last-{name}", f".*{topic}")
            _mirror(cluster, target, first, f"first-{name}", f".*{topic}")
            origins.look(one.name for one in source.list_topics())
            assert origins.is_from_target(first + last + topic)
            origins.close()


def test_topics_that_are_named(
    cluster: EmbeddedCluster, target: EmbeddedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    end = uuid.uuid4().hex[:8]
    named = [f"clicks{end}", f"mm2-{end}", f"orders.{end}-internal"]
    others = [f"mm2-other-{end}", f"other-{end}-internal"]
    for topic in (*named, *others):
        _make(cluster, topic)
    pattern = f"clicks{end}|mm2-{end}|orders\\.{end}-internal|.*other-{end}.*"
    _mirror(cluster, target, "", f"named-{end}", pattern)
    with Admin({"bootstrap.servers": target.bootstrap_servers}) as admin:
        there = {one.name for one in admin.list_topics() if end in one.name and not one.name.startswith("klog-")}
    assert there == set(named)
    told = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert told == [f"left out as internal, unless --topics names them: {', '.join(others)}"]
