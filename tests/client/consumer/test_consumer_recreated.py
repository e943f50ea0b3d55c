"""A topic that is deleted and created again, with more records, while a consumer reads it."""

from __future__ import annotations

import time
from typing import Any, cast
from uuid import UUID

import pytest

from spark_klog.client import Admin, Consumer, Producer
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.consumer_protocol_group import ConsumerProtocolGroup
from spark_klog.client.consumer.group import RebalanceListener
from spark_klog.client.requests import Steps
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ProtocolError, TopicRecreated
from tests.support.clients.topics import make_topic

pytestmark = pytest.mark.usefixtures("driver")

_SECONDS = 30.0


def _send(servers: str, topic: str, name: str, count: int) -> list[bytes]:
    values = [b"%s %d" % (name.encode(), number) for number in range(count)]
    with Producer({"bootstrap.servers": servers}) as producer:
        for value in values:
            producer.send(topic, value)
    return values


def _values(consumer: Consumer, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    deadline = time.monotonic() + _SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found += [record.value for record in consumer.poll(0.5)]
    return found


def _create_again(servers: str, topic: str) -> list[bytes]:
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.delete_topic(topic)
    make_topic(servers, topic, 1)
    return _send(servers, topic, "new", 50)


def test_the_new_topic_is_read_from_its_beginning(
    cluster: EmbeddedCluster, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    old = _send(servers, topic, "old", 10)
    settings = {"bootstrap.servers": servers, "auto.offset.reset": "earliest", "metadata.max.age.ms": "100"}
    with Consumer(settings) as consumer:
        consumer.assign([(topic, 0)])
        assert _values(consumer, 10) == old
        former, looks = consumer._cluster.topic_ids[topic], [0]
        new = _create_again(servers, topic)
        assert _values(consumer, 50) == new
        assert "deleted and created again" in caplog.text

        # a lagging broker may still report the former id: the consumer must not take that for a third topic
        real = Cluster.asking_metadata

        def lagging(asked: Cluster, *args: Any, **kwargs: Any) -> Steps[dict[str, Any]]:
            looks[0] += 1
            answer = yield from real(asked, *args, **kwargs)
            return {name: found | {"topic_id": former} for name, found in answer.items()}

        with monkeypatch.context() as patch:
            patch.setattr(Cluster, "asking_metadata", lagging)
            deadline = time.monotonic() + _SECONDS
            while looks[0] < 2:
                assert consumer.poll(0.1) == []
                assert time.monotonic() < deadline
        assert _values(consumer, len(_send(servers, topic, "later", 5))) == [b"later %d" % n for n in range(5)]
        assert consumer.position(topic, 0) == 55


def test_without_a_reset_it_is_an_error(cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    old = _send(servers, topic, "old", 10)
    with Consumer({"bootstrap.servers": servers, "auto.offset.reset": "none"}) as consumer:
        consumer.assign([(topic, 0, 0)])
        assert _values(consumer, 10) == old
        new = _create_again(servers, topic)
        for _ in range(2):  # the error repeats until a seek
            with pytest.raises(TopicRecreated, match="created again") as failure:
                _values(consumer, 1)
        assert isinstance(failure.value.topic_id, UUID)
        assert failure.value.topic_id != failure.value.former_id
        consumer.seek(topic, 0, 20)
        assert _values(consumer, 30) == new[20:]


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_does_not_continue_in_the_new_topic(
    cluster: EmbeddedCluster, topic: str, protocol: str, commits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The program works for a while between two polls; the member hears of the new topic before it polls again."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    old = _send(servers, topic, "old", 10)
    settings = {"bootstrap.servers": servers, "auto.offset.reset": "earliest", "group.id": f"group-{topic}"}
    settings |= {"group.protocol": protocol, "enable.auto.commit": str(commits).lower()}
    heard: list[tuple[str, Any]] = []

    class _Listener(RebalanceListener):
        def on_revoked(self, partitions: list[tuple[str, int]]) -> None:
            heard.append(("revoked", partitions))
            consumer.commit()

        def on_lost(self, partitions: list[tuple[str, int]]) -> None:
            heard.append(("lost", partitions))

    with Consumer(settings) as consumer:
        consumer.subscribe([topic], _Listener())
        assert _values(consumer, 10) == old
        new = _create_again(servers, topic)
        if protocol == "consumer":
            _wait_until_nothing_is_assigned(consumer)
        assert _values(consumer, 50) == new
        assert "deleted and created again" in caplog.text
        assert heard == ([("lost", [(topic, 0)])] if protocol == "consumer" else [])


def _wait_until_nothing_is_assigned(consumer: Consumer) -> None:
    """Until a heartbeat has brought an empty assignment: a member first gives up the partitions of the former topic."""
    group = cast("ConsumerProtocolGroup", consumer._group)
    deadline = time.monotonic() + _SECONDS
    while group._heartbeats._news.assigned != frozenset():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_commit_after_work_is_not_of_the_new_topic(cluster: EmbeddedCluster, topic: str, protocol: str) -> None:
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    old = _send(servers, topic, "old", 10)
    settings = {"bootstrap.servers": servers, "auto.offset.reset": "earliest", "enable.auto.commit": "false"}
    with Consumer({**settings, "group.id": f"group-{topic}", "group.protocol": protocol}) as consumer:
        consumer.subscribe([topic])
        assert _values(consumer, 10) == old
        new = _create_again(servers, topic)
        with pytest.raises(ProtocolError, match=r"UNKNOWN_TOPIC_ID.*it was deleted"):
            consumer.commit()
        assert consumer.committed([(topic, 0)]) == {}
        assert _values(consumer, 50) == new
        consumer.commit()
        assert consumer.committed([(topic, 0)])[topic, 0].offset == 50
