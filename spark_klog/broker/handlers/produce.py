"""Produce."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

from spark_klog.base.clock import system_ms
from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS
from spark_klog.broker.security.authorizer import WRITE
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.broker.transactions.verification import Verification, as_known
from spark_klog.errors import CorruptBatchError, DecodeError, ErrorCode, LogRetired
from spark_klog.log.config import CREATE_TIME
from spark_klog.log.partition_log import Appended, BatchTooLarge, PartitionLog
from spark_klog.log.producer_state import ProducerRefused
from spark_klog.protocol.apis import PRODUCE
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import PRODUCE_OF_TRANSACTIONS_2, PRODUCE_WITH_MAGIC_2, PRODUCE_WITH_TOPIC_IDS
from spark_klog.records.building.conversion import compressed_as, up_convert
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.reading.produced import RejectedRecords, check_keys, check_produced
from spark_klog.wire.codecs import NO_CODEC

_log = logging.getLogger(__name__)
_NO_ANSWER, _LEADER, _ALL = 0, 1, -1
_RETIRED = "the topic was deleted, or the session with ZooKeeper has ended"
#: Bytes of a request without compression that are compressed in the event loop, in less than a millisecond.
_COMPRESSED_AT_ONCE = 8 * 1024
#: Why a broker has no log to append to, where it is not that another one leads.
_NO_LOG = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "does not exist",
    ErrorCode.LEADER_NOT_AVAILABLE: "is new: broker {} has not made its log yet",
    ErrorCode.KAFKA_STORAGE_ERROR: "can't be written: its log on broker {} is offline, see what that has logged",
}


async def produce(broker: Broker, request: Request, message: Message) -> Message | None:
    """Produce v0-13. acks=0 gets no response; 1 and -1 are equal, since there is no replication.

    Versions 0-2 may carry message sets of magic 0 and 1, which the log stores as magic 2. Later versions carry exactly
    one batch per partition; from version 8 on the response names the records that a topic does not take (KIP-467).
    Batches are validated first (`records/reading/produced.py`), and compressed anew for a topic with a codec of its
    own. No client may produce to internal topics; Kafka excepts clients named `__admin_client`, but a client's name
    proves nothing. A transactional batch is accepted only if its partition is in the transaction (KIP-890), so a
    late batch can't leave a transaction open; from version 12 on the partition is added to it, or begins it.
    """
    acks = message["acks"]
    responses = []
    for topic in message["topic_data"]:
        name, topic_id = topic["name"], topic["topic_id"]
        has_id = request.version >= PRODUCE_WITH_TOPIC_IDS
        if has_id:
            named = await broker.topic_by_id(topic_id)
            name = named.name if named is not None else ""
        partitions = []
        for data in topic["partition_data"]:
            if acks not in (_NO_ANSWER, _LEADER, _ALL):
                partitions.append(_failed(data["index"], ErrorCode.INVALID_REQUIRED_ACKS, f"acks={acks}"))
            elif not name and has_id:
                partitions.append(_failed(data["index"], ErrorCode.UNKNOWN_TOPIC_ID, f"no topic has the id {topic_id}"))
            else:
                partitions.append(await _append(broker, request, name, data, message["transactional_id"]))
        responses.append({"name": name, "topic_id": topic_id, "partition_responses": partitions})
    if acks != _NO_ANSWER:
        return {"responses": responses}
    for topic in responses:
        for partition in topic["partition_responses"]:
            if partition["error_code"]:
                # acks=0 has no response; closing the connection makes the client refresh its metadata
                raise ConnectionError(f"produce to {topic['name']}-{partition['index']} with acks=0 failed")
    return None


def _failed(index: int, code: ErrorCode, reason: str) -> Message:
    return {"index": index, "error_code": code, "error_message": reason}


async def _append(
    broker: Broker, request: Request, topic: str, data: dict[str, Any], transactional_id: str | None
) -> Message:
    index, records = data["index"], data["records"]
    if not broker.authorizer.allows(request.session, WRITE, topic):
        return _failed(index, ErrorCode.TOPIC_AUTHORIZATION_FAILED, f"not authorized to write to topic {topic}")
    if topic in INTERNAL_TOPICS:
        return _failed(index, ErrorCode.INVALID_TOPIC_EXCEPTION, f"only the broker writes to internal topic {topic}")
    log = await broker.leader_log(topic, index)
    if isinstance(log, ErrorCode):
        why = _NO_LOG.get(log, "is not led by broker {}").format(broker.config.broker_id)
        return _failed(index, log, f"{topic}-{index} {why}")
    if records is None:
        return _failed(index, ErrorCode.INVALID_RECORD, "no records")
    rejected: list[Message] = []
    appended: Appended | None = None
    try:
        limit = broker.config.decompressed_max_bytes
        if request.version < PRODUCE_WITH_MAGIC_2:
            async with broker.decompressing:
                records = memoryview(await asyncio.to_thread(up_convert, records, limit))
        is_one = request.version >= PRODUCE_WITH_MAGIC_2
        produced = check_produced(records, log.kernel, is_one=is_one, limit=limit)
        records = await _in_codec_of(broker, log, records)
        if log.config.compacts:
            await _check_keys(broker, records, limit)
        verified = []
        if produced.is_transactional:
            adds = request.version >= PRODUCE_OF_TRANSACTIONS_2
            verified = await _verified(broker, log, records, transactional_id, adds=adds)
        if produced.timestamp > log.config.message_timestamp_after_max_ms:
            _check_timestamp(log, produced.timestamp)
        while appended is None:
            # no await between these checks and the append: the topic could be deleted, or the transaction end
            if not broker.serves(log):
                raise LogRetired(errno.ESTALE, _RETIRED, str(log.directory))
            for header, verification in verified:
                _check_transaction(request, log, header, verification)
            appended = log.append_unflushed(records, of_client=True, rolls=False)
            if appended is None:
                await broker.flushes.flush_before_roll(log)
        if log.has_many_unflushed:
            await broker.flushes.flush_many(log)
        if not broker.serves(log) and not await broker.confirms(log):
            raise LogRetired(errno.ESTALE, _RETIRED, str(log.directory))
    except ProducerRefused as error:
        code, reason = error.code, str(error)
    except CorruptBatchError as error:
        code, reason = ErrorCode.CORRUPT_MESSAGE, str(error)
    except BatchTooLarge as error:
        code, reason = ErrorCode.MESSAGE_TOO_LARGE, str(error)
    except RejectedRecords as error:
        code, reason = ErrorCode.INVALID_RECORD, str(error)
        rejected = [{"batch_index": each, "batch_index_error_message": error.reason} for each in error.indexes]
    except DecodeError as error:
        code, reason = ErrorCode.INVALID_RECORD, str(error)
    except LogRetired as error:
        is_gone = broker.registry.holds()
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if is_gone else ErrorCode.NOT_LEADER_OR_FOLLOWER
        reason = str(error)
    except OSError as error:
        code, reason = ErrorCode.KAFKA_STORAGE_ERROR, f"{log.directory}: {error.strerror}"
    else:
        broker.purgatory.wake((topic, index))
        return {
            "index": index,
            "error_code": ErrorCode.NONE,
            "base_offset": appended.base_offset,
            "log_append_time_ms": appended.append_time,
            "log_start_offset": log.start_offset,
        }
    # what is appended, but not flushed or confirmed, may be there twice after the client has sent it again
    what = "nothing appended" if appended is None else "appended, but not acknowledged"
    _log.warning("%s (%s): %s, %s: %s", request.client_id, request.peer, code.name, what, reason)
    return _failed(index, code, reason) | {"record_errors": rejected}


async def _in_codec_of(broker: Broker, log: PartitionLog, records: memoryview) -> memoryview:
    """The batches with the codec of the topic's compression.type, made anew if they have another one."""
    codec, level, limit = log.config.codec, log.config.level, broker.config.decompressed_max_bytes
    codecs = set() if codec is None else {header.codec_id for header, _ in iter_batches(records)}
    if codec is None or codecs == {codec.id}:
        return records
    if codecs == {NO_CODEC} and len(records) <= _COMPRESSED_AT_ONCE:
        return memoryview(compressed_as(records, codec, level, limit))
    async with broker.decompressing:
        return memoryview(await asyncio.to_thread(compressed_as, records, codec, level, limit))


