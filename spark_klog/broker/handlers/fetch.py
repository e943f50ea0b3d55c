"""Fetch."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.fetches import PartitionKey
from spark_klog.broker.security.authorizer import READ
from spark_klog.errors import DecodeError, ErrorCode, LogCorrupted, OffsetOutOfRange, ProtocolError
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.segment import FileRange
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import FETCH_WITH_TOPIC_IDS, READ_COMMITTED
from spark_klog.records.building.conversion import Converted, down_convert
from spark_klog.records.formats.batch import iter_batches, next_offset_after
from spark_klog.wire.codecs import ZSTD
from spark_klog.wire.primitives import Buffer

_log = logging.getLogger(__name__)
#: The first versions that support magic 1 and magic 2.
_FIRST_MAGIC_1, _FIRST_MAGIC_2 = 2, 4
#: Earlier versions get part of a message if they ask for too few bytes, and then ask for more.
_FIRST_WHOLE_BATCH = 3
#: Earlier versions are refused, as in Kafka, where a topic's compression.type is zstd.
_FIRST_ZSTD = 10


async def fetch(broker: Broker, request: Request, message: Message) -> Message:
    """Fetch v0-17. Waits in the purgatory until min_bytes are available or max_wait_ms have passed.

    A partition that is named twice is answered once, as its last entry asks, like in Kafka. From version 3 on, the
    first partition with data returns at least one whole batch, even if it exceeds max_bytes. Apart from that, a range
    may end within a batch, as in Kafka. Isolation level 1 (read_committed) gets records before the last stable offset,
    and a list of the aborted transactions among them. Versions 0-3 get message sets of magic 0 or 1: newer batches are
    converted instead of sent from the file.
    """
    now = time.monotonic()
    epoch, has_ids = message["session_epoch"], request.version >= FETCH_WITH_TOPIC_IDS
    requested = await _requested(broker, message)
    outcome = broker.fetch_sessions.find(
        message["session_id"], epoch, requested, await _forgotten(broker, message), now, has_ids=has_ids
    )
    if isinstance(outcome, ErrorCode):
        return {"error_code": outcome}
    session, is_incremental = outcome
    if session is not None:
        requested = session.partitions
    next_epoch = session.next_epoch if session is not None else None
    deadline = now + min(message["max_wait_ms"], 0x7FFFFFFF) / 1000
    while True:
        answers, size, is_due = await _read(broker, request, message, requested)
        left = deadline - time.monotonic()
        if is_due or not requested or size >= message["min_bytes"] or left <= 0 or broker.purgatory.is_closed:
            break
        if not _has_more(broker, answers):  # no await between this check and the wait
            answers = []  # they may be large, and are read again
            await broker.purgatory.wait([broker.registry.key(*key) for key, _ in requested], left)
    if session is None:
        return {"responses": _by_topic(answers)}
    if session.next_epoch != next_epoch:  # a request on another connection has used the session meanwhile
        return {"error_code": ErrorCode.INVALID_FETCH_SESSION_EPOCH}
    changed = [(key, answer) for key, answer in answers if session.note(key, answer) or not is_incremental]
    return {"session_id": session.id, "responses": _by_topic(changed)}


def _has_more(broker: Broker, answers: list[tuple[PartitionKey, Message]]) -> bool:
    """Whether partitions have changed since they were read, which yields to other work."""
    logs = ((broker.logs.get(*broker.registry.key(*key)), answer) for key, answer in answers)
    return any(log is None or log.high_watermark != answer["high_watermark"] for log, answer in logs)


async def _requested(broker: Broker, message: Message) -> list[tuple[PartitionKey, dict[str, Any]]]:
    requested = {}
    for topic in message["topics"]:
        for entry in topic["partitions"]:
            await broker.turns.take()
            requested[PartitionKey(topic["topic"], topic["topic_id"], entry["partition"])] = entry
    return list(requested.items())


async def _forgotten(broker: Broker, message: Message) -> list[PartitionKey]:
    forgotten = []
    for topic in message["forgotten_topics_data"]:
        for partition in topic["partitions"]:
            await broker.turns.take()
            forgotten.append(PartitionKey(topic["topic"], topic["topic_id"], partition))
    return forgotten


def _by_topic(answers: list[tuple[PartitionKey, Message]]) -> list[Message]:
    """Group adjacent entries of a topic, and keep the order of partitions."""
    topics: list[dict[str, Any]] = []
    for key, answer in answers:
        if not topics or (topics[-1]["topic"], topics[-1]["topic_id"]) != key[:2]:
            topics.append({"topic": key.topic, "topic_id": key.topic_id, "partitions": []})
        topics[-1]["partitions"].append(answer)
    return topics


async def _read(
    broker: Broker, request: Request, message: Message, requested: list[tuple[PartitionKey, dict[str, Any]]]
) -> tuple[list[tuple[PartitionKey, Message]], int, bool]:
    """(response by partition, total bytes of records, whether to answer at once).

    An error is answered at once, and records of an older segment: their range ends with it, and more may never come.
    """
    left = min(message["max_bytes"], broker.config.fetch_max_bytes)
    is_committed = message["isolation_level"] == READ_COMMITTED
    total, is_due = 0, False
    answers = []
    for key, entry in requested:
        partition, is_older = await _partition(
            broker, request, key, entry, left - total, total == 0, is_committed=is_committed
        )
        total += len(partition["records"])
        is_due = is_due or partition["error_code"] != ErrorCode.NONE or is_older
        answers.append((key, partition))
    return answers, total, is_due


async def _partition(
    broker: Broker,
    request: Request,
    key: PartitionKey,
    entry: dict[str, Any],
    left: int,
    is_first: bool,
    *,
    is_committed: bool,
) -> tuple[dict[str, Any], bool]:
    """(response of a partition, whether its records are of an older segment)."""
    index = entry["partition"]
    result: dict[str, Any] = {
        "partition_index": index,
        "error_code": ErrorCode.NONE,
        "high_watermark": -1,
        "records": b"",
    }
    topic = key.topic
    if request.version >= FETCH_WITH_TOPIC_IDS:
        named = await broker.partitions.topic_by_id(key.topic_id)
        if named is None:
            return result | {"error_code": ErrorCode.UNKNOWN_TOPIC_ID}, False
        topic = named.name
    log = broker.authorizer.refusal(request.session, READ, topic) or await broker.partitions.leader_log(
        topic, index, entry["current_leader_epoch"], for_reading=True
    )
    if isinstance(log, ErrorCode):
        return result | {"error_code": log}, False
    if request.version < _FIRST_ZSTD and log.config.compression_type == "zstd":
        return result | {"error_code": ErrorCode.UNSUPPORTED_COMPRESSION_TYPE}, False
    stable = log.last_stable_offset
    result |= {
        "high_watermark": log.high_watermark,
        "last_stable_offset": stable,
        "log_start_offset": log.start_offset,
        "aborted_transactions": [],
    }
    offset, max_bytes = entry["fetch_offset"], min(left, entry["partition_max_bytes"])
    try:
        data: FileRange | bytearray | None = log.read(offset, max_bytes, stable if is_committed else None)
        if is_committed and data is not None:
            assert isinstance(data, FileRange)
            aborted = log.aborted_transactions(offset, min(stable, log.offset_after(offset, data)))
            result["aborted_transactions"] = [
                {"producer_id": txn.producer_id, "first_offset": txn.first_offset} for txn in aborted
            ]
        if request.version < _FIRST_MAGIC_2 and data is not None:
            data = await _converted(broker, request, log, offset, max_bytes)
            if request.version < _FIRST_WHOLE_BATCH:
                del data[max(0, max_bytes) :]
    except ProtocolError as error:
        _log.warning("%s (%s) fetches with version %d: %s", request.client_id, request.peer, request.version, error)
        return result | {"error_code": error.code}, False
    except OffsetOutOfRange:
        return result | {"error_code": ErrorCode.OFFSET_OUT_OF_RANGE}, False
    except (LogCorrupted, DecodeError) as error:
        _log.error("%s-%d can't be read at offset %d: %s", topic, index, entry["fetch_offset"], error)
        return result | {"error_code": ErrorCode.CORRUPT_MESSAGE}, False
    except OSError as error:
        _log.error("%s-%d can't be read at offset %d: %s", topic, index, entry["fetch_offset"], error)
        return result | {"error_code": ErrorCode.KAFKA_STORAGE_ERROR}, False
    if data is None or not (is_first or len(data) <= left):
        return result, False
    end = stable if is_committed else log.high_watermark
    return result | {"records": data}, bool(data) and log.is_in_older_segment(offset, end)


def _convertible(data: Buffer) -> memoryview:
    """The batches before the first zstd batch, which old magics can't hold; a leading one is kept, to be refused."""
    size = 0
    for header, _ in iter_batches(data):
        if header.codec_id == ZSTD and size:
            break
        size += header.size
    return memoryview(data)[:size]


async def _converted(broker: Broker, request: Request, log: PartitionLog, offset: int, max_bytes: int) -> bytearray:
    """Convert batches from `offset` on to an old magic, in a thread; empty if only control batches are left."""
    magic = 1 if request.version >= _FIRST_MAGIC_1 else 0
    while (part := log.read(offset, max_bytes)) is not None:
        work = partial(_message_set, part, magic, offset, broker.config.decompressed_max_bytes)
        converted, offset = await broker.decompression.of_log(work)
        if converted.lost_headers:
            _log.info(
                "%s (%s) fetches %s with version %d: left out %d headers of %d records",
                *(request.client_id, request.peer, log.directory.name, request.version),
                *(converted.lost_headers, converted.records),
            )
        if converted.data:
            return converted.data
    return bytearray()


def _message_set(part: FileRange, magic: int, offset: int, limit: int) -> tuple[Converted, int]:
    """(the batches of a range, read and converted; the offset after them)."""
    data = _convertible(part.read())
    if not data:  # else the caller would read from the same offset on for ever
        raise LogCorrupted(f"the file ends before position {part.position + part.size}")
    return down_convert(data, magic, offset, limit), next_offset_after(data, offset)
