"""DeleteRecords v0-2 (KIP-107): delete the records before an offset; -1 is the high watermark."""

from __future__ import annotations

import logging
from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS
from spark_klog.errors import ErrorCode, OffsetOutOfRange
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
_HIGH_WATERMARK = -1
_NONE = -1


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    topics = []
    for topic in message["topics"]:
        partitions = [await _delete(broker, request, topic["name"], entry) for entry in topic["partitions"]]
        topics.append({"name": topic["name"], "partitions": partitions})
    return {"topics": topics}


async def _delete(broker: Broker, request: Request, topic: str, entry: dict[str, Any]) -> Message:
    index, offset = entry["partition_index"], entry["offset"]
    result = {"partition_index": index, "low_watermark": _NONE}
    if not broker.authorizer.is_admin(request.session):
        return result | {"error_code": ErrorCode.TOPIC_AUTHORIZATION_FAILED}
    if topic in INTERNAL_TOPICS:
        return result | {"error_code": ErrorCode.INVALID_TOPIC_EXCEPTION}
    log = await broker.leader_log(topic, index)
    if isinstance(log, ErrorCode):
        return result | {"error_code": log}
    if not log.config.deletes:
        return result | {"error_code": ErrorCode.POLICY_VIOLATION}  # as in Kafka for compacted topics
    try:
        if offset in (_HIGH_WATERMARK, log.high_watermark) and log.segments[-1].size:  # the log will roll
            await broker.flushes.flush(log, with_snapshot=True)
        start = log.delete_records(log.high_watermark if offset == _HIGH_WATERMARK else offset)
    except OffsetOutOfRange:
        return result | {"error_code": ErrorCode.OFFSET_OUT_OF_RANGE}
    except OSError as error:
        _log.error("records of %s before %d can't be deleted: %s", log.directory, offset, error)
        return result | {"error_code": ErrorCode.KAFKA_STORAGE_ERROR}
    _log.info("%s (%s) deleted the records of %s-%d before %d", request.client_id, request.peer, topic, index, start)
    return result | {"low_watermark": start, "error_code": ErrorCode.NONE}
