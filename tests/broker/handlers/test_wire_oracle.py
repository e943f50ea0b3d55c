"""Every API and version that the broker advertises, requested and decoded by kafka-python's own messages."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.protocol import apis
from tests.support.brokers.kafka_python_wire import KafkaPythonWire, Message, make_records, read_records

NOW = 1_700_000_000_000
NO_ID = uuid.UUID(int=0)
TOPIC, BROKER = 2, 4
#: Tested elsewhere: those that need a listener of their own (test_security_mechanisms.py), and test_admin_wire.py's.
ELSEWHERE = {
    "SaslHandshake",
    "SaslAuthenticate",
    "DescribeAcls",
    "CreateAcls",
    "DeleteAcls",
    "AlterReplicaLogDirs",
    "ElectLeaders",
    "AlterPartitionReassignments",
    "ListPartitionReassignments",
    "DescribeClientQuotas",
    "AlterClientQuotas",
    "DescribeUserScramCredentials",
    "AlterUserScramCredentials",
    "ListConfigResources",
    # kafka-python does not know these two: see test_consumer_groups.py
    "ConsumerGroupHeartbeat",
    "ConsumerGroupDescribe",
}
NONE, OFFSET_OUT_OF_RANGE, UNKNOWN_PARTITION, INVALID_PARTITIONS, INVALID_CONFIG = 0, 1, 3, 37, 40
INVALID_REPLICATION_FACTOR, UNKNOWN_EPOCH, UNKNOWN_TOPIC_ID = 38, 75, 100
ILLEGAL_GENERATION, INVALID_GROUP_ID, UNKNOWN_MEMBER, NON_EMPTY_GROUP, GROUP_ID_NOT_FOUND = 22, 24, 25, 68, 69
MEMBER_ID_REQUIRED = 79
#: Versions of Kafka 4.4 that kafka-python does not know: test_misrouted_connections.py, test_offsets_by_topic_id.py.
UNKNOWN_VERSIONS = {("ApiVersions", 5), ("TxnOffsetCommit", 6), ("DeleteGroups", 3)}
CASES = [
    (api.name, version)
    for api in apis.BY_KEY.values()
    if api.name not in ELSEWHERE
    for version in range(api.versions.first, api.versions.last + 1)
    if (api.name, version) not in UNKNOWN_VERSIONS
]


class Asked:
    """A connection, and a topic of the test's own with one partition."""

    def __init__(self, wire: KafkaPythonWire, servers: str, topic: str) -> None:
        self.ask = wire.ask
        self.host, _, port = servers.rpartition(":")
        self.port = int(port)
        self.topic = topic
        entry = {"name": topic, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
        (made,) = self.ask("CreateTopics", 7, {"topics": [entry], "timeout_ms": 5000})["topics"]
        assert made["error_code"] == NONE
        self.topic_id: uuid.UUID = made["topic_id"]

    def produce(self, values: list[bytes]) -> None:
        data = [{"index": 0, "records": make_records(2, values, NOW)}]
        request = {"acks": 1, "timeout_ms": 5000, "topic_data": [{"name": self.topic, "partition_data": data}]}
        (answer,) = self.ask("Produce", 8, request)["responses"]
        assert answer["partition_responses"][0]["error_code"] == NONE

    def settings(self) -> dict[str, str]:
        resource = {"resource_type": TOPIC, "resource_name": self.topic, "configuration_keys": None}
        (result,) = self.ask("DescribeConfigs", 2, {"resources": [resource]})["results"]
        return {entry["name"]: entry["value"] for entry in result["configs"]}


@pytest.fixture
def asked(cluster: EmbeddedCluster, topic: str) -> Iterator[Asked]:
    with closing(KafkaPythonWire(cluster.bootstrap_servers)) as wire:
        yield Asked(wire, cluster.bootstrap_servers, topic)


def _has(entry: Message, **expected: Any) -> None:
    """Check the fields that the version has; the first one must be there."""
    assert next(iter(expected)) in entry
    assert {name: value for name, value in entry.items() if name in expected} == {
        name: value for name, value in expected.items() if name in entry
    }


def _produce(asked: Asked, version: int) -> None:
    records = make_records(0 if version < 2 else min(version - 1, 2), [b"one", b"two"], NOW)
    partitions = [{"index": 0, "records": records}, {"index": 9, "records": records}]
    topics = [{"name": asked.topic, "topic_id": asked.topic_id, "partition_data": partitions}]
    for base_offset in (0, 2):
        request = {"transactional_id": None, "acks": -1, "timeout_ms": 5000, "topic_data": topics}
        (answer,) = asked.ask("Produce", version, request)["responses"]
        _has(answer, **({"topic_id": asked.topic_id} if version >= 13 else {"name": asked.topic}))
        good, bad = answer["partition_responses"]
        _has(good, error_code=NONE, index=0, base_offset=base_offset, log_append_time_ms=-1, log_start_offset=0)
        _has(good, index=0, record_errors=[], error_message=None)
        _has(bad, error_code=UNKNOWN_PARTITION, index=9, base_offset=-1)
    if version >= 13:
        for unknown in (uuid.uuid4(), NO_ID):
            request["topic_data"] = [{"topic_id": unknown, "partition_data": partitions[:1]}]
            (answer,) = asked.ask("Produce", version, request)["responses"]
            _has(answer["partition_responses"][0], error_code=UNKNOWN_TOPIC_ID, index=0)


def _fetch(asked: Asked, version: int) -> None:
    asked.produce([b"one", b"two", b"three"])

    def partition(index: int, offset: int = 1, epoch: int = -1) -> Message:
        return {
            "partition": index,
            "current_leader_epoch": epoch,
            "fetch_offset": offset,
            "log_start_offset": -1,
            "partition_max_bytes": 100_000,
        }

    def fetch(
        partitions: list[Message], topic_id: uuid.UUID = asked.topic_id, session: tuple[int, int] = (0, -1)
    ) -> Any:
        topics = [{"topic": asked.topic, "topic_id": topic_id, "partitions": partitions}] if partitions else []
        request = {
            "replica_id": -1,
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_bytes": 100_000,
            "isolation_level": 0,
            "session_id": session[0],
            "session_epoch": session[1],
            "topics": topics,
            "forgotten_topics_data": [],
        }
        answer = asked.ask("Fetch", version, request)
        assert answer.get("error_code", NONE) == NONE
        return answer

    (answer,) = fetch([partition(0), partition(9)])["responses"]
    _has(answer, **({"topic_id": asked.topic_id} if version >= 13 else {"topic": asked.topic}))
    good, bad = answer["partitions"]
    _has(good, partition_index=0, error_code=NONE, high_watermark=3, last_stable_offset=3, log_start_offset=0)
    magic = min(2, version // 2)
    # whole batches are sent from the file: the reader skips the records before its offset
    first = 0 if magic == 2 else 1
    assert read_records(good["records"]) == [
        (magic, offset, [b"one", b"two", b"three"][offset]) for offset in range(first, 3)
    ]
    _has(bad, partition_index=9, error_code=UNKNOWN_PARTITION, high_watermark=-1)
    assert not bad["records"]
    (answer,) = fetch([partition(0, offset=4)])["responses"]
    _has(answer["partitions"][0], error_code=OFFSET_OUT_OF_RANGE)
    if version >= 7:
        made = fetch([partition(0, offset=3)], session=(0, 0))
        assert made["session_id"] > 0
        assert len(made["responses"]) == 1
        again = fetch([], session=(made["session_id"], 1))
        _has(again, session_id=made["session_id"], responses=[])
    if version >= 9:
        (answer,) = fetch([partition(0, epoch=8)])["responses"]
        _has(answer["partitions"][0], error_code=UNKNOWN_EPOCH)
        (answer,) = fetch([partition(0, epoch=0)])["responses"]
        _has(answer["partitions"][0], error_code=NONE)
    if version >= 13:
        for unknown in (uuid.uuid4(), NO_ID):
            (answer,) = fetch([partition(0)], unknown)["responses"]
            assert answer["topic_id"] == (unknown if unknown.int else None)  # kafka-python's null
            _has(answer["partitions"][0], error_code=UNKNOWN_TOPIC_ID)


def _list_offsets(asked: Asked, version: int) -> None:
    asked.produce([b"one", b"two", b"three"])

    def find(timestamp: int, index: int = 0) -> Message:
        entry = {"partition_index": index, "timestamp": timestamp, "max_num_offsets": 5, "current_leader_epoch": -1}
        topics = [{"name": asked.topic, "partitions": [entry]}]
        request = {"replica_id": -1, "isolation_level": 0, "topics": topics, "timeout_ms": 1000}
        (topic,) = asked.ask("ListOffsets", version, request)["topics"]
        assert topic["name"] == asked.topic
        found: Message = topic["partitions"][0]
        assert found["partition_index"] == index
        return found

    assert find(-1, index=9)["error_code"] == UNKNOWN_PARTITION
    if version == 0:
        _has(find(-1), old_style_offsets=[3, 0], error_code=NONE)
        _has(find(-2), old_style_offsets=[0], error_code=NONE)
        _has(find(1), old_style_offsets=[], error_code=NONE)
        return
    expected = {-1: (-1, 3), -2: (-1, 0), NOW + 1: (NOW + 1, 1), NOW + 3: (-1, -1)}
    expected |= {-3: (NOW + 2, 2)} if version >= 7 else {}
    expected |= {-4: (-1, 0)} if version >= 8 else {}
    expected |= {-5: (-1, -1)} if version >= 9 else {}
    for timestamp, (found, offset) in expected.items():
        _has(find(timestamp), offset=offset, timestamp=found, error_code=NONE)


def _metadata(asked: Asked, version: int) -> None:
    missing = f"{asked.topic}-missing"
    names = [asked.topic, missing] if version >= 4 else [asked.topic]  # older versions create the topic
    wanted = [{"name": name, "topic_id": NO_ID} for name in names]
    request = {
        "topics": wanted,
        "allow_auto_topic_creation": False,
        "include_cluster_authorized_operations": False,
        "include_topic_authorized_operations": False,
    }
    answer = asked.ask("Metadata", version, request)
    (broker,) = answer["brokers"]
    _has(broker, node_id=0, host=asked.host, port=asked.port, rack=None)
    _has({"brokers": 0} | answer, brokers=answer["brokers"], controller_id=0)
    if version >= 2:
        assert len(answer["cluster_id"]) == 22
    topics = answer["topics"]
    _has(topics[0], name=asked.topic, error_code=NONE, topic_id=asked.topic_id, is_internal=False)
    (partition,) = topics[0]["partitions"]
    _has(partition, partition_index=0, error_code=NONE, leader_id=0, leader_epoch=0)
    _has(partition, replica_nodes=[0], isr_nodes=[0], offline_replicas=[])
    if version >= 4:
        _has(topics[1], name=missing, error_code=UNKNOWN_PARTITION, partitions=[])
    everything = asked.ask("Metadata", version, request | {"topics": None if version else []})
    assert asked.topic in [topic["name"] for topic in everything["topics"]]
    if version >= 1:
        assert asked.ask("Metadata", version, request | {"topics": []})["topics"] == []
    if version >= 12:
        for topic_id, code in ((asked.topic_id, NONE), (uuid.uuid4(), UNKNOWN_TOPIC_ID)):
            wanted = [{"name": None, "topic_id": topic_id}]
            (found,) = asked.ask("Metadata", version, request | {"topics": wanted})["topics"]
            _has(found, topic_id=topic_id, error_code=code, name=None if code else asked.topic)


def _commit(asked: Asked, version: int, offset: int) -> list[tuple[int, int]]:
    partitions = [
        {
            "partition_index": index,
            "committed_offset": offset,
            "committed_leader_epoch": 0,
            "committed_metadata": "note",
            "commit_timestamp": -1,
        }
        for index in (0, 9)
    ]
    which: Message = {"topic_id": asked.topic_id} if version >= 10 else {"name": asked.topic}
    request = {
        "group_id": asked.topic,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "retention_time_ms": -1,
        "topics": [which | {"partitions": partitions}],
    }
    answer = asked.ask("OffsetCommit", version, request)
    (topic,) = answer["topics"]
    _has(topic, **which)
    return [(entry["partition_index"], entry["error_code"]) for entry in topic["partitions"]]


def _fetched(asked: Asked, version: int) -> list[Message]:
    which: Message = {"topic_id": asked.topic_id} if version >= 10 else {"name": asked.topic}
    topics = [which | {"partition_indexes": [0, 9]}]
    group = {"group_id": asked.topic, "member_id": None, "member_epoch": -1, "topics": topics}
    request = {"group_id": asked.topic, "topics": topics, "require_stable": False, "groups": [group]}
    answer = asked.ask("OffsetFetch", version, request)
    if version >= 8:
        (answer,) = answer["groups"]
        assert answer["group_id"] == asked.topic
    assert answer.get("error_code", NONE) == NONE
    (topic,) = answer["topics"]
    _has(topic, **which)
    found: list[Message] = topic["partitions"]
    return found


def _offset_commit(asked: Asked, version: int) -> None:
    assert _commit(asked, version, 42) == [(0, NONE), (9, UNKNOWN_PARTITION)]
    assert _fetched(asked, 0 if version == 0 else 5)[0]["committed_offset"] == 42


def _offset_fetch(asked: Asked, version: int) -> None:
    none = UNKNOWN_PARTITION if version == 0 else NONE
    assert [(e["committed_offset"], e["error_code"]) for e in _fetched(asked, version)] == [(-1, none)] * 2
    _commit(asked, 0 if version == 0 else 6, 43)
    there, missing = _fetched(asked, version)
    note = "note" if version else ""  # the directories keep only offsets
    _has(there, partition_index=0, committed_offset=43, error_code=NONE, metadata=note)
    _has(missing, partition_index=9, committed_offset=-1, error_code=none)
    if version >= 5:
        assert there["committed_leader_epoch"] == 0


def _find_coordinator(asked: Asked, version: int) -> None:
    found = asked.ask("FindCoordinator", version, {"key": "g", "key_type": 0, "coordinator_keys": ["g", "h"]})
    entries = found["coordinators"] if version >= 4 else [found]
    assert len(entries) == (2 if version >= 4 else 1)
    for entry in entries:
        _has(entry, error_code=NONE, node_id=0, host=asked.host, port=asked.port)


def _api_versions(asked: Asked, version: int) -> None:
    request = {"client_software_name": "kafka-python", "client_software_version": "3"}
    answer = asked.ask("ApiVersions", version, request)
    assert answer["error_code"] == NONE
    told = {entry["api_key"]: (entry["min_version"], entry["max_version"]) for entry in answer["api_keys"]}
    assert told == {key: (apis.BY_KEY[key].versions.first, apis.BY_KEY[key].versions.last) for key in told}
    named = {key: apis.BY_KEY[key].name for key in told}
    served = {(named[key], number) for key, (first, last) in told.items() for number in range(first, last + 1)}
    assert {name for name, _ in served - set(CASES) - UNKNOWN_VERSIONS} == ELSEWHERE
    assert set(CASES) <= served


def _create_topics(asked: Asked, version: int) -> None:
    name = f"{asked.topic}-new"
    entry = {
        "name": name,
        "num_partitions": 3,
        "replication_factor": 1,
        "assignments": [],
        "configs": [{"name": "retention.ms", "value": "5000"}],
    }
    bad = entry | {"name": f"{name}-bad", "replication_factor": 3}
    request = {"topics": [entry, bad], "timeout_ms": 5000, "validate_only": version >= 1}
    for _ in range(2 if version >= 1 else 1):  # the first request only validates
        good, refused = asked.ask("CreateTopics", version, request)["topics"]
        _has(good, error_code=NONE, name=name, num_partitions=3, replication_factor=1)
        _has(refused, error_code=INVALID_REPLICATION_FACTOR, name=bad["name"])
        request["validate_only"] = False
    if version >= 5:
        settings = {entry["name"]: (entry["value"], entry["config_source"]) for entry in good["configs"]}
        assert settings["retention.ms"] == ("5000", 1)
    if version >= 7:
        (found,) = asked.ask("Metadata", 12, {"topics": [{"name": None, "topic_id": good["topic_id"]}]})["topics"]
        assert found["name"] == name


def _delete_topics(asked: Asked, version: int) -> None:
    missing = f"{asked.topic}-missing"
    topics = [{"name": asked.topic, "topic_id": NO_ID}, {"name": missing, "topic_id": NO_ID}]
    request = {"topic_names": [asked.topic, missing], "topics": topics, "timeout_ms": 5000}
    good, bad = asked.ask("DeleteTopics", version, request)["responses"]
    _has(good, error_code=NONE, name=asked.topic)
    _has(bad, error_code=UNKNOWN_PARTITION, name=missing)
    (gone,) = asked.ask("Metadata", 4, {"topics": [{"name": asked.topic}], "allow_auto_topic_creation": False})[
        "topics"
    ]
    assert gone["error_code"] == UNKNOWN_PARTITION
    if version >= 6:
        entry = {"name": asked.topic, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
        (made,) = asked.ask("CreateTopics", 7, {"topics": [entry], "timeout_ms": 5000})["topics"]
        topics = [{"name": None, "topic_id": topic_id} for topic_id in (asked.topic_id, made["topic_id"])]
        bad, good = asked.ask("DeleteTopics", version, {"topics": topics, "timeout_ms": 5000})["responses"]
        _has(bad, error_code=UNKNOWN_TOPIC_ID, topic_id=asked.topic_id)
        _has(good, error_code=NONE, topic_id=made["topic_id"], name=asked.topic)


def _delete_records(asked: Asked, version: int) -> None:
    asked.produce([b"one", b"two", b"three"])
    for offset, code, start in ((2, NONE, 2), (1, NONE, 2), (99, OFFSET_OUT_OF_RANGE, -1), (-1, NONE, 3)):
        partitions = [{"partition_index": 0, "offset": offset}, {"partition_index": 9, "offset": 0}]
        request = {"topics": [{"name": asked.topic, "partitions": partitions}], "timeout_ms": 5000}
        (topic,) = asked.ask("DeleteRecords", version, request)["topics"]
        _has(topic["partitions"][0], partition_index=0, error_code=code, low_watermark=start)
        _has(topic["partitions"][1], partition_index=9, error_code=UNKNOWN_PARTITION, low_watermark=-1)


def _offset_for_leader_epoch(asked: Asked, version: int) -> None:
    asked.produce([b"one", b"two", b"three"])
    for wanted, current, code, epoch, end in (
        (0, -1, NONE, 0, 3),
        (7, -1, NONE, -1, -1),
        (0, 5, UNKNOWN_EPOCH if version >= 2 else NONE, 0, 3),
    ):
        partition = {"partition": 0, "current_leader_epoch": current, "leader_epoch": wanted}
        missing = partition | {"partition": 9}
        topics = [{"topic": asked.topic, "partitions": [partition, missing]}]
        (topic,) = asked.ask("OffsetForLeaderEpoch", version, {"replica_id": -1, "topics": topics})["topics"]
        assert topic["topic"] == asked.topic
        good, bad = topic["partitions"]
        expected = (-1, -1) if code else (epoch, end)
        _has(good, partition=0, error_code=code, leader_epoch=expected[0], end_offset=expected[1])
        _has(bad, partition=9, error_code=UNKNOWN_PARTITION)


def _describe_configs(asked: Asked, version: int) -> None:
    def describe(kind: int, name: str, keys: list[str] | None) -> Message:
        resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
        request = {"resources": [resource], "include_synonyms": True, "include_documentation": True}
        (result,) = asked.ask("DescribeConfigs", version, request)["results"]
        _has(result, resource_type=kind, resource_name=name)
        found: Message = result
        return found

    chosen = describe(TOPIC, asked.topic, ["retention.ms"])
    (entry,) = chosen["configs"]
    _has(entry, name="retention.ms", value="-1", read_only=False, is_sensitive=False)
    _has(entry, name="retention.ms", **({"config_source": 4} if version else {"is_default": False}))
    every = {entry["name"]: entry["value"] for entry in describe(TOPIC, asked.topic, None)["configs"]}
    assert (every["cleanup.policy"], every["compression.type"]) == ("delete", "producer")
    (entry,) = describe(BROKER, "0", ["log.retention.ms"])["configs"]
    _has(entry, name="log.retention.ms", value="-1", read_only=True)
    _has(describe(TOPIC, f"{asked.topic}-missing", None), error_code=UNKNOWN_PARTITION, configs=[])
    _has(describe(BROKER, "", None), error_code=NONE, configs=[])  # no defaults for all brokers


def _alter(asked: Asked, name: str, version: int, value: str, **more: Any) -> Message:
    configs = [{"name": "retention.ms", "value": value} | more]
    resources = [{"resource_type": TOPIC, "resource_name": asked.topic, "configs": configs}]
    resources.append(resources[0] | {"resource_name": f"{asked.topic}-missing"})
    good, missing = asked.ask(name, version, {"resources": resources, "validate_only": False})["responses"]
    _has(missing, error_code=UNKNOWN_PARTITION, resource_type=TOPIC, resource_name=f"{asked.topic}-missing")
    _has(good, resource_type=TOPIC, resource_name=asked.topic)
    found: Message = good
    return found


def _alter_configs(asked: Asked, version: int) -> None:
    assert _alter(asked, "AlterConfigs", version, "7000")["error_code"] == NONE
    assert asked.settings()["retention.ms"] == "7000"
    assert _alter(asked, "AlterConfigs", version, "soon")["error_code"] == INVALID_CONFIG
    assert asked.settings()["retention.ms"] == "7000"


def _incremental_alter_configs(asked: Asked, version: int) -> None:
    name = "IncrementalAlterConfigs"
    assert _alter(asked, name, version, "7000", config_operation=0)["error_code"] == NONE
    assert asked.settings()["retention.ms"] == "7000"
    assert _alter(asked, name, version, "7000", config_operation=2)["error_code"] == INVALID_CONFIG
    assert _alter(asked, name, version, "", config_operation=1)["error_code"] == NONE
    assert asked.settings()["retention.ms"] == "-1"


def _describe_log_dirs(asked: Asked, version: int) -> None:
    asked.produce([b"one"])
    topics = [{"topic": asked.topic, "partitions": [0, 9]}]
    (folder,) = asked.ask("DescribeLogDirs", version, {"topics": topics})["results"]
    _has(folder, error_code=NONE)
    assert folder["log_dir"].startswith("/")
    (topic,) = folder["topics"]
    (partition,) = topic["partitions"]
    size = len(make_records(2, [b"one"], NOW))
    _has(partition, partition_index=0, partition_size=size, offset_lag=0, is_future_key=False)
    if version >= 4:
        assert 0 < folder["usable_bytes"] < folder["total_bytes"]
    (folder,) = asked.ask("DescribeLogDirs", version, {"topics": None})["results"]
    assert asked.topic in [entry["name"] for entry in folder["topics"]]


def _create_partitions(asked: Asked, version: int) -> None:
    for count, code in ((3, NONE), (3, INVALID_PARTITIONS), (2, INVALID_PARTITIONS)):
        topics = [{"name": name, "count": count, "assignments": None} for name in (asked.topic, f"{asked.topic}-x")]
        request = {"topics": topics, "timeout_ms": 5000, "validate_only": False}
        good, bad = asked.ask("CreatePartitions", version, request)["results"]
        _has(good, name=asked.topic, error_code=code)
        _has(bad, name=f"{asked.topic}-x", error_code=UNKNOWN_PARTITION)
    (found,) = asked.ask("Metadata", 9, {"topics": [{"name": asked.topic}]})["topics"]
    assert [entry["partition_index"] for entry in found["partitions"]] == [0, 1, 2]


def _describe_cluster(asked: Asked, version: int) -> None:
    answer = asked.ask("DescribeCluster", version, {"endpoint_type": 1})
    _has(answer, error_code=NONE, controller_id=0, endpoint_type=1)
    assert len(answer["cluster_id"]) == 22
    (broker,) = answer["brokers"]
    _has(broker, broker_id=0, host=asked.host, port=asked.port, rack=None, is_fenced=False)


def _describe_topic_partitions(asked: Asked, version: int) -> None:
    assignments: Message = {"topics": [{"name": asked.topic, "count": 3, "assignments": None}], "timeout_ms": 5000}
    asked.ask("CreatePartitions", 3, assignments)
    missing = f"{asked.topic}-missing"
    pages, cursor = [], None
    for _ in range(3):
        request = {
            "topics": [{"name": name} for name in (missing, asked.topic)],
            "response_partition_limit": 2,
            "cursor": cursor,
        }
        answer = asked.ask("DescribeTopicPartitions", version, request)
        pages += [
            (topic["name"], topic["error_code"], [entry["partition_index"] for entry in topic["partitions"]])
            for topic in answer["topics"]
        ]
        for topic in answer["topics"]:
            for entry in topic["partitions"]:
                _has(entry, error_code=NONE, leader_id=0, eligible_leader_replicas=[], last_known_elr=[])
        cursor = answer["next_cursor"]
        if cursor is None:
            break
    assert pages == [
        (asked.topic, NONE, [0, 1]),
        (asked.topic, NONE, [2]),
        (missing, UNKNOWN_PARTITION, []),
    ]


def _join(asked: Asked, version: int = 5, group: str = "") -> tuple[Message, str]:
    """Join a new group as its only member; return the answer and the group."""
    group = group or f"{asked.topic}-group"
    request = {
        "group_id": group,
        "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 10_000,
        "member_id": "",
        "group_instance_id": None,
        "protocol_type": "consumer",
        "reason": None,
        "protocols": [{"name": "range", "metadata": b"subscription"}],
    }
    answer = asked.ask("JoinGroup", version, request)
    if version >= 4:
        _has(answer, error_code=MEMBER_ID_REQUIRED, generation_id=-1)
        answer = asked.ask("JoinGroup", version, request | {"member_id": answer["member_id"]})
    return answer, group


def _sync(asked: Asked, joined: Message, group: str, version: int = 3, **other: Any) -> Message:
    request = {
        "group_id": group,
        "generation_id": joined["generation_id"],
        "member_id": joined["member_id"],
        "group_instance_id": None,
        "protocol_type": "consumer",
        "protocol_name": "range",
        "assignments": [{"member_id": joined["member_id"], "assignment": b"all of it"}],
    }
    return asked.ask("SyncGroup", version, request | other)


def _join_group(asked: Asked, version: int) -> None:
    answer, _ = _join(asked, version)
    member = answer["member_id"]
    assert member
    _has(answer, error_code=NONE, generation_id=1, leader=member, protocol_name="range", protocol_type="consumer")
    (entry,) = answer["members"]
    _has(entry, member_id=member, metadata=b"subscription", group_instance_id=None)
    wrong = {"group_id": "", "session_timeout_ms": 10_000, "member_id": "", "protocol_type": "consumer"}
    wrong |= {"rebalance_timeout_ms": 10_000, "protocols": [{"name": "range", "metadata": b""}]}
    assert asked.ask("JoinGroup", version, wrong)["error_code"] == INVALID_GROUP_ID
    unknown = wrong | {"group_id": asked.topic, "member_id": "nobody"}
    assert asked.ask("JoinGroup", version, unknown)["error_code"] == UNKNOWN_MEMBER


def _sync_group(asked: Asked, version: int) -> None:
    joined, group = _join(asked)
    for other, code in (({"member_id": "nobody"}, UNKNOWN_MEMBER), ({"generation_id": 9}, ILLEGAL_GENERATION)):
        _has(_sync(asked, joined, group, version, **other), error_code=code, assignment=b"")
    answer = _sync(asked, joined, group, version)
    _has(answer, error_code=NONE, assignment=b"all of it", protocol_type="consumer", protocol_name="range")


def _heartbeat(asked: Asked, version: int) -> None:
    joined, group = _join(asked)
    _sync(asked, joined, group)
    request = {"group_id": group, "generation_id": 1, "member_id": joined["member_id"], "group_instance_id": None}
    for other, code in (
        ({}, NONE),
        ({"member_id": "nobody"}, UNKNOWN_MEMBER),
        ({"generation_id": 9}, ILLEGAL_GENERATION),
    ):
        assert asked.ask("Heartbeat", version, request | other)["error_code"] == code


def _leave_group(asked: Asked, version: int) -> None:
    joined, group = _join(asked)
    members = [{"member_id": name, "group_instance_id": None} for name in (joined["member_id"], "nobody")]
    request = {"group_id": group, "member_id": joined["member_id"], "members": members}
    answer = asked.ask("LeaveGroup", version, request)
    assert answer["error_code"] == NONE
    if version >= 3:
        gone, unknown = answer["members"]
        _has(gone, member_id=joined["member_id"], error_code=NONE, group_instance_id=None)
        _has(unknown, member_id="nobody", error_code=UNKNOWN_MEMBER)
    (described,) = asked.ask("DescribeGroups", 5, {"groups": [group]})["groups"]
    assert described["members"] == []


def _describe_groups(asked: Asked, version: int) -> None:
    joined, group = _join(asked)
    _sync(asked, joined, group)
    missing = f"{group}-missing"
    there, unknown = asked.ask("DescribeGroups", version, {"groups": [group, missing]})["groups"]
    _has(there, group_id=group, error_code=NONE, group_state="Stable", protocol_type="consumer", protocol_data="range")
    (member,) = there["members"]
    _has(member, member_id=joined["member_id"], client_id="kafka-python", member_assignment=b"all of it")
    _has(member, member_metadata=b"subscription", client_host=f"/{asked.host}")
    code = GROUP_ID_NOT_FOUND if version >= 6 else NONE
    _has(unknown, group_id=missing, error_code=code, group_state="Dead", members=[])


def _list_groups(asked: Asked, version: int) -> None:
    joined, group = _join(asked)
    _sync(asked, joined, group)
    answer = asked.ask("ListGroups", version, {"states_filter": [], "types_filter": []})
    assert answer["error_code"] == NONE
    (entry,) = [entry for entry in answer["groups"] if entry["group_id"] == group]
    _has(entry, group_id=group, protocol_type="consumer", group_state="Stable")
    if version >= 4:
        answer = asked.ask("ListGroups", version, {"states_filter": ["Empty"], "types_filter": []})
        assert group not in [entry["group_id"] for entry in answer["groups"]]


def _delete_groups(asked: Asked, version: int) -> None:
    joined, group = _join(asked)
    _sync(asked, joined, group)
    _commit(asked, 6, 5)  # by a group without members, named like the topic
    names = [group, asked.topic, f"{group}-missing"]
    results = asked.ask("DeleteGroups", version, {"groups_names": names})["results"]
    assert [(entry["group_id"], entry["error_code"]) for entry in results] == [
        (group, NON_EMPTY_GROUP),
        (asked.topic, NONE),
        (f"{group}-missing", GROUP_ID_NOT_FOUND),
    ]
    assert _fetched(asked, 5)[0]["committed_offset"] == -1


def _offset_delete(asked: Asked, version: int) -> None:
    _commit(asked, 6, 5)
    topics = [{"name": asked.topic, "partitions": [{"partition_index": 0}]}]
    answer = asked.ask("OffsetDelete", version, {"group_id": asked.topic, "topics": topics})
    _has(answer, error_code=NONE)
    (topic,) = answer["topics"]
    _has(topic["partitions"][0], partition_index=0, error_code=NONE)
    assert _fetched(asked, 5)[0]["committed_offset"] == -1
    answer = asked.ask("OffsetDelete", version, {"group_id": f"{asked.topic}-missing", "topics": topics})
    assert answer["error_code"] == GROUP_ID_NOT_FOUND


def _producer(asked: Asked, version: int = 3) -> Message:
    """Start a transactional producer; return the fields that identify it."""
    name = f"{asked.topic}-txn"
    request = {"transactional_id": name, "transaction_timeout_ms": 30_000, "producer_id": -1, "producer_epoch": -1}
    answer = asked.ask("InitProducerId", version, request)
    _has(answer, error_code=NONE, producer_epoch=0)
    assert answer["producer_id"] >= 0
    return {"transactional_id": name, "producer_id": answer["producer_id"], "producer_epoch": 0}


def _init_producer_id(asked: Asked, version: int) -> None:
    _producer(asked, version)
    request = {"transactional_id": None, "transaction_timeout_ms": 1000, "producer_id": -1, "producer_epoch": -1}
    first, second = (asked.ask("InitProducerId", version, request) for _ in range(2))
    assert (first["error_code"], second["error_code"]) == (NONE, NONE)
    assert first["producer_id"] != second["producer_id"]


def _add_partitions(asked: Asked, producer: Message, version: int = 3) -> list[Message]:
    topics = [{"name": asked.topic, "partitions": [0]}]
    request: Message = {f"v3_and_below_{name}": value for name, value in producer.items()}
    request |= {"v3_and_below_topics": topics}
    request["transactions"] = [producer | {"verify_only": False, "topics": topics}]
    answer = asked.ask("AddPartitionsToTxn", version, request)
    if version >= 4:
        assert answer["error_code"] == NONE
        (answer,) = answer["results_by_transaction"]
        (topic,) = answer["topic_results"]
    else:
        (topic,) = answer["results_by_topic_v3_and_below"]
    assert topic["name"] == asked.topic
    found: list[Message] = topic["results_by_partition"]
    return found


def _add_partitions_to_txn(asked: Asked, version: int) -> None:
    producer = _producer(asked)
    (entry,) = _add_partitions(asked, producer, version)
    _has(entry, partition_index=0, partition_error_code=NONE)
    (entry,) = _add_partitions(asked, producer | {"producer_epoch": 7}, version)
    assert entry["partition_error_code"] != NONE


def _add_offsets_to_txn(asked: Asked, version: int) -> None:
    producer = _producer(asked)
    request = producer | {"group_id": asked.topic}
    assert asked.ask("AddOffsetsToTxn", version, request)["error_code"] == NONE
    assert asked.ask("AddOffsetsToTxn", version, request | {"producer_epoch": 7})["error_code"] != NONE


def _end_txn(asked: Asked, version: int) -> None:
    producer = _producer(asked)
    _add_partitions(asked, producer)
    assert asked.ask("EndTxn", version, producer | {"producer_epoch": 7, "committed": True})["error_code"] != NONE
    assert asked.ask("EndTxn", version, producer | {"committed": True})["error_code"] == NONE


def _txn_offset_commit(asked: Asked, version: int) -> None:
    producer = _producer(asked)
    asked.ask("AddOffsetsToTxn", 3, producer | {"group_id": asked.topic})
    entry = {"partition_index": 0, "committed_offset": 5, "committed_leader_epoch": 0, "committed_metadata": ""}
    request = producer | {"group_id": asked.topic, "topics": [{"name": asked.topic, "partitions": [entry]}]}
    (topic,) = asked.ask("TxnOffsetCommit", version, request)["topics"]
    _has(topic["partitions"][0], partition_index=0, error_code=NONE)
    assert _fetched(asked, 5)[0]["committed_offset"] == -1
    assert asked.ask("EndTxn", 3, producer | {"committed": True})["error_code"] == NONE


def _describe_transactions(asked: Asked, version: int) -> None:
    producer = _producer(asked)
    _add_partitions(asked, producer)
    request = {"transactional_ids": [producer["transactional_id"], "unknown"]}
    there, unknown = asked.ask("DescribeTransactions", version, request)["transaction_states"]
    _has(there, error_code=NONE, producer_id=producer["producer_id"], transaction_state="Ongoing")
    assert unknown["error_code"] != NONE


def _list_transactions(asked: Asked, version: int) -> None:
    producer = _producer(asked)
    _add_partitions(asked, producer)
    answer = asked.ask("ListTransactions", version, {"state_filters": [], "producer_id_filters": []})
    name = producer["transactional_id"]
    (entry,) = [entry for entry in answer["transaction_states"] if entry["transactional_id"] == name]
    _has(entry, producer_id=producer["producer_id"], transaction_state="Ongoing")


def _describe_producers(asked: Asked, version: int) -> None:
    topics = [{"name": asked.topic, "partition_indexes": [0]}]
    (topic,) = asked.ask("DescribeProducers", version, {"topics": topics})["topics"]
    _has(topic["partitions"][0], partition_index=0, error_code=NONE, active_producers=[])


def _write_txn_markers(asked: Asked, version: int) -> None:
    marker = {"producer_id": 5, "producer_epoch": 0, "transaction_result": True, "coordinator_epoch": 0}
    marker["topics"] = [{"name": asked.topic, "partition_indexes": [0]}]
    (answer,) = asked.ask("WriteTxnMarkers", version, {"markers": [marker]})["markers"]
    _has(answer, producer_id=5)
    (topic,) = answer["topics"]
    _has(topic["partitions"][0], partition_index=0, error_code=NONE)


CHECKS: dict[str, Callable[[Asked, int], None]] = {
    "Produce": _produce,
    "Fetch": _fetch,
    "ListOffsets": _list_offsets,
    "Metadata": _metadata,
    "OffsetCommit": _offset_commit,
    "OffsetFetch": _offset_fetch,
    "FindCoordinator": _find_coordinator,
    "ApiVersions": _api_versions,
    "CreateTopics": _create_topics,
    "DeleteTopics": _delete_topics,
    "DeleteRecords": _delete_records,
    "OffsetForLeaderEpoch": _offset_for_leader_epoch,
    "DescribeConfigs": _describe_configs,
    "AlterConfigs": _alter_configs,
    "IncrementalAlterConfigs": _incremental_alter_configs,
    "DescribeLogDirs": _describe_log_dirs,
    "CreatePartitions": _create_partitions,
    "DescribeCluster": _describe_cluster,
    "DescribeTopicPartitions": _describe_topic_partitions,
    "JoinGroup": _join_group,
    "SyncGroup": _sync_group,
    "Heartbeat": _heartbeat,
    "LeaveGroup": _leave_group,
    "DescribeGroups": _describe_groups,
    "ListGroups": _list_groups,
    "DeleteGroups": _delete_groups,
    "OffsetDelete": _offset_delete,
    "InitProducerId": _init_producer_id,
    "AddPartitionsToTxn": _add_partitions_to_txn,
    "AddOffsetsToTxn": _add_offsets_to_txn,
    "EndTxn": _end_txn,
    "TxnOffsetCommit": _txn_offset_commit,
    "DescribeTransactions": _describe_transactions,
    "ListTransactions": _list_transactions,
    "DescribeProducers": _describe_producers,
    "WriteTxnMarkers": _write_txn_markers,
}


@pytest.mark.parametrize(("name", "version"), CASES)
def test_asked_and_read_by_kafka_python(asked: Asked, name: str, version: int) -> None:
    CHECKS[name](asked, version)