async def _check_keys(broker: Broker, records: memoryview, limit: int) -> None:
    """Compressed batches may take a second: they are checked in a thread, one at a time because of their memory."""
    if all(header.codec_id == NO_CODEC for header, _ in iter_batches(records)):
        check_keys(records, limit)
    else:
        async with broker.decompressing:
            await asyncio.to_thread(check_keys, records, limit)


def _check_timestamp(log: PartitionLog, timestamp: int) -> None:
    """Raise `ProducerRefused` if the largest timestamp (ms) of a request is too far in the future."""
    limit = log.config.message_timestamp_after_max_ms
    if log.config.message_timestamp_type == CREATE_TIME and timestamp - system_ms() > limit:
        reason = (
            f"timestamp {timestamp} is more than message.timestamp.after.max.ms={limit} ahead of the broker's clock"
        )
        raise ProducerRefused(ErrorCode.INVALID_TIMESTAMP, reason)


async def _verified(
    broker: Broker, log: PartitionLog, records: memoryview, transactional_id: str | None, *, adds: bool
) -> list[tuple[BatchHeader, Verification]]:
    """Verify the transactional batches, see `TransactionVerifier`; `ProducerRefused` without a transactional id."""
    if transactional_id is None:
        reason = "a transactional batch in a request without a transactional id"
        raise ProducerRefused(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, reason)
    found = []
    for header, _ in iter_batches(records):
        if isinstance(header, BatchHeader) and header.is_transactional:
            producer = ProducerIdAndEpoch(header.producer_id, header.producer_epoch)
            found.append((header, await broker.verifier.verify(transactional_id, producer, log, adds=adds)))
    return found


def _check_transaction(request: Request, log: PartitionLog, header: BatchHeader, verification: Verification) -> None:
    """Raise `ProducerRefused` if a batch does not belong to an ongoing transaction."""
    code, reason = verification.outcome()
    if code:
        log.note_refused(header)
        raise ProducerRefused(as_known(PRODUCE, request.version, code), reason)
