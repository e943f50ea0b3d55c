"""The admin client's calls for topics and configs, at our broker and Kafka's, compared with confluent-kafka."""

from __future__ import annotations

import threading
import uuid

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource as TheirResource, ResourceType

from spark_klog.client import Admin, NewTopic
from spark_klog.client.admin.topics import Append, ConfigResource, CreatedTopic, Subtract
from spark_klog.errors import ErrorCode, ItemsFailed, ProtocolError, UnsupportedVersionError
from tests.support.clients.admins import error_code
from tests.support.clients.consumers import SECONDS, Server
from tests.support.waiting import wait_until


@pytest.fixture
def name() -> str:
    return f"a-{uuid.uuid4().hex[:10]}"


def _their_partitions(theirs: AdminClient, name: str) -> list[tuple[int, int, list[int], list[int]]]:
    found = theirs.list_topics(timeout=SECONDS).topics[name].partitions.values()
    return sorted((one.id, one.leader, list(one.replicas), list(one.isrs)) for one in found)


def _wait_for_partitions(theirs: AdminClient, name: str, numbers: list[int]) -> None:
    """Wait until the broker has these partitions: Kafka's controller answers a change before."""

    def there() -> bool:
        found = theirs.list_topics(timeout=SECONDS).topics.get(name)
        return found is not None and sorted(found.partitions) == numbers

    wait_until(there, f"partitions {numbers} of {name}")


def _their_config(theirs: AdminClient, kind: ResourceType, name: str) -> dict[str, str | None]:
    (future,) = theirs.describe_configs([TheirResource(kind, name)]).values()
    return {entry.name: entry.value for entry in future.result(SECONDS).values()}


def _wait_for_config(theirs: AdminClient, topic: str, wanted: dict[str, str]) -> None:
    """Wait until the broker has these settings of a topic; as `_wait_for_partitions`."""
    wait_until(
        lambda: wanted.items() <= _their_config(theirs, ResourceType.TOPIC, topic).items(), f"{wanted} of {topic}"
    )


def test_topics_from_creation_to_deletion(server: Server, admin: Admin, theirs: AdminClient, name: str) -> None:
    created = admin.create_topic(name, 3, replication_factor=1)
    _wait_for_partitions(theirs, name, [0, 1, 2])
    assert created.name == name
    if not server.is_old:
        assert (created.partitions, created.replication_factor) == (3, 1)
        assert created.topic_id == admin.describe_topic(name).topic_id
    described = admin.describe_topic(name)
    ours = [(one.partition, one.leader, list(one.replicas), list(one.in_sync)) for one in described.partitions]
    assert ours == _their_partitions(theirs, name)
    assert not described.is_internal
    assert [one.partitions for one in admin.list_topics() if one.name == name] == [3]
    wait_until(  # tests of other workers make topics at the same time
        lambda: (
            {one.name for one in admin.list_topics(include_internal=True)}
            == set(theirs.list_topics(timeout=SECONDS).topics)
        ),
        "the same topics",
        seconds=30,
    )
    admin.delete_topic(name)
    wait_until(lambda: name not in {one.name for one in admin.list_topics()}, seconds=30)
    with pytest.raises(ProtocolError, match=f"topic {name}: UNKNOWN_TOPIC_OR_PARTITION"):
        admin.describe_topic(name)
    with pytest.raises(ProtocolError, match=f"deleting topic {name}.*UNKNOWN_TOPIC_OR_PARTITION"):
        admin.delete_topic(name)
    # the failed calls have not created the topic
    wait_until(lambda: name not in theirs.list_topics(timeout=SECONDS).topics, seconds=30)


def test_each_topic_has_an_outcome_of_its_own(admin: Admin, name: str) -> None:
    admin.create_topic(name, 1, replication_factor=1)
    new, wide = f"{name}-new", f"{name}-wide"
    made = admin.create_topics(
        [NewTopic(name, 1, 1), NewTopic(new, 2, 1), NewTopic(wide, 1, 7), NewTopic("bad name", 1, 1)]
    )
    assert list(made) == [name, new, wide, "bad name"]
    assert isinstance(made[new], CreatedTopic)
    assert error_code(made[name]) == ErrorCode.TOPIC_ALREADY_EXISTS
    assert error_code(made[wide]) == ErrorCode.INVALID_REPLICATION_FACTOR
    assert error_code(made["bad name"]) == ErrorCode.INVALID_TOPIC_EXCEPTION
    with pytest.raises(ItemsFailed, match="3 of 4 items failed") as failed:
        made.check()
    assert set(failed.value.failures) == {name, wide, "bad name"}
    described = admin.describe_topics([new, wide, name])
    assert list(described) == [new, wide, name]
    assert error_code(described[wide]) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert {key: len(one.partitions) for key, one in described.successes.items()} == {new: 2, name: 1}
    deleted = admin.delete_topics([new, wide])
    assert deleted[new] is None
    assert error_code(deleted[wide]) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_validation_creates_nothing(admin: Admin, theirs: AdminClient, name: str) -> None:
    admin.create_topic(name, 2, replication_factor=1, validate_only=True)
    with pytest.raises(ProtocolError, match=r"INVALID_PARTITIONS|INVALID_REPLICATION_FACTOR"):
        admin.create_topic(name, 1, replication_factor=9, validate_only=True)
    assert name not in theirs.list_topics(timeout=SECONDS).topics


