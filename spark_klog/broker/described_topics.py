"""Topics as Metadata and DescribeTopicPartitions answer with them.

Since there is no replication, replicas and in-sync replicas are the leader. A leader epoch is told of partitions that
are led here; of others it is not known (-1), and clients then do not check it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

from spark_klog.broker.internal_topics import INTERNAL_TOPICS
from spark_klog.broker.registry import NO_LEADER, Registry, Topic
from spark_klog.errors import ErrorCode
from spark_klog.log.directory import LogDirectory
from spark_klog.protocol.codec import Message

_UNKNOWN_EPOCH = -1


def missing_topic(name: str | None, topic_id: UUID | None, code: ErrorCode) -> Message:
    """A topic that is not there, asked for by name or by id."""
    return {"error_code": code, "name": name, "topic_id": topic_id or UUID(int=0), "partitions": []}


def topic_message(registry: Registry, logs: LogDirectory, topic: Topic, listener: str) -> dict[str, Any]:
    """A topic with its partitions, as clients of that listener reach their leaders."""
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
