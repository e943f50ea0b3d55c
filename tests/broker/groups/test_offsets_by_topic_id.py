"""Offsets of topics that requests name by id: OffsetCommit and OffsetFetch 10, TxnOffsetCommit 6 (KIP-848, KIP-1319).

Kafka 4.4's consumers and producers use these versions; what they answer must be the same as by name.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from tests.support.brokers.raw_client import RawClient

UNKNOWN_ID = uuid.uuid4()


@pytest.fixture(scope="module")
def servers(module_server_dir: Path) -> Iterator[list[str]]:
    """The brokers of a cluster of two, so that a group and a transactional id have different coordinators."""
    settings = {"offsets.topic.num.partitions": "2", "transaction.state.log.num.partitions": "2"}
    with EmbeddedCluster(2, data_dir=module_server_dir / "cluster", settings=settings) as cluster:
        yield cluster.bootstrap_servers.split(",")


class Clients:
    """A connection to each broker."""

    def __init__(self, servers: list[str]) -> None:
        self._raw = {}
        for server in servers:
            client = RawClient(int(server.rpartition(":")[2]))
            nodes = client.request(apis.DESCRIBE_CLUSTER, 0, {})["brokers"]
            (own,) = (each["broker_id"] for each in nodes if str(each["port"]) == server.rpartition(":")[2])
            self._raw[own] = client

    @property
    def any(self) -> RawClient:
        return next(iter(self._raw.values()))

    def coordinator(self, key: str, kind: int = 0) -> RawClient:
        """A connection to the coordinator of a group (0) or transactional id (1)."""
        deadline = time.monotonic() + 60
        while True:
            (found,) = self.any.request(apis.FIND_COORDINATOR, 4, {"coordinator_keys": [key], "key_type": kind})[
                "coordinators"
            ]
            if not found["error_code"]:
                return self._raw[found["node_id"]]
            assert time.monotonic() < deadline, found

    def create(self, topic: str) -> uuid.UUID:
        """Create a topic of two partitions; return its id when all brokers know it."""
        entry = {"name": topic, "num_partitions": 2, "replication_factor": 1}
        (made,) = self.any.request(apis.CREATE_TOPICS, 7, {"topics": [entry], "timeout_ms": 10_000})["topics"]
        assert made["error_code"] == 0
        topic_id: uuid.UUID = made["topic_id"]
        deadline = time.monotonic() + 60
        while any(self._id(raw, topic) != topic_id for raw in self._raw.values()):
            assert time.monotonic() < deadline
        return topic_id

    @staticmethod
    def _id(raw: RawClient, topic: str) -> uuid.UUID | None:
        (found,) = raw.request(apis.METADATA, 12, {"topics": [{"name": topic}]})["topics"]
        found_id: uuid.UUID = found["topic_id"]
        return None if found["error_code"] else found_id

    def close(self) -> None:
        for raw in self._raw.values():
            raw.socket.close()


@pytest.fixture(scope="module")
def clients(servers: list[str]) -> Iterator[Clients]:
    made = Clients(servers)
    yield made
    made.close()


def _offsets(*offsets: int) -> list[dict[str, Any]]:
    return [
        {"partition_index": index, "committed_offset": offset, "committed_metadata": f"m{offset}"}
        for index, offset in enumerate(offsets)
    ]


def _codes(answer: dict[str, Any]) -> dict[uuid.UUID, list[int]]:
    return {topic["topic_id"]: [each["error_code"] for each in topic["partitions"]] for topic in answer["topics"]}


def _fetched(raw: RawClient, group: str, topic_ids: list[uuid.UUID] | None, *, stable: bool = False) -> dict[Any, Any]:
    topics = None if topic_ids is None else [{"topic_id": each, "partition_indexes": [0, 1]} for each in topic_ids]
    request = {"groups": [{"group_id": group, "topics": topics}], "require_stable": stable}
    (answer,) = raw.request(apis.OFFSET_FETCH, 10, request)["groups"]
    assert answer["error_code"] == 0
    return {
        topic["topic_id"]: [
            (each["partition_index"], each["committed_offset"], each["metadata"], each["error_code"])
            for each in topic["partitions"]
        ]
        for topic in answer["topics"]
    }


def _by_name(raw: RawClient, group: str, topic: str) -> list[int]:
    wanted = [{"name": topic, "partition_indexes": [0, 1]}]
    (answer,) = raw.request(apis.OFFSET_FETCH, 9, {"groups": [{"group_id": group, "topics": wanted}]})["groups"]
    return [each["committed_offset"] for each in answer["topics"][0]["partitions"]]


def test_offsets_by_id_are_those_by_name(clients: Clients, topic: str) -> None:
    topic_id, raw = clients.create(topic), clients.coordinator(topic)
    commit = {"group_id": topic, "topics": [{"topic_id": topic_id, "partitions": _offsets(5, 7, 9)}]}
    commit["topics"].append({"topic_id": UNKNOWN_ID, "partitions": _offsets(1, 2)})
    codes = _codes(raw.request(apis.OFFSET_COMMIT, 10, commit))
    assert codes == {
        topic_id: [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION],
        UNKNOWN_ID: [ErrorCode.UNKNOWN_TOPIC_ID] * 2,
    }
    assert _by_name(raw, topic, topic) == [5, 7]
    committed = [(0, 5, "m5", 0), (1, 7, "m7", 0)]
    unknown = [(index, -1, "", ErrorCode.UNKNOWN_TOPIC_ID) for index in (0, 1)]
    assert _fetched(raw, topic, [UNKNOWN_ID, topic_id]) == {UNKNOWN_ID: unknown, topic_id: committed}
    assert _fetched(raw, topic, None) == {topic_id: committed}


def test_the_id_of_a_topic_that_was_created_again(clients: Clients, topic: str) -> None:
    old_id, raw = clients.create(topic), clients.coordinator(topic)
    commit = {"group_id": topic, "topics": [{"topic_id": old_id, "partitions": _offsets(5)}]}
    assert _codes(raw.request(apis.OFFSET_COMMIT, 10, commit)) == {old_id: [ErrorCode.NONE]}
    deleted = clients.any.request(apis.DELETE_TOPICS, 6, {"topics": [{"name": topic}], "timeout_ms": 10_000})
    assert [each["error_code"] for each in deleted["responses"]] == [ErrorCode.NONE]
    new_id = clients.create(topic)
    assert new_id != old_id
    assert _codes(raw.request(apis.OFFSET_COMMIT, 10, commit)) == {old_id: [ErrorCode.UNKNOWN_TOPIC_ID]}
    found = _fetched(raw, topic, [old_id, new_id])
    assert [entry[3] for entry in found[old_id]] == [ErrorCode.UNKNOWN_TOPIC_ID] * 2
    assert [entry[1] for entry in found[new_id]] == [-1, -1]


def test_a_stale_member_in_a_transaction(clients: Clients, topic: str) -> None:
    """Producers before Kafka 4.4 know ILLEGAL_GENERATION, and abort; STALE_MEMBER_EPOCH is fatal for them."""
    topic_id, raw = clients.create(topic), clients.coordinator(topic)
    join = {"rebalance_timeout_ms": 1000, "subscribed_topic_names": [topic], "topic_partitions": []}
    beat = {"group_id": topic, "member_id": "m", "member_epoch": 0} | join
    assert raw.request(apis.CONSUMER_GROUP_HEARTBEAT, 1, beat)["member_epoch"] == 1
    commit = {"transactional_id": topic, "group_id": topic, "producer_id": 1, "producer_epoch": 0, "member_id": "m"}
    for version, code in ((3, ErrorCode.ILLEGAL_GENERATION), (6, ErrorCode.STALE_MEMBER_EPOCH)):
        entry = {"name": topic, "topic_id": topic_id, "partitions": _offsets(5)}
        answer = raw.request(apis.TXN_OFFSET_COMMIT, version, commit | {"generation_id": 7, "topics": [entry]})
        assert answer["topics"][0]["partitions"][0]["error_code"] == code


def test_offsets_in_a_transaction_by_id(clients: Clients, topic: str) -> None:
    """From version 5 on TxnOffsetCommit adds the group to the transaction, wherever its coordinator is (KIP-890)."""
    topic_id = clients.create(topic)
    for number in range(4):  # two coordinators each, in all combinations
        group, transactional_id = f"{topic}-{number % 2}", f"{topic}-{number}-{number // 2}"
        raw, coordinator = clients.coordinator(group), clients.coordinator(transactional_id, 1)
        begin = {"transactional_id": transactional_id, "transaction_timeout_ms": 60_000}
        deadline = time.monotonic() + 60
        while (made := coordinator.request(apis.INIT_PRODUCER_ID, 4, begin))["error_code"]:
            assert time.monotonic() < deadline, made
        producer = {"transactional_id": transactional_id, "producer_id": made["producer_id"], "producer_epoch": 0}
        topics = [{"topic_id": topic_id, "partitions": _offsets(10 + number)}]
        topics.append({"topic_id": UNKNOWN_ID, "partitions": _offsets(1)})
        commit = producer | {"group_id": group, "topics": topics}
        by_name = commit | {"topics": [{"name": topic, "partitions": _offsets(99)}]}
        refused = raw.request(apis.TXN_OFFSET_COMMIT, 4, by_name)["topics"][0]["partitions"]
        assert [each["error_code"] for each in refused] == [ErrorCode.TRANSACTION_ABORTABLE]
        codes = _codes(raw.request(apis.TXN_OFFSET_COMMIT, 6, commit))
        assert codes == {topic_id: [ErrorCode.NONE], UNKNOWN_ID: [ErrorCode.UNKNOWN_TOPIC_ID]}
        pending = _fetched(raw, group, [topic_id], stable=True)[topic_id]
        assert pending[0][3] == ErrorCode.UNSTABLE_OFFSET_COMMIT
        ended = coordinator.request(apis.END_TXN, 3, producer | {"committed": True})
        assert ended["error_code"] == ErrorCode.NONE
        while _fetched(raw, group, [topic_id], stable=True)[topic_id][0][1:] != (10 + number, f"m{10 + number}", 0):
            assert time.monotonic() < deadline
        stale = producer | {"producer_epoch": 7, "group_id": group, "topics": topics}
        assert _codes(raw.request(apis.TXN_OFFSET_COMMIT, 6, stale))[topic_id] != [ErrorCode.NONE]