def test_assignments(server: Server, admin: Admin, theirs: AdminClient, name: str) -> None:
    node = admin.cluster.nodes[0]
    admin.create_topics([NewTopic(name, assignments=[[node], [node]])]).check()
    _wait_for_partitions(theirs, name, [0, 1])
    assert _their_partitions(theirs, name) == [(0, node, [node], [node]), (1, node, [node], [node])]


def test_the_brokers_defaults(server: Server, admin: Admin, theirs: AdminClient, name: str) -> None:
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=f"CreateTopics .*Kafka 2.4 .*{name}"):
            admin.create_topic(name)
        return
    admin.create_topic(name)
    _wait_for_partitions(theirs, name, [0])


def test_more_partitions(server: Server, admin: Admin, theirs: AdminClient, name: str) -> None:
    admin.create_topic(name, 1, replication_factor=1)
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=r"CreatePartitions.*Kafka 1.0"):
            admin.create_partitions({name: 4})
        return
    admin.create_partitions({name: 9}, validate_only=True).check()
    grown = admin.create_partitions({name: 4, f"{name}-no": 2})
    assert grown[name] is None
    assert error_code(grown[f"{name}-no"]) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    _wait_for_partitions(theirs, name, [0, 1, 2, 3])
    with pytest.raises(ProtocolError, match="INVALID_PARTITIONS"):
        admin.create_partitions({name: 2}).check()


def test_settings_of_topics(server: Server, admin: Admin, theirs: AdminClient, name: str) -> None:
    admin.create_topic(name, 1, replication_factor=1, configs={"retention.ms": "86400000"})
    topic = ConfigResource("topic", name)
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=r"DescribeConfigs.*Kafka 0.11"):
            admin.describe_configs([topic])
        with pytest.raises(UnsupportedVersionError, match=r"IncrementalAlterConfigs.*Kafka 2.3"):
            admin.alter_configs({topic: {"retention.ms": "1"}})
        return
    _wait_for_config(theirs, name, {"retention.ms": "86400000"})
    found = admin.describe_configs([topic]).check()[topic]
    assert {entry.name: entry.value for entry in found.values()} == _their_config(theirs, ResourceType.TOPIC, name)
    assert (found["retention.ms"].value, found["retention.ms"].source) == ("86400000", "topic")
    assert not found["retention.ms"].is_default
    assert found["segment.ms"].is_default
    changes = {topic: {"retention.ms": None, "segment.ms": "777", "cleanup.policy": Append("compact")}}
    admin.alter_configs(changes, validate_only=True).check()
    assert admin.describe_configs([topic]).check()[topic] == found
    admin.alter_configs(changes).check()
    _wait_for_config(theirs, name, {"segment.ms": "777", "cleanup.policy": "delete,compact"})
    assert _their_config(theirs, ResourceType.TOPIC, name)["retention.ms"] != "86400000"
    admin.alter_configs({("topic", name): {"cleanup.policy": Subtract("delete")}}).check()
    _wait_for_config(theirs, name, {"cleanup.policy": "compact"})
    refused = admin.alter_configs({topic: {"segment.ms": "soon"}, ("topic", f"{name}-no"): {"segment.ms": "777"}})
    assert error_code(refused[topic]) == ErrorCode.INVALID_CONFIG
    assert error_code(refused[ConfigResource("topic", f"{name}-no")]) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_settings_of_brokers(server: Server, admin: Admin, theirs: AdminClient) -> None:
    if server.is_old:
        return
    node = str(admin.cluster.nodes[0])
    broker, other = ConfigResource("broker", node), ConfigResource("broker", "4711")
    found = admin.describe_configs([broker, other])
    assert error_code(found[other]) == ErrorCode.BROKER_NOT_AVAILABLE
    ours = found.successes[broker]
    expected = _their_config(theirs, ResourceType.BROKER, node)
    assert {entry.name: entry.value for entry in ours.values()} == expected
    assert all(entry.value is None for entry in ours.values() if entry.is_sensitive)


def test_calls_of_several_threads(admin: Admin, name: str) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            own = f"{name}-{number}"
            admin.create_topic(own, 2, replication_factor=1)
            assert len(admin.describe_topic(own).partitions) == 2
            admin.delete_topic(own)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
