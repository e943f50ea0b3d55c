"""AlterPartitionReassignments v0-1 (KIP-455). Without replication a partition stays on its broker.

Reassigning a partition to its current replicas succeeds without a change. Other replicas get
INVALID_REPLICA_ASSIGNMENT, and a cancellation gets NO_REASSIGNMENT_IN_PROGRESS.
"""

from __future__ import annotations

from collections.abc import Sequence

from spark_klog.broker.broker import Broker, Request
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    answer: Message = {"allow_replication_factor_change": message["allow_replication_factor_change"]}
    is_admin = broker.authorizer.is_admin(request.session)
    denied = ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only admins reassign partitions"
    responses = []
    for topic in message["topics"]:
        partitions = []
        for entry in topic["partitions"]:
            index = entry["partition_index"]
            found = await _reassign(broker, topic["name"], index, entry["replicas"]) if is_admin else denied
            code, reason = found
            partitions.append({"partition_index": index, "error_code": code, "error_message": reason})
        responses.append({"name": topic["name"], "partitions": partitions})
    code, reason = (ErrorCode.NONE, None) if is_admin else denied
    return answer | {"error_code": code, "error_message": reason, "responses": responses}


async def _reassign(
    broker: Broker, name: str, partition: int, replicas: Sequence[int] | None
) -> tuple[ErrorCode, str | None]:
    await broker.turns.take()
    topic = await broker.topic(name)
    now = None if topic is None else topic.assignment.get(partition)
    if now is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no partition {name}-{partition}"
    if replicas is None:
        return ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, f"{name}-{partition} is not being reassigned"
    if list(replicas) != list(now):
        reason = f"there is no replication: {name}-{partition} stays on {now}, and can't be moved to {list(replicas)}"
        return ErrorCode.INVALID_REPLICA_ASSIGNMENT, reason
    return ErrorCode.NONE, None
