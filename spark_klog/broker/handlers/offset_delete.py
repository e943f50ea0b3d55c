"""OffsetDelete v0 (KIP-496): delete a group's offsets of topics to which no member subscribes."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.expiry import removal_error
from spark_klog.broker.groups.subscription import subscribed_topics
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import BatchTooLarge, PartitionLog
from spark_klog.protocol.codec import Message

_AT_ONCE = 100


def _subscribed(broker: Broker, group_id: str) -> set[str] | None:
    """The topics that the group consumes; None if unknown."""
    group = broker.groups.get(group_id)
    return subscribed_topics(group) if group is not None else set()


async def _remove(broker: Broker, log: PartitionLog, group_id: str, topic: str, partitions: list[int]) -> ErrorCode:
    for start in range(0, max(1, len(partitions)), _AT_ONCE):
        await broker.turns.take()
        await broker.flushes.make_early_room(log)
        subscribed = _subscribed(broker, group_id)  # again: the group may have changed during the waits
        if subscribed is None or topic in subscribed:
            return ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
        broker.offsets.remove(log, group_id, [(topic, index) for index in partitions[start : start + _AT_ONCE]])
    await broker.flushes.flush_many(log)
    return ErrorCode.NONE


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    group_id = message["group_id"]
    if not broker.authorizer.is_admin(request.session):
        return {"error_code": ErrorCode.GROUP_AUTHORIZATION_FAILED}
    log = await broker.coordinator.log_of(group_id)
    if isinstance(log, ErrorCode):
        return {"error_code": log}
    if broker.groups.get(group_id) is None and not broker.offsets.has(group_id):
        return {"error_code": ErrorCode.GROUP_ID_NOT_FOUND}
    if _subscribed(broker, group_id) is None:
        return {"error_code": ErrorCode.NON_EMPTY_GROUP}
    topics = []
    for topic in message["topics"]:
        await broker.turns.take()
        name, partitions = topic["name"], [entry["partition_index"] for entry in topic["partitions"]]
        try:
            code = await _remove(broker, log, group_id, name, partitions)
        except (BatchTooLarge, OSError) as error:
            code = removal_error(group_id, error)
        topics.append(
            {"name": name, "partitions": [{"partition_index": index, "error_code": code} for index in partitions]}
        )
    return {"error_code": ErrorCode.NONE, "topics": topics}
