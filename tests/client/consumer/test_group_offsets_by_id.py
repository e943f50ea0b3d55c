"""Offsets of groups by topic ids (OffsetCommit and OffsetFetch 10), as long as the client knows the right ids."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from spark_klog.client import Admin, Consumer
from spark_klog.client.cluster import Cluster
from spark_klog.client.net import connection
from spark_klog.client.offsets import Committed, GroupOffsets
from spark_klog.errors import ProtocolError
from spark_klog.protocol.apis import OFFSET_COMMIT, OFFSET_FETCH
from tests.support.clients.consumers import running
from tests.support.clients.topics import make_topic
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.usefixtures("driver")


@pytest.fixture(scope="module", params=["klog", pytest.param(NEWEST, marks=pytest.mark.peer)])
def servers(request: pytest.FixtureRequest, module_server_dir: Any, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with running(request.param, module_server_dir, shared_kafkas) as server:
        yield server.servers


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The names and versions of the requests about offsets, as they are sent."""
    found: list[tuple[str, int]] = []
    encode = connection.encode_request

    def noted(api: Any, version: int, *rest: Any) -> Any:
        if api in (OFFSET_COMMIT, OFFSET_FETCH):
            found.append((api.name, version))
        return encode(api, version, *rest)

    monkeypatch.setattr(connection, "encode_request", noted)
    return found


def test_topics_are_named_by_their_ids_if_these_are_known(
    servers: str, topic: str, sent: list[tuple[str, int]]
) -> None:
    make_topic(servers, topic, 2)
    wanted = {(topic, 0): Committed(3, 1, "m"), (topic, 1): Committed(4)}
    with Cluster.connect({"bootstrap.servers": servers}) as cluster:
        offsets = GroupOffsets(cluster, f"g-{topic}")
        offsets.commit(wanted)
        assert offsets.committed(list(wanted)) == wanted
        assert set(sent) == {("OffsetCommit", 9), ("OffsetFetch", 9)}  # again if the coordinator still loads
        cluster.metadata([topic])
        assert cluster.topic_ids.keys() == {topic}
        sent.clear()
        offsets.commit(wanted, cluster.topic_ids)
        assert offsets.committed(list(wanted)) == wanted
        assert offsets.fetch() == {(topic, 0): 3, (topic, 1): 4}  # the answer names topics, of which any may be unknown
        assert list(dict.fromkeys(sent)) == [("OffsetCommit", 10), ("OffsetFetch", 10), ("OffsetFetch", 9)]


def test_a_topic_that_was_created_again(servers: str, topic: str, sent: list[tuple[str, int]]) -> None:
    """The offset belongs to the former topic: the new one does not get it. The next commit is of the new one."""
    make_topic(servers, topic, 1)
    with Cluster.connect({"bootstrap.servers": servers}) as cluster, Admin({"bootstrap.servers": servers}) as admin:
        offsets = GroupOffsets(cluster, f"g-{topic}")
        cluster.metadata([topic])
        first = cluster.topic_ids[topic]
        admin.delete_topic(topic)
        make_topic(servers, topic, 1)
        offsets.commit({(topic, 0): 5}, {topic: first}, skips_deleted=True)
        assert cluster.topic_ids[topic] != first
        assert offsets.fetch([(topic, 0)]) == {}
        with pytest.raises(ProtocolError, match=r"UNKNOWN_TOPIC_ID.*it was deleted"):
            offsets.commit({(topic, 0): 5}, {topic: first})
        assert offsets.fetch([(topic, 0)]) == {}
        offsets.commit({(topic, 0): 5}, cluster.topic_ids)
        assert {version for name, version in sent if name == "OffsetCommit"} == {10}
        assert offsets.fetch([(topic, 0)]) == {(topic, 0): 5}
        cluster.topic_ids[topic] = uuid.uuid4()
        sent.clear()
        assert offsets.fetch([(topic, 0)]) == {(topic, 0): 5}
        assert sent == [("OffsetFetch", 10), ("OffsetFetch", 9)]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_members_commit_so(servers: str, topic: str, sent: list[tuple[str, int]], protocol: str) -> None:
    make_topic(servers, topic, 1)
    done: list[object] = []
    settings = {"group.id": f"g-{topic}", "group.protocol": protocol, "enable.auto.commit": "false"}
    with Consumer({"bootstrap.servers": servers, **settings}) as consumer:
        consumer.subscribe([topic])
        while not consumer.assignment():
            consumer.poll(0.1)
        consumer.commit({(topic, 0): 1})
        consumer.commit_async({(topic, 0): 2}, lambda offsets, error: done.append(error))
        while not done:
            consumer.poll(0.1)
        assert consumer.committed([(topic, 0)])[topic, 0].offset == 2
    assert done == [None]
    assert {("OffsetCommit", 10), ("OffsetFetch", 10)} <= set(sent)
    assert {version for _, version in sent} == {10}
