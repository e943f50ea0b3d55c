"""Kafka's programs for system tests at our broker: what they say, they have done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from spark_klog.embedded import EmbeddedCluster
from tests.support.servers.kafka import NEWEST, Kafka

pytestmark = [pytest.mark.peer, pytest.mark.test_all("client")]

_COUNT, _PARTITIONS = 300, 3


@pytest.fixture
def events(cluster: EmbeddedCluster, topic: str, server_dir: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run a verifiable client on the test's topic, in a JVM of its own: it ends its work when that ends."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_topics([NewTopic(topic, _PARTITIONS, 1)])[topic].result(30)
    programs = Kafka(NEWEST, server_dir)

    def run(name: str, *arguments: str) -> list[dict[str, Any]]:
        way = ("--bootstrap-server", cluster.bootstrap_servers, "--topic", topic)
        done = programs.tool(f"org.apache.kafka.tools.{name}", *way, *arguments)
        assert done.returncode == 0, done
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


def _named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_verifiable_producer_and_consumer(
    events: Callable[..., list[dict[str, Any]]], cluster: EmbeddedCluster, topic: str, protocol: str
) -> None:
    produced = events("VerifiableProducer", "--max-messages", str(_COUNT), "--acks", "-1")
    sent = {
        (event["partition"], event["offset"], event["value"]) for event in _named(produced, "producer_send_success")
    }
    assert len(sent) == _COUNT
    assert _named(produced, "tool_data")[0]["acked"] == _COUNT
    way = ("--group-id", topic, "--group-protocol", protocol, "--max-messages", str(_COUNT))
    consumed = events("VerifiableConsumer", *way, "--reset-policy", "earliest", "--verbose")
    data = _named(consumed, "record_data")
    assert {(event["partition"], event["offset"], event["value"]) for event in data} == sent
    assert len(data) == _COUNT
    assigned = _named(consumed, "partitions_assigned")[0]["partitions"]
    assert sorted(entry["partition"] for entry in assigned) == list(range(_PARTITIONS))
    assert all(event["success"] for event in _named(consumed, "offsets_committed"))
    reader = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": topic})
    committed = reader.committed([TopicPartition(topic, number) for number in range(_PARTITIONS)], 30)
    reader.close()
    written = {partition for partition, _, _ in sent}  # batches stick to a partition
    ends = {one: max(offset for partition, offset, _ in sent if partition == one) + 1 for one in written}
    assert {place.partition: place.offset for place in committed if place.partition in written} == ends
