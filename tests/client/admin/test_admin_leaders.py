"""Leader elections and reassignments, at single brokers of all kinds and at two of Kafka's, checked by kafka-python."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka.admin import KafkaAdminClient

from spark_klog.client import Admin, NewTopic
from spark_klog.errors import ConfigError, ErrorCode, UnsupportedVersionError
from tests.support.clients.admins import error_code
from tests.support.clients.consumers import SECONDS, Line, Server
from tests.support.servers.kafka import Kafka
from tests.support.waiting import wait_until


def test_a_broker_alone(server: Server, admin: Admin) -> None:
    topic = server.topic(2)
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=r"ElectLeaders.*Kafka 2\.2"):
            admin.elect_leaders([(topic, 0)])
        with pytest.raises(UnsupportedVersionError, match=r"ListPartitionReassignments.*Kafka 2\.4"):
            admin.list_partition_reassignments()
        return
    found = admin.elect_leaders([(topic, 0), (topic, 1), (f"{topic}-no", 0)])
    assert (found[topic, 0], found[topic, 1]) == (False, False)
    assert error_code(found[f"{topic}-no", 0]) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert admin.elect_leaders([(topic, 0), (topic, 1)], unclean=True) == {(topic, 0): False, (topic, 1): False}
    assert admin.elect_leaders() == {}
    node = admin.describe_cluster().brokers[0].node
    moved = admin.alter_partition_reassignments({(topic, 0): [node], (topic, 1): [4711], (f"{topic}-no", 0): [node]})
    assert moved[topic, 0] is None
    assert error_code(moved[topic, 1]) == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert error_code(moved[f"{topic}-no", 0]) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert error_code(admin.alter_partition_reassignments({(topic, 0): None})[topic, 0]) == (
        ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
    )
    assert admin.list_partition_reassignments() == {}
    assert admin.list_partition_reassignments([(topic, 0)]) == {}


def test_arguments(admin: Admin) -> None:
    with pytest.raises(ConfigError, match="are empty: name at least one, or None to cancel"):
        admin.alter_partition_reassignments({("t", 0): []})
    with pytest.raises(TypeError, match="a broker of"):
        admin.alter_partition_reassignments({("t", 0): ["1"]})  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"must be \(topic, partition\)"):
        admin.elect_leaders(["t"])  # type: ignore[list-item]


@pytest.fixture(scope="module")
def pair(module_server_dir: Path) -> Iterator[tuple[Kafka, Kafka]]:
    with Kafka("3.9.1", module_server_dir / "one") as one, Kafka("3.9.1", module_server_dir / "two", beside=one) as two:
        yield one, two


@pytest.mark.peer
@pytest.mark.skipif(os.environ.get("SPARK_KLOG_KAFKAS") != "all", reason="part of make soak")
def test_two_brokers(pair: tuple[Kafka, Kafka]) -> None:
    one, two = pair
    servers = f"{one.bootstrap_servers},{two.bootstrap_servers}"
    with Admin({"bootstrap.servers": servers}) as admin:
        wait_until(lambda: len(admin.describe_cluster().brokers) == 2, seconds=30)
        admin.create_topics([NewTopic("t", assignments=[[2, 1]]), NewTopic("moved", assignments=[[1]])]).check()
        Server(servers, "3.9.1").send("moved", [Line(0, None, bytes(100_000), ())] * 20)

        def seen(topic: str) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
            (partition,) = admin.describe_topics([topic]).check()[topic].partitions
            return partition.leader, partition.replicas, tuple(sorted(partition.in_sync))

        two.stop()
        wait_until(lambda: seen("t")[0] == 1, seconds=30)
        assert error_code(admin.elect_leaders([("t", 0)])["t", 0]) == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
        two.start()
        wait_until(lambda: seen("t") == (1, (2, 1), (1, 2)), seconds=30)
        assert admin.elect_leaders() == {("t", 0): True}
        wait_until(lambda: seen("t")[0] == 2, seconds=30)
        assert admin.elect_leaders([("t", 0)]) == {("t", 0): False}

        admin.alter_partition_reassignments({("moved", 0): [2]}).check()
        wait_until(lambda: seen("moved") == (2, (2,), (2,)) and not admin.list_partition_reassignments(), seconds=30)
        theirs = KafkaAdminClient(bootstrap_servers=servers, request_timeout_ms=int(1000 * SECONDS))
        try:

            def replicas() -> list[list[int]]:
                (described,) = theirs.describe_topics(["moved"])
                return [entry["replica_nodes"] for entry in described["partitions"]]

            wait_until(lambda: replicas() == [[2]], seconds=30)  # it may ask the broker that learns of the move last
        finally:
            theirs.close()
        # a reassignment that only removes a stopped replica completes
        two.stop()
        admin.alter_partition_reassignments({("t", 0): [1]}).check()
        wait_until(lambda: seen("t")[1] == (1,), seconds=30)
        two.start()
