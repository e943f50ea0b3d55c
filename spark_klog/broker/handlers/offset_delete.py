"""OffsetDelete v0 (KIP-496): a group's offsets of topics that no member subscribes to."""

from __future__ import annotations

import logging

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.coordinator.subscription import subscribed_topics
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    group_id = message["group_id"]
    if not broker.authorizer.is_admin(request.session):
        return {"error_code": ErrorCode.GROUP_AUTHORIZATION_FAILED}
    log = await broker.coordinator.log_of(group_id)
    if isinstance(log, ErrorCode):
        return {"error_code": log}
    group = broker.groups.get(group_id)
    if group is None and not broker.offsets.has(group_id):
        return {"error_code": ErrorCode.GROUP_ID_NOT_FOUND}
    subscribed = subscribed_topics(group) if group is not None else set()
    if subscribed is None:
        return {"error_code": ErrorCode.NON_EMPTY_GROUP}
    topics = []
    for topic in message["topics"]:
        await broker.turns.take()
        name, partitions = topic["name"], [entry["partition_index"] for entry in topic["partitions"]]
        code = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if name in subscribed else ErrorCode.NONE
        if not code:
            try:
                broker.offsets.remove(log, group_id, [(name, index) for index in partitions])
            except OSError as error:
                _log.error("offsets of group %s can't be removed: %s", group_id, error)
                code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        topics.append(
            {"name": name, "partitions": [{"partition_index": index, "error_code": code} for index in partitions]}
        )
    return {"error_code": ErrorCode.NONE, "topics": topics}
