"""Fetch v4-12. Waits in the purgatory until min_bytes are there or max_wait_ms have passed.

At least one whole batch is answered for the first partition that has data, however small max_bytes; after it a
range may end within a batch, as Kafka's do. Fetch sessions (v7) are declined by session id 0: clients then send
whole requests. There are no transactions, so that the last stable offset is the high watermark.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.errors import ErrorCode, LogCorrupted, OffsetOutOfRange
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
_NO_SESSION = 0


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    if message["session_id"] != _NO_SESSION:
        return {"error_code": ErrorCode.FETCH_SESSION_ID_NOT_FOUND}
    deadline = time.monotonic() + min(message["max_wait_ms"], 0x7FFFFFFF) / 1000
    keys = [(topic["topic"], entry["partition"]) for topic in message["topics"] for entry in topic["partitions"]]
    while True:
        response, size, failed = await _read(broker, message)
        left = deadline - time.monotonic()
        if failed or size >= message["min_bytes"] or left <= 0:
            return response
        await broker.purgatory.wait(keys, left)


async def _read(broker: Broker, message: Message) -> tuple[Message, int, bool]:
    """(response, bytes of records in it, whether a partition failed)."""
    left = min(message["max_bytes"], broker.config.fetch_max_bytes)
    total, failed = 0, False
    topics = []
    for topic in message["topics"]:
        partitions = []
        for entry in topic["partitions"]:
            partition = await _partition(broker, topic["topic"], entry, left - total, total == 0)
            total += len(partition["records"])
            failed = failed or partition["error_code"] != ErrorCode.NONE
            partitions.append(partition)
        topics.append({"topic": topic["topic"], "partitions": partitions})
    return {"responses": topics}, total, failed


async def _partition(broker: Broker, topic: str, entry: dict[str, Any], left: int, is_first: bool) -> dict[str, Any]:
    index = entry["partition"]
    result: dict[str, Any] = {
        "partition_index": index,
        "error_code": ErrorCode.NONE,
        "high_watermark": -1,
        "records": b"",
    }
    log = await broker.leader_log(topic, index)
    if isinstance(log, ErrorCode):
        return result | {"error_code": log}
    result |= {
        "high_watermark": log.high_watermark,
        "last_stable_offset": log.high_watermark,
        "log_start_offset": log.start_offset,
        "aborted_transactions": [],
    }
    try:
        found = log.read(entry["fetch_offset"], min(left, entry["partition_max_bytes"]))
    except OffsetOutOfRange:
        return result | {"error_code": ErrorCode.OFFSET_OUT_OF_RANGE}
    except LogCorrupted as error:
        _log.error("%s-%d can't be read at offset %d: %s", topic, index, entry["fetch_offset"], error)
        return result | {"error_code": ErrorCode.CORRUPT_MESSAGE}
    if found is not None and (is_first or found.size <= left):
        result["records"] = found
    return result
