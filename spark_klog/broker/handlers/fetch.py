"""Fetch v0-12. Waits in the purgatory until min_bytes are there or max_wait_ms have passed.

At least one whole batch is answered for the first partition that has data, however small max_bytes; after it a
range may end within a batch, as Kafka's do. Fetch sessions (v7) are declined by session id 0: clients then send
whole requests. Fetchers of isolation level 1 (read_committed) get nothing from the last stable offset on, and the
list of aborted transactions. Versions 0-3 get message sets of magic 0 or 1: what is newer in the log is converted, not
sent from the file.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security.authorizer import READ
from spark_klog.errors import DecodeError, ErrorCode, LogCorrupted, OffsetOutOfRange, ProtocolError
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segment import FileRange
from spark_klog.protocol.codec import Message
from spark_klog.records.batch import iter_batches, next_offset_after
from spark_klog.records.conversion import down_convert
from spark_klog.wire.primitives import Buffer

_log = logging.getLogger(__name__)
_NO_SESSION = 0
_READ_COMMITTED = 1
#: The first versions that take magic 1, and magic 2.
_FIRST_MAGIC_1, _FIRST_MAGIC_2 = 2, 4
_ZSTD = 4


async def handle(broker: Broker, request: Request, message: Message) -> Message:
    if message["session_id"] != _NO_SESSION:
        return {"error_code": ErrorCode.FETCH_SESSION_ID_NOT_FOUND}
    deadline = time.monotonic() + min(message["max_wait_ms"], 0x7FFFFFFF) / 1000
    keys = [(topic["topic"], entry["partition"]) for topic in message["topics"] for entry in topic["partitions"]]
    while True:
        response, size, failed = await _read(broker, request, message)
        left = deadline - time.monotonic()
        if failed or size >= message["min_bytes"] or left <= 0:
            return response
        await broker.purgatory.wait(keys, left)


async def _read(broker: Broker, request: Request, message: Message) -> tuple[Message, int, bool]:
    """(response, bytes of records in it, whether a partition failed)."""
    left = min(message["max_bytes"], broker.config.fetch_max_bytes)
    is_committed = message["isolation_level"] == _READ_COMMITTED
    total, failed = 0, False
    topics = []
    for topic in message["topics"]:
        partitions = []
        for entry in topic["partitions"]:
            partition = await _partition(
                broker, request, topic["topic"], entry, left - total, total == 0, is_committed=is_committed
            )
            total += len(partition["records"])
            failed = failed or partition["error_code"] != ErrorCode.NONE
            partitions.append(partition)
        topics.append({"topic": topic["topic"], "partitions": partitions})
    return {"responses": topics}, total, failed


async def _partition(
    broker: Broker,
    request: Request,
    topic: str,
    entry: dict[str, Any],
    left: int,
    is_first: bool,
    *,
    is_committed: bool,
) -> dict[str, Any]:
    index = entry["partition"]
    result: dict[str, Any] = {
        "partition_index": index,
        "error_code": ErrorCode.NONE,
        "high_watermark": -1,
        "records": b"",
    }
    log = broker.authorizer.refusal(request.session, READ, topic) or await broker.leader_log(topic, index)
    if isinstance(log, ErrorCode):
        return result | {"error_code": log}
    stable = log.last_stable_offset
    result |= {
        "high_watermark": log.high_watermark,
        "last_stable_offset": stable,
        "log_start_offset": log.start_offset,
        "aborted_transactions": [],
    }
    offset, max_bytes = entry["fetch_offset"], min(left, entry["partition_max_bytes"])
    try:
        found: FileRange | bytearray | None = log.read(offset, max_bytes, stable if is_committed else None)
        if is_committed and found is not None:
            aborted = log.aborted_transactions(offset, stable)
            result["aborted_transactions"] = [
                {"producer_id": item.producer_id, "first_offset": item.first_offset} for item in aborted
            ]
        if request.version < _FIRST_MAGIC_2 and found is not None:
            found = _converted(broker, request, log, offset, max_bytes)
    except ProtocolError as error:
        _log.warning("%s (%s) fetches by version %d: %s", request.client_id, request.peer, request.version, error)
        return result | {"error_code": error.code}
    except OffsetOutOfRange:
        return result | {"error_code": ErrorCode.OFFSET_OUT_OF_RANGE}
    except (LogCorrupted, DecodeError) as error:
        _log.error("%s-%d can't be read at offset %d: %s", topic, index, entry["fetch_offset"], error)
        return result | {"error_code": ErrorCode.CORRUPT_MESSAGE}
    if found is not None and (is_first or len(found) <= left):
        result["records"] = found
    return result


def _convertible(data: Buffer) -> memoryview:
    """The batches before one of zstd, which older magics do not have; with it where it is the first, to be refused."""
    size = 0
    for header, _ in iter_batches(data):
        if header.codec_id == _ZSTD and size:
            break
        size += header.size
    return memoryview(data)[:size]


def _converted(broker: Broker, request: Request, log: PartitionLog, offset: int, max_bytes: int) -> bytearray:
    """Batches from `offset` on as an old fetcher reads them; none where only control batches are left."""
    magic = 1 if request.version >= _FIRST_MAGIC_1 else 0
    while (found := log.read(offset, max_bytes)) is not None:
        data = _convertible(found.read())
        converted = down_convert(data, magic, offset, broker.config.decompressed_max_bytes)
        if converted.lost_headers:
            _log.info(
                "%s (%s) fetches %s by version %d: %d headers of %d records left out",
                *(request.client_id, request.peer, log.directory.name, request.version),
                *(converted.lost_headers, converted.records),
            )
        if converted.data:
            return converted.data
        offset = next_offset_after(data, offset)
    return bytearray()
