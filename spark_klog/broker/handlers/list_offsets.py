"""Offsets of logs: ListOffsets and OffsetForLeaderEpoch."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security.authorizer import SEE
from spark_klog.errors import DecodeError, ErrorCode, LogCorrupted, LogRetired
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.segment import Steps
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import EARLIEST, EARLIEST_LOCAL, LATEST, MAX_TIMESTAMP, READ_COMMITTED

_log = logging.getLogger(__name__)
_UNKNOWN = (-1, -1)


async def offset_for_leader_epoch(broker: Broker, request: Request, message: Message) -> Message:
    """OffsetForLeaderEpoch v0-4 (KIP-101, KIP-320): end offset of a leader epoch; consumers detect truncation by it."""
    topics = []
    async for topic in broker.turns.each(message["topics"]):
        partitions = [await _end_of_epoch(broker, request, topic["topic"], entry) for entry in topic["partitions"]]
        topics.append({"topic": topic["topic"], "partitions": partitions})
    return {"topics": topics}


async def _end_of_epoch(broker: Broker, request: Request, topic: str, entry: dict[str, Any]) -> Message:
    index = entry["partition"]
    if refusal := broker.authorizer.refusal(request.session, SEE, topic):
        return {"partition": index, "error_code": refusal}
    log = await broker.partitions.leader_log(topic, index, entry["current_leader_epoch"], for_reading=True)
    if isinstance(log, ErrorCode):
        return {"partition": index, "error_code": log}
    epoch, end = log.end_of_epoch(entry["leader_epoch"])
    return {"partition": index, "error_code": ErrorCode.NONE, "leader_epoch": epoch, "end_offset": end}


async def list_offsets(broker: Broker, request: Request, message: Message) -> Message:
    """ListOffsets v0-10: latest (-1), earliest (-2), of the largest timestamp (-3, v7), or by time in ms.

    With isolation level 1 (read_committed), latest is the last stable offset. Version 0 returns the start offsets of
    segments begun by that time, newest first. There is no tiered storage, so all records are local: -4 (v8), the
    earliest local offset, equals -2; -5 (v9), the last tiered offset, is never found. A partition that is named twice
    gets INVALID_REQUEST, as in Kafka.
    """
    topics = []
    times: Counter[tuple[str, int]] = Counter()
    for topic in message["topics"]:
        await broker.turns.take()
        times.update((topic["name"], entry["partition_index"]) for entry in topic["partitions"])
    is_committed = message["isolation_level"] == READ_COMMITTED
    async for topic in broker.turns.each(message["topics"]):
        name, partitions = topic["name"], []
        for entry in topic["partitions"]:
            await broker.turns.take()
            if times[name, entry["partition_index"]] > 1:
                answer = {"partition_index": entry["partition_index"], "error_code": ErrorCode.INVALID_REQUEST}
            else:
                answer = await _partition(broker, request, name, entry, is_committed=is_committed)
            partitions.append(answer)
        topics.append({"name": name, "partitions": partitions})
    return {"topics": topics}


async def _partition(
    broker: Broker, request: Request, topic: str, entry: dict[str, Any], *, is_committed: bool
) -> Message:
    index = entry["partition_index"]
    log = broker.authorizer.refusal(request.session, SEE, topic) or await broker.partitions.leader_log(
        topic, index, entry["current_leader_epoch"], for_reading=True
    )
    if isinstance(log, ErrorCode):
        return {"partition_index": index, "error_code": log}
    try:
        if request.version == 0:
            offsets = log.offsets_before(entry["timestamp"], entry["max_num_offsets"])
            return {"partition_index": index, "error_code": ErrorCode.NONE, "old_style_offsets": offsets}
        if entry["timestamp"] >= 0 or entry["timestamp"] == MAX_TIMESTAMP:
            for _ in log.check_indexes():
                await broker.turns.take()
            log.check_open()
        timestamp, offset = await _find(broker, log, entry["timestamp"], is_committed=is_committed)
    except (LogCorrupted, DecodeError) as error:
        _log.error("%s-%d can't be searched: %s", topic, index, error)
        return {"partition_index": index, "error_code": ErrorCode.CORRUPT_MESSAGE}
    except LogRetired:
        return {"partition_index": index, "error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    except OSError as error:
        _log.error("%s-%d can't be searched: %s", topic, index, error)
        return {"partition_index": index, "error_code": ErrorCode.KAFKA_STORAGE_ERROR}
    return {
        "partition_index": index,
        "error_code": ErrorCode.NONE,
        "timestamp": timestamp,
        "offset": offset,
        "leader_epoch": log.leader_epoch,
    }


async def _find(broker: Broker, log: PartitionLog, timestamp: int, *, is_committed: bool) -> tuple[int, int]:
    """(timestamp, offset); the timestamp is -1 for latest and earliest, both are -1 if no record is found."""
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return -1, log.start_offset
    record = None
    if timestamp >= 0 or timestamp == MAX_TIMESTAMP:
        record = await _search(broker, log, None if timestamp == MAX_TIMESTAMP else timestamp)
    end = log.last_stable_offset if is_committed else log.high_watermark
    if timestamp == LATEST:
        return -1, end
    return record if record is not None and record[1] < end else _UNKNOWN


async def _search(broker: Broker, log: PartitionLog, timestamp: int | None) -> tuple[int, int] | None:
    """See `PartitionLog.search`; starts over if what it looks through was deleted or compacted meanwhile."""
    while True:
        segments = log.segments
        try:
            record = await _walk(broker, log.search(timestamp))
        except FileNotFoundError:
            log.check_open()
            if log.segments is segments:
                raise
        else:
            log.check_open()
            if record is None or record[1] >= log.start_offset:
                return record


async def _walk(broker: Broker, steps: Steps[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Go through the steps of a search while others are served."""
    answer: object = None
    while True:
        try:
            work = steps.send(answer)
        except StopIteration as ended:
            record: tuple[int, int] | None = ended.value
            return record
        await broker.turns.take()
        answer = None
        if work is not None:
            answer = await broker.decompression.of_log(work)
