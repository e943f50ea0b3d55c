"""Topics in responses to Metadata and DescribeTopicPartitions.

There is no replication: the leader is the only replica and in-sync replica. The leader epoch is -1 (unknown, so clients
do not check it) for partitions without a log on this broker.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS
from spark_klog.broker.metadata.registry import NO_LEADER, Registry, Topic
from spark_klog.errors import ErrorCode
from spark_klog.log.directory import LogDirectory
from spark_klog.protocol.codec import Message

_UNKNOWN_EPOCH = -1


def missing_topic(name: str | None, topic_id: UUID | None, code: ErrorCode) -> Message:
    """A response entry for a topic that was requested by name or by id and does not exist."""
    return {"error_code": code, "name": name, "topic_id": topic_id or UUID(int=0), "partitions": []}


def topic_message(registry: Registry, logs: LogDirectory, topic: Topic, listener: str) -> dict[str, Any]:
    """A topic with its partitions; leaders have the addresses of that listener."""
    reachable = registry.addresses(listener)
    return {
        "error_code": ErrorCode.NONE,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.name in INTERNAL_TOPICS,
        "partitions": [
            _partition(registry, logs, topic, partition, replicas, reachable)
            for partition, replicas in sorted(topic.assignment.items())
        ],
    }


def _partition(
    registry: Registry,
    logs: LogDirectory,
    topic: Topic,
    partition: int,
    replicas: list[int],
    reachable: Collection[int],
) -> dict[str, Any]:
    leader = registry.leader(topic, partition)
    alive = leader in reachable
    log = logs.get(topic.name, partition)
    return {
        "error_code": ErrorCode.NONE if alive else ErrorCode.LEADER_NOT_AVAILABLE,
        "partition_index": partition,
        "leader_id": leader if alive else NO_LEADER,
        "leader_epoch": _UNKNOWN_EPOCH if log is None else log.leader_epoch,
        "replica_nodes": replicas,
        "isr_nodes": replicas[:1] if alive else [],
        "offline_replicas": [replica for replica in replicas if replica not in registry.brokers],
    }
