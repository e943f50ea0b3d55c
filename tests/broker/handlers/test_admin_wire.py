"""Admin APIs on a cluster of one broker: the same expectations for Apache Kafka 3.9.1 with ZooKeeper and for us.

Requests and responses are coded by kafka-python's own messages. The checks say where the two brokers differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient
from confluent_kafka.cimpl import Consumer, NewTopic

from spark_klog.protocol import apis
from tests.support.brokers.kafka_python_wire import KafkaPythonWire, Message
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import Kafka

TOPIC, MISSING = "there", "not-there"
ANY, LITERAL, READ, ALLOW = 1, 3, 3, 3
TOPICS, BROKERS, LOGGERS, CLIENT_METRICS, GROUPS = 2, 4, 8, 16, 32
NONE, UNKNOWN_PARTITION, UNSUPPORTED_MECHANISM = 0, 3, 33
UNSUPPORTED_VERSION, INVALID_REPLICAS, INVALID_REQUEST, SECURITY_DISABLED, LOG_DIR_NOT_FOUND = 35, 39, 42, 54, 57
ELECTION_NOT_NEEDED, NO_REASSIGNMENT, RESOURCE_NOT_FOUND, DUPLICATE_RESOURCE = 84, 85, 91, 92
_SECONDS = 30


class Peer(NamedTuple):
    """A broker that is alone, with the topic TOPIC of one partition."""

    wire: KafkaPythonWire
    servers: str
    broker_id: int
    log_dir: Path
    is_kafka: bool

    def ask(self, name: str, version: int, **message: Any) -> Message:
        return self.wire.ask(name, version, message)


@pytest.fixture(
    scope="module", params=["ours", pytest.param("kafka", marks=[pytest.mark.peer, pytest.mark.test_all("version")])]
)
def peer(request: pytest.FixtureRequest, module_server_dir: Path) -> Iterator[Peer]:
    is_kafka = request.param == "kafka"
    broker: Kafka | KlogBroker = (
        Kafka("3.9.1", module_server_dir / "kafka")
        if is_kafka
        else KlogBroker(module_server_dir / "ours", "--set", "group.initial.rebalance.delay.ms=0")
    )
    with broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result(_SECONDS)
        log_dir = (broker.log_dir if isinstance(broker, Kafka) else broker.data_dir).absolute()
        broker_id = broker.broker_id if isinstance(broker, Kafka) else 0
        with closing(KafkaPythonWire(broker.bootstrap_servers)) as wire:
            yield Peer(wire, broker.bootstrap_servers, broker_id, log_dir, is_kafka)


def _codes(results: list[Message]) -> list[int]:
    return [entry["error_code"] for entry in results]


def _describe_acls(peer: Peer, version: int) -> None:
    answer = peer.ask(
        "DescribeAcls",
        version,
        resource_type_filter=ANY,
        resource_name_filter=None,
        pattern_type_filter=ANY,
        principal_filter=None,
        host_filter=None,
        operation=ANY,
        permission_type=ANY,
    )
    assert (answer["error_code"], answer["resources"]) == (SECURITY_DISABLED, [])


def _create_acls(peer: Peer, version: int) -> None:
    creation = {
        "resource_type": TOPICS,
        "resource_name": TOPIC,
        "resource_pattern_type": LITERAL,
        "principal": "User:a",
        "host": "*",
        "operation": READ,
        "permission_type": ALLOW,
    }
    answer = peer.ask("CreateAcls", version, creations=[creation, creation])
    assert _codes(answer["results"]) == [SECURITY_DISABLED] * 2


def _delete_acls(peer: Peer, version: int) -> None:
    wanted = {
        "resource_type_filter": ANY,
        "resource_name_filter": None,
        "pattern_type_filter": ANY,
        "principal_filter": None,
        "host_filter": None,
        "operation": ANY,
        "permission_type": ANY,
    }
    (result,) = peer.ask("DeleteAcls", version, filters=[wanted])["filter_results"]
    assert (result["error_code"], result["matching_acls"]) == (SECURITY_DISABLED, [])


def _alter_replica_log_dirs(peer: Peer, version: int) -> None:
    def move(path: Path, *topics: tuple[str, list[int]]) -> dict[tuple[str, int], int]:
        dirs = [{"path": str(path), "topics": [{"name": name, "partitions": numbers} for name, numbers in topics]}]
        return {
            (topic["topic_name"], entry["partition_index"]): entry["error_code"]
            for topic in peer.ask("AlterReplicaLogDirs", version, dirs=dirs)["results"]
            for entry in topic["partitions"]
        }

    assert move(peer.log_dir, (TOPIC, [0, 9]), (MISSING, [0])) == {
        (TOPIC, 0): NONE,
        (TOPIC, 9): UNKNOWN_PARTITION,
        (MISSING, 0): UNKNOWN_PARTITION,
    }
    assert move(peer.log_dir / "elsewhere", (TOPIC, [0])) == {(TOPIC, 0): LOG_DIR_NOT_FOUND}


def _elect_leaders(peer: Peer, version: int) -> None:
    def elect(kind: int, topics: Any) -> dict[tuple[str, int], int]:
        answer = peer.ask("ElectLeaders", version, election_type=kind, topic_partitions=topics, timeout_ms=5000)
        assert answer.get("error_code", NONE) == NONE
        return {
            (topic["topic"], entry["partition_id"]): entry["error_code"]
            for topic in answer["replica_election_results"]
            for entry in topic["partition_result"]
        }

    for kind in (0, 1) if version else (0,):
        topics = [{"topic": TOPIC, "partitions": [0, 9]}, {"topic": MISSING, "partitions": [0]}]
        assert elect(kind, topics) == {
            (TOPIC, 0): ELECTION_NOT_NEEDED,
            (TOPIC, 9): UNKNOWN_PARTITION,
            (MISSING, 0): UNKNOWN_PARTITION,
        }
        assert elect(kind, None) == {}


def _alter_partition_reassignments(peer: Peer, version: int) -> None:
    def reassign(*wanted: tuple[str, int, list[int] | None]) -> list[int]:
        topics = [
            {"name": name, "partitions": [{"partition_index": number, "replicas": replicas}]}
            for name, number, replicas in wanted
        ]
        answer = peer.ask("AlterPartitionReassignments", version, timeout_ms=5000, topics=topics)
        assert (answer["error_code"], answer["error_message"] or "") == (NONE, "")
        return [topic["partitions"][0]["error_code"] for topic in answer["responses"]]

    here, nowhere = peer.broker_id, peer.broker_id + 7
    assert reassign((TOPIC, 0, [here])) == [NONE]
    assert reassign((TOPIC, 0, [nowhere])) == [INVALID_REPLICAS]
    assert reassign((TOPIC, 0, [here, nowhere])) == [INVALID_REPLICAS]
    assert reassign((TOPIC, 0, [here, here])) == [INVALID_REPLICAS]
    assert reassign((TOPIC, 0, [])) == [INVALID_REPLICAS]
    assert reassign((TOPIC, 0, None)) == [NO_REASSIGNMENT]
    assert reassign((TOPIC, 9, [here])) == [UNKNOWN_PARTITION]
    assert reassign((MISSING, 0, [here])) == [UNKNOWN_PARTITION]


def _list_partition_reassignments(peer: Peer, version: int) -> None:
    wanted = [{"name": TOPIC, "partition_indexes": [0]}, {"name": MISSING, "partition_indexes": [0]}]
    for topics in (None, wanted):
        answer = peer.ask("ListPartitionReassignments", version, timeout_ms=5000, topics=topics)
        assert (answer["error_code"], answer["error_message"] or "", answer["topics"]) == (NONE, "", [])


def _describe_client_quotas(peer: Peer, version: int) -> None:
    def component(kind: str) -> Message:
        return {"entity_type": kind, "match_type": 2, "match": None}

    for kinds, code in (
        ([], NONE),
        (["user", "client-id"], NONE),
        (["ip"], NONE),
        (["user", "user"], INVALID_REQUEST),
        (["user", "ip"], INVALID_REQUEST),
        ([""], INVALID_REQUEST),
        (["planet"], UNSUPPORTED_VERSION),
    ):
        components = [component(kind) for kind in kinds]
        answer = peer.ask("DescribeClientQuotas", version, components=components, strict=False)
        assert (answer["error_code"], answer["entries"] or None) == (code, None), kinds


def _alter_client_quotas(peer: Peer, version: int) -> None:
    def alter(key: str, remove: bool, *entity: tuple[str, str | None]) -> int:
        names = [{"entity_type": kind, "entity_name": name} for kind, name in entity]
        entries = [{"entity": names, "ops": [{"key": key, "value": 1e6, "remove": remove}]}]
        (found,) = peer.ask("AlterClientQuotas", version, entries=entries, validate_only=False)["entries"]
        assert [(item["entity_type"], item["entity_name"]) for item in found["entity"]] == list(entity)
        code: int = found["error_code"]
        return code

    assert alter("producer_byte_rate", True, ("user", "a")) == NONE  # nothing to remove
    assert alter("no_such_rate", False, ("user", "a")) == INVALID_REQUEST
    if not peer.is_kafka:  # Kafka stores the quota
        assert alter("producer_byte_rate", False, ("user", "a"), ("client-id", None)) == INVALID_REQUEST


def _describe_user_scram_credentials(peer: Peer, version: int) -> None:
    def describe(*names: str) -> list[tuple[str, int]]:
        users = [{"name": name} for name in names] or None
        answer = peer.ask("DescribeUserScramCredentials", version, users=users)
        assert answer["error_code"] == NONE
        return [(entry["user"], entry["error_code"]) for entry in answer["results"]]

    assert describe() == []
    assert describe("a", "b", "b", "") == [
        ("a", RESOURCE_NOT_FOUND),
        ("b", DUPLICATE_RESOURCE),
        ("", RESOURCE_NOT_FOUND),
    ]


def _alter_user_scram_credentials(peer: Peer, version: int) -> None:
    deletions = [{"name": "a", "mechanism": 1}, {"name": "b", "mechanism": 7}]
    answer = peer.ask("AlterUserScramCredentials", version, deletions=deletions, upsertions=[])
    found = {entry["user"]: entry["error_code"] for entry in answer["results"]}
    if peer.is_kafka:
        assert found == {"a": RESOURCE_NOT_FOUND, "b": UNSUPPORTED_MECHANISM}
    else:  # nobody is an admin here, see test_admin_users.py
        assert found == {"a": SECURITY_DISABLED, "b": SECURITY_DISABLED}


def _list_config_resources(peer: Peer, version: int) -> None:
    def listed(*kinds: int) -> list[tuple[int, str]]:
        answer = peer.ask("ListConfigResources", version, resource_types=list(kinds))
        assert answer["error_code"] == NONE
        return [
            (entry.get("resource_type", CLIENT_METRICS), entry["resource_name"]) for entry in answer["config_resources"]
        ]

    if version == 0:
        assert listed() == []
        return
    of_broker = [(BROKERS, str(peer.broker_id)), (LOGGERS, str(peer.broker_id))]
    assert {(TOPICS, TOPIC), *of_broker} <= set(listed())
    assert listed(BROKERS, LOGGERS, BROKERS) == of_broker
    assert listed(CLIENT_METRICS, GROUPS) == []
    assert peer.ask("ListConfigResources", version, resource_types=[3])["error_code"] == UNSUPPORTED_VERSION


CHECKS: dict[str, Callable[[Peer, int], None]] = {
    "DescribeAcls": _describe_acls,
    "CreateAcls": _create_acls,
    "DeleteAcls": _delete_acls,
    "AlterReplicaLogDirs": _alter_replica_log_dirs,
    "ElectLeaders": _elect_leaders,
    "AlterPartitionReassignments": _alter_partition_reassignments,
    "ListPartitionReassignments": _list_partition_reassignments,
    "DescribeClientQuotas": _describe_client_quotas,
    "AlterClientQuotas": _alter_client_quotas,
    "DescribeUserScramCredentials": _describe_user_scram_credentials,
    "AlterUserScramCredentials": _alter_user_scram_credentials,
    "ListConfigResources": _list_config_resources,
}
CASES = [
    (api.name, version)
    for api in apis.BY_KEY.values()
    if api.name in CHECKS
    for version in range(api.versions.first, api.versions.last + 1)
]


@pytest.mark.parametrize(("name", "version"), CASES)
def test_asked_by_kafka_python(peer: Peer, name: str, version: int) -> None:
    served = {entry["api_key"]: entry for entry in peer.ask("ApiVersions", 0)["api_keys"]}
    (key,) = (api.key for api in apis.BY_KEY.values() if api.name == name)
    if peer.is_kafka and (key not in served or not version <= served[key]["max_version"]):
        pytest.skip("Kafka 3.9.1 does not serve it")
    assert served[key]["min_version"] <= version <= served[key]["max_version"]
    CHECKS[name](peer, version)


#: Types of settings by Kafka's numbers.
BOOLEAN, STRING, INT, LONG, DOUBLE, LIST = 1, 2, 3, 5, 6, 7
OF_TOPIC, OF_BROKER, DEFAULT, OF_LOGGER = 1, 4, 5, 6
TYPES = {
    "cleanup.policy": LIST,
    "compression.type": STRING,
    "delete.retention.ms": LONG,
    "index.interval.bytes": INT,
    "leader.replication.throttled.replicas": LIST,
    "message.downconversion.enable": BOOLEAN,
    "message.timestamp.type": STRING,
    "min.cleanable.dirty.ratio": DOUBLE,
    "min.insync.replicas": INT,
    "preallocate": BOOLEAN,
    "retention.ms": LONG,
    "segment.bytes": INT,
    "segment.jitter.ms": LONG,
    "unclean.leader.election.enable": BOOLEAN,
}
TYPES_AT_BROKER = {
    "auto.create.topics.enable": BOOLEAN,
    "log.cleanup.policy": LIST,
    "log.dirs": STRING,
    "log.retention.ms": LONG,
    "log.segment.bytes": INT,
    "num.partitions": INT,
    "sasl.enabled.mechanisms": LIST,
    "zookeeper.session.timeout.ms": INT,
}


@pytest.mark.parametrize("version", range(1, 5))
def test_settings_are_described_alike(peer: Peer, version: int) -> None:
    def described(kind: int, name: str, is_full: bool = True) -> dict[str, Message]:
        resource = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
        full = {"include_synonyms": is_full, "include_documentation": is_full}
        (result,) = peer.ask("DescribeConfigs", version, resources=[resource], **full)["results"]
        assert result["error_code"] == NONE, result
        return {entry["name"]: entry for entry in result["configs"]}

    def synonyms(entry: Message) -> list[tuple[str, str, int]]:
        return [(item["name"], item["value"], item["source"]) for item in entry["synonyms"]]

    change = {"name": "segment.bytes", "config_operation": 0, "value": "5000000"}
    resource = {"resource_type": TOPICS, "resource_name": TOPIC, "configs": [change]}
    (changed,) = peer.ask("IncrementalAlterConfigs", 1, resources=[resource], validate_only=False)["responses"]
    assert changed["error_code"] == NONE
    of_topic, of_broker = described(TOPICS, TOPIC), described(BROKERS, str(peer.broker_id))
    assert synonyms(of_topic["segment.bytes"]) == [
        ("segment.bytes", "5000000", OF_TOPIC),
        ("log.segment.bytes", "1073741824", DEFAULT),
    ]
    assert synonyms(of_topic["retention.ms"])[0] == ("log.retention.ms", "-1", OF_BROKER)
    assert synonyms(of_topic["leader.replication.throttled.replicas"]) == []
    assert synonyms(of_broker["num.partitions"])[-1] == ("num.partitions", "1", DEFAULT)
    secret = of_broker["ssl.key.password"]
    assert (secret["value"], secret["is_sensitive"]) == (None, True)
    assert not any(entry["synonyms"] for entry in described(TOPICS, TOPIC, is_full=False).values())
    loggers = described(LOGGERS, str(peer.broker_id))
    assert loggers["root"]["value"] in ("INFO", "WARN")
    assert {entry["config_source"] for entry in loggers.values()} == {OF_LOGGER}
    if version >= 3:
        assert {name: of_topic[name]["config_type"] for name in TYPES} == TYPES
        assert {name: of_broker[name]["config_type"] for name in TYPES_AT_BROKER} == TYPES_AT_BROKER
        assert all(entry["documentation"] for entry in (of_topic | of_broker).values() if entry["value"])
        assert not any(entry["documentation"] for entry in described(TOPICS, TOPIC, is_full=False).values())


def test_the_quorum_is_not_told(peer: Peer) -> None:
    """With ZooKeeper Kafka does not advertise DescribeQuorum (55), and neither do we."""
    assert 55 not in {entry["api_key"] for entry in peer.ask("ApiVersions", 0)["api_keys"]}


def test_what_the_client_may_do(peer: Peer) -> None:
    """Without rules everybody may do everything; the sets of operations are Kafka 3.9.1's."""
    admin = AdminClient({"bootstrap.servers": peer.servers})
    of_topics = {"READ", "WRITE", "CREATE", "DELETE", "ALTER", "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS"}
    of_groups = {"READ", "DELETE", "DESCRIBE"}
    of_cluster = {
        "CREATE",
        "ALTER",
        "DESCRIBE",
        "CLUSTER_ACTION",
        "DESCRIBE_CONFIGS",
        "ALTER_CONFIGS",
        "IDEMPOTENT_WRITE",
    }
    described = admin.describe_topics(TopicCollection([TOPIC]), include_authorized_operations=True)[TOPIC]
    assert _names(described.result(_SECONDS).authorized_operations) == of_topics
    cluster = admin.describe_cluster(include_authorized_operations=True).result(_SECONDS)
    assert _names(cluster.authorized_operations) == of_cluster
    settings = {"bootstrap.servers": peer.servers, "group.id": "g", "auto.offset.reset": "earliest"}
    with closing(Consumer(settings)) as member:
        member.subscribe([TOPIC])
        group = _until_stable(admin, member)
    assert _names(group.authorized_operations) == of_groups
    plain = admin.describe_topics(TopicCollection([TOPIC]))[TOPIC].result(_SECONDS)
    assert not plain.authorized_operations
    for version in (8, 12):
        asked = {"include_topic_authorized_operations": False, "include_cluster_authorized_operations": False}
        topics = [{"name": TOPIC, "topic_id": None}]
        answer = peer.ask("Metadata", version, topics=topics, allow_auto_topic_creation=False, **asked)
        assert _unasked(answer["topics"][0])
        assert version > 10 or _unasked(answer)


def _unasked(entry: Message) -> bool:
    """Whether the field has its default, the smallest int32: kafka-python gives a number, a set of bits, or None."""
    (found,) = (value for name, value in entry.items() if name.endswith("authorized_operations"))
    return found in (None, {31}, -(1 << 31))


def _until_stable(admin: AdminClient, member: Consumer) -> Any:
    for _ in range(300):
        member.poll(0.1)
        asked = admin.describe_consumer_groups(["g"], include_authorized_operations=True)["g"]
        try:
            group = asked.result(_SECONDS)
        except KafkaException as error:  # Kafka has just created __consumer_offsets
            if error.args[0].code() not in (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.NOT_COORDINATOR):
                raise
            continue
        if group.state == ConsumerGroupState.STABLE:
            return group
    raise AssertionError("the group is not stable")


def _names(operations: list[AclOperation]) -> set[str]:
    return {operation.name for operation in operations}
