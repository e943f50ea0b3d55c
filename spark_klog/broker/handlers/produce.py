"""Produce."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from spark_klog.base.clock import system_ms
from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS
from spark_klog.broker.schema_validation import RegistryAway
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
from spark_klog.records.reading.produced import RejectedRecords, check_keys, check_produced, schema_ids
from spark_klog.wire.codecs import NO_CODEC, Codec, DecompressedTooLarge

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_NO_ANSWER, _LEADER, _ALL = 0, 1, -1
_RETIRED = "the topic was deleted, or the session with ZooKeeper has ended"
#: Bytes of a request without compression that are compressed in the event loop, in less than a millisecond.
_COMPRESSED_AT_ONCE = 8 * 1024
#: The same of those whose schema ids are read.
_READ_AT_ONCE = 64 * 1024
#: What a batch that the broker decompresses may hold, as a multiple of max.message.bytes, or of 1 MiB if that is less:
#: by most codecs and levels less than a second's work.
_MOST_EXPANDED, _LEAST_BYTES = 16, 1024 * 1024
#: What a message set of a producer before 0.11 may have, as such a multiple: its messages become smaller.
_MOST_OF_A_SET = 2
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
    own. If the topic validates schemas, each record's is of its subject (`schema_validation.py`); while the registry
    can't be asked, the error is the one of Confluent Server, which clients retry. No client may produce to internal
    topics; Kafka excepts clients named `__admin_client`, but a client's name proves nothing. A transactional batch is
    accepted only if its partition is in the transaction (KIP-890), so a late batch can't leave a transaction open; from
    version 12 on the partition is added to it, or begins it.
    """
    acks = message["acks"]
    responses = []
    for topic in message["topic_data"]:
        name, topic_id = topic["name"], topic["topic_id"]
        has_id = request.version >= PRODUCE_WITH_TOPIC_IDS
        if has_id:
            named = await broker.partitions.topic_by_id(topic_id)
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
    log = await broker.partitions.leader_log(topic, index)
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
            _check_set(log, records)
            records = memoryview(await _decompressed(broker, log, up_convert, records))
        is_one = request.version >= PRODUCE_WITH_MAGIC_2
        produced = check_produced(records, log.kernel, is_one=is_one, limit=limit)
        if log.config.codec is not None:
            records = await _in_codec(broker, log, log.config.codec, records)
        if log.config.compacts:
            await _check_keys(broker, log, records)
        if log.config.validated:
            try:
                await _check_schemas(broker, log, topic, records)
            except (RejectedRecords, RegistryAway):
                if not log.has_appended(records):  # else its answer was lost, and the schema was deleted since
                    raise
        verified = []
        if produced.is_transactional:
            adds = request.version >= PRODUCE_OF_TRANSACTIONS_2
            verified = await _verified(broker, log, records, transactional_id, adds=adds)
        if produced.timestamp > log.config.message_timestamp_after_max_ms:
            _check_timestamp(log, produced.timestamp)
        while appended is None:
            # no await between these checks and the append: the topic could be deleted, or the transaction end
            if not broker.partitions.serves(log):
                raise LogRetired(errno.ESTALE, _RETIRED, str(log.directory))
            for header, verification in verified:
                _check_transaction(request, log, header, verification)
            appended = log.append_unflushed(records, of_client=True, rolls=False)
            if appended is None:
                await broker.flushes.flush_before_roll(log)
        if log.has_many_unflushed:
            await broker.flushes.flush_many(log)
        if not broker.partitions.serves(log) and not await broker.partitions.confirms(log):
            raise LogRetired(errno.ESTALE, _RETIRED, str(log.directory))
    except ProducerRefused as error:
        code, reason = error.code, str(error)
    except CorruptBatchError as error:
        code, reason = ErrorCode.CORRUPT_MESSAGE, str(error)
    except BatchTooLarge as error:
        code, reason = ErrorCode.MESSAGE_TOO_LARGE, str(error)
    except RejectedRecords as error:
        code, reason = ErrorCode.INVALID_RECORD, str(error)
        rejected = [{"batch_index": at, "batch_index_error_message": text} for at, text in error.reasons.items()]
    except RegistryAway as error:
        code, reason = ErrorCode.NOT_LEADER_OR_FOLLOWER, str(error)
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


def _check_set(log: PartitionLog, records: memoryview) -> None:
    """`BatchTooLarge` for a message set that becomes too large a batch, or takes seconds to become many."""
    limit = _MOST_OF_A_SET * max(log.config.max_message_bytes, _LEAST_BYTES)
    if len(records) > limit:
        raise BatchTooLarge(f"message set of {len(records)} bytes for {log.directory.name}, at most {limit} are taken")


async def _in_codec(broker: Broker, log: PartitionLog, codec: Codec, records: memoryview) -> memoryview:
    """The batches with the codec of the topic's compression.type, made anew if they have another one."""
    codecs, level = {header.codec_id for header, _ in iter_batches(records)}, log.config.level
    if codecs == {codec.id}:
        return records
    if codecs == {NO_CODEC} and len(records) <= _COMPRESSED_AT_ONCE:
        return memoryview(compressed_as(records, codec, level))

    def work(produced: memoryview, limit: int) -> bytearray:
        return compressed_as(produced, codec, level, limit)

    return memoryview(await _decompressed(broker, log, work, records))


async def _check_keys(broker: Broker, log: PartitionLog, records: memoryview) -> None:
    if all(header.codec_id == NO_CODEC for header, _ in iter_batches(records)):
        check_keys(records)
    else:
        await _decompressed(broker, log, check_keys, records)


async def _check_schemas(broker: Broker, log: PartitionLog, topic: str, records: memoryview) -> None:
    """`RejectedRecords` for records whose schemas are not of their subjects, see `SchemaValidator`; `RegistryAway`."""
    validated = log.config.validated
    if len(records) <= _READ_AT_ONCE and all(header.codec_id == NO_CODEC for header, _ in iter_batches(records)):
        ids = schema_ids(records, validated)
    else:
        ids = await _decompressed(broker, log, lambda data, limit: schema_ids(data, validated, limit), records)
    await broker.schemas.check(topic, validated, ids)


async def _decompressed(
    broker: Broker, log: PartitionLog, work: Callable[[memoryview, int], _T], records: memoryview
) -> _T:
    """Call `work`, which decompresses `records` to at most so many bytes, in a thread; `BatchTooLarge`."""
    if len(records) > log.config.max_message_bytes:
        log.check_size(max((header.size for header, _ in iter_batches(records)), default=0))
    limit = _MOST_EXPANDED * max(log.config.max_message_bytes, _LEAST_BYTES)
    try:
        return await broker.decompression.produced(work, records, min(limit, broker.config.decompressed_max_bytes))
    except DecompressedTooLarge as error:
        advice = f"{_MOST_EXPANDED} times max.message.bytes is the most here: send smaller batches"
        raise BatchTooLarge(f"batch for {log.directory.name}: {error}; {advice}") from None


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
    verified = []
    for header, _ in iter_batches(records):
        if isinstance(header, BatchHeader) and header.is_transactional:
            producer = ProducerIdAndEpoch(header.producer_id, header.producer_epoch)
            verified.append((header, await broker.verifier.verify(transactional_id, producer, log, adds=adds)))
    return verified


def _check_transaction(request: Request, log: PartitionLog, header: BatchHeader, verification: Verification) -> None:
    """Raise `ProducerRefused` if a batch does not belong to an ongoing transaction."""
    code, reason = verification.outcome()
    if code:
        log.note_refused(header)
        raise ProducerRefused(as_known(PRODUCE, request.version, code), reason)
