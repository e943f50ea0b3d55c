"""The admin client's calls for groups and offsets, at our broker and Kafka's, compared with confluent-kafka."""

from __future__ import annotations

import uuid

import pytest
from confluent_kafka import Consumer as ConfluentConsumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from spark_klog.client import Admin, Committed
from spark_klog.client.admin.groups import DEAD
from spark_klog.errors import ErrorCode, UnsupportedVersionError
from tests.support.clients.admins import error_code
from tests.support.clients.consumers import SECONDS, Server
from tests.support.waiting import wait_until


@pytest.fixture
def group() -> str:
    return f"g-{uuid.uuid4().hex[:10]}"


def _confluent(server: Server, group: str) -> ConfluentConsumer:
    return ConfluentConsumer(
        {
            "bootstrap.servers": server.servers,
            "group.id": group,
            "client.id": "theirs",
            "enable.auto.commit": "false",
            "session.timeout.ms": 10_000,
        }
    )


def _committed(server: Server, group: str, topic: str, count: int) -> dict[int, int]:
    """A group's committed offsets as librdkafka reads them."""
    consumer = _confluent(server, group)
    found = consumer.committed([TopicPartition(topic, number) for number in range(count)], SECONDS)
    consumer.close()
    return {one.partition: one.offset for one in found if one.offset >= 0}


def test_a_group_with_a_member(server: Server, admin: Admin, theirs: AdminClient, group: str) -> None:
    topic = server.topic(2)
    consumer = _confluent(server, group)
    consumer.subscribe([topic])
    wait_until(lambda: not consumer.poll(0.1) and len(consumer.assignment()) == 2, seconds=30)
    try:
        found = admin.describe_groups([group, f"{group}-no"]).check()
        described = found[group]
        assert (described.state, described.protocol_type, described.coordinator) == (
            "Stable",
            "consumer",
            admin.cluster.nodes[0],
        )
        (member,) = described.members
        assert (member.client_id, member.assignment) == ("theirs", {topic: [0, 1]})
        assert member.member_id == consumer.memberid()
        assert found[f"{group}-no"].state == DEAD
        listed = {one.group: one for one in admin.list_groups()}
        assert (listed[group].state, listed[group].protocol_type) == ("Stable", "consumer")
        refused = admin.alter_group_offsets(group, {(topic, 0): 3})
        assert error_code(refused[topic, 0]) == ErrorCode.UNKNOWN_MEMBER_ID
        if server.is_old:
            with pytest.raises(UnsupportedVersionError, match=r"DeleteGroups.*Kafka 1\.1"):
                admin.delete_group(group)
            with pytest.raises(UnsupportedVersionError, match=r"OffsetDelete.*Kafka 2\.4"):
                admin.delete_group_offsets(group, [(topic, 0)])
            return
        deleted = admin.delete_groups([group, f"{group}-no"])
        assert error_code(deleted[group]) == ErrorCode.NON_EMPTY_GROUP
        assert error_code(deleted[f"{group}-no"]) == ErrorCode.GROUP_ID_NOT_FOUND
        kept = admin.delete_group_offsets(group, [(topic, 0)])
        assert error_code(kept[topic, 0]) == ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
    finally:
        consumer.close()


def test_offsets_of_a_group(server: Server, admin: Admin, theirs: AdminClient, group: str) -> None:
    topic = server.topic(3)
    admin.alter_group_offsets(group, {(topic, 0): 5, (topic, 1): Committed(7, metadata="seven")}).check()
    assert _committed(server, group, topic, 3) == {0: 5, 1: 7}
    ours = admin.list_group_offsets(group)
    texts = {0: (5, ""), 1: (7, "seven")}
    assert {key[1]: (one.offset, one.metadata) for key, one in ours.items()} == texts
    assert set(admin.list_group_offsets(group, [(topic, 1)])) == {(topic, 1)}
    listed = {one.group: one for one in admin.list_groups()}
    assert listed[group].state == "Empty"
    missing = admin.alter_group_offsets(group, {(topic, 0): 6, (topic, 77): 1})
    assert missing[topic, 0] is None
    if server.is_old:  # it does not check that the partition exists
        return
    assert error_code(missing[topic, 77]) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    deleted = admin.delete_group_offsets(group, [(topic, 1), (topic, 77)])
    assert deleted[topic, 1] is None
    (future,) = theirs.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
    left = {(one.topic, one.partition): one.offset for one in future.result(SECONDS).topic_partitions or ()}
    assert left == {(topic, 0): 6}
    admin.delete_group(group)
    assert group not in {one.group for one in admin.list_groups()}
    assert admin.list_group_offsets(group) == {}


def test_arguments_that_are_refused(admin: Admin) -> None:
    with pytest.raises(TypeError, match=r"groups must be a list, not one str: write \['g'\]"):
        admin.describe_groups("g")
    with pytest.raises(TypeError, match=r"partitions: 't' must be \(topic, partition\)"):
        admin.delete_group_offsets("g", ["t"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="offsets must be a dict, not list"):
        admin.alter_group_offsets("g", [("t", 0, 1)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is -1: set 0 to"):
        admin.alter_group_offsets("g", {("t", 0): -1})
