"""Requests to move or elect replicas, which change nothing: a partition has one replica, in one directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.metadata.registry import NO_LEADER
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_PREFERRED = 0
_REASONS = {
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: "only admins elect leaders",
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "there is no such partition",
    ErrorCode.ELECTION_NOT_NEEDED: "the partition's only replica leads it",
    ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE: "the broker of the partition's only replica is down",
    ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE: "the broker of the partition's only replica is down",
}


async def elect_leaders(broker: Broker, request: Request, message: Message) -> Message:
    """ElectLeaders v0-2 (KIP-460). A partition's only replica leads it, so an election never changes anything."""
    is_admin = broker.authorizer.is_admin(request.session)
    results = []
    async for name, partitions in broker.turns.each(_requested(broker, message, is_admin)):
        if is_admin:
            codes = {partition: await _elect(broker, name, partition, message) for partition in partitions}
        else:
            codes = dict.fromkeys(partitions, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
        if message["topic_partitions"] is None:  # for all topics, Kafka omits partitions that need no election
            codes = {partition: code for partition, code in codes.items() if code != ErrorCode.ELECTION_NOT_NEEDED}
        if codes:
            results.append({"topic": name, "partition_result": [_result(*code) for code in codes.items()]})
    code = ErrorCode.NONE if is_admin else ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    return {"error_code": code, "replica_election_results": results}


def _requested(broker: Broker, message: Message, is_admin: bool) -> list[tuple[str, list[int]]]:
    if message["topic_partitions"] is not None:
        return [(topic["topic"], topic["partitions"]) for topic in message["topic_partitions"]]
    if not is_admin:
        return []
    return [(name, sorted(topic.assignment)) for name, topic in sorted(broker.registry.topics.items())]


async def _elect(broker: Broker, name: str, partition: int, message: Message) -> ErrorCode:
    await broker.turns.take()
    topic = await broker.partitions.topic(name)
    if topic is None or partition not in topic.assignment:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if broker.registry.leader(topic, partition) != NO_LEADER:
        return ErrorCode.ELECTION_NOT_NEEDED
    is_preferred = message["election_type"] == _PREFERRED
    return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE if is_preferred else ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE


def _result(partition: int, code: ErrorCode) -> Message:
    return {"partition_id": partition, "error_code": code, "error_message": _REASONS[code]}


async def alter_replica_log_dirs(broker: Broker, request: Request, message: Message) -> Message:
    """AlterReplicaLogDirs v1-2 (KIP-113). A broker has only one data directory, so logs can't be moved."""
    results: dict[str, dict[int, ErrorCode]] = {}
    is_admin = broker.authorizer.is_admin(request.session)
    for directory in message["dirs"]:
        async for topic in broker.turns.each(directory["topics"]):
            codes = results.setdefault(topic["name"], {})
            for partition in topic["partitions"]:
                await broker.turns.take()
                code = _move(broker, directory["path"], topic["name"], partition)
                codes[partition] = code if is_admin else ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    return {
        "results": [
            {
                "topic_name": name,
                "partitions": [{"partition_index": index, "error_code": code} for index, code in codes.items()],
            }
            for name, codes in results.items()
        ]
    }


def _move(broker: Broker, path: str, topic: str, partition: int) -> ErrorCode:
    if "\0" in path or Path(path) != broker.logs.path.absolute():
        return ErrorCode.LOG_DIR_NOT_FOUND
    if (topic, partition) in broker.logs.offline:
        return ErrorCode.KAFKA_STORAGE_ERROR
    if broker.logs.get(topic, partition) is not None:
        return ErrorCode.NONE
    is_known = topic in broker.registry.topics and partition in broker.registry.topics[topic].assignment
    return ErrorCode.REPLICA_NOT_AVAILABLE if is_known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def list_partition_reassignments(broker: Broker, request: Request, message: Message) -> Message:
    """ListPartitionReassignments v0 (KIP-455): always empty; see AlterPartitionReassignments."""
    if not broker.authorizer.is_admin(request.session):
        reason = "only admins list reassignments"
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "error_message": reason, "topics": []}
    return {"error_code": ErrorCode.NONE, "topics": []}


async def alter_partition_reassignments(broker: Broker, request: Request, message: Message) -> Message:
    """AlterPartitionReassignments v0-1 (KIP-455). Without replication a partition stays on its broker.

    Reassigning a partition to its current replicas succeeds without a change. Other replicas get
    INVALID_REPLICA_ASSIGNMENT, and a cancellation gets NO_REASSIGNMENT_IN_PROGRESS.
    """
    answer: Message = {"allow_replication_factor_change": message["allow_replication_factor_change"]}
    is_admin = broker.authorizer.is_admin(request.session)
    denied = ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only admins reassign partitions"
    responses = []
    async for topic in broker.turns.each(message["topics"]):
        partitions = []
        for entry in topic["partitions"]:
            index = entry["partition_index"]
            outcome = await _reassign(broker, topic["name"], index, entry["replicas"]) if is_admin else denied
            code, reason = outcome
            partitions.append({"partition_index": index, "error_code": code, "error_message": reason})
        responses.append({"name": topic["name"], "partitions": partitions})
    code, reason = (ErrorCode.NONE, None) if is_admin else denied
    return answer | {"error_code": code, "error_message": reason, "responses": responses}


async def _reassign(
    broker: Broker, name: str, partition: int, replicas: Sequence[int] | None
) -> tuple[ErrorCode, str | None]:
    await broker.turns.take()
    topic = await broker.partitions.topic(name)
    now = None if topic is None else topic.assignment.get(partition)
    if now is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no partition {name}-{partition}"
    if replicas is None:
        return ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, f"{name}-{partition} is not being reassigned"
    if list(replicas) != list(now):
        reason = f"there is no replication: {name}-{partition} stays on {now}, and can't be moved to {list(replicas)}"
        return ErrorCode.INVALID_REPLICA_ASSIGNMENT, reason
    return ErrorCode.NONE, None
