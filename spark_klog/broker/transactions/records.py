"""Records of __transaction_state, in Kafka's format, and the markers that end transactions.

    key    INT16 version 0, STRING transactional id
    value  INT16 version, INT64 producer id, INT16 epoch, INT32 timeout (ms), INT8 state (see transaction.py),
           ARRAY of (STRING topic, ARRAY of INT32 partition), null in state Empty, INT64 time of the last change (ms),
           INT64 time of the start (ms, -1: none); null for a transactional id that is forgotten

Version 1 has compact strings and arrays and tagged fields (KIP-482). Version 0 is written, which every Kafka reads;
both are read. Source: TransactionLogKey.json and TransactionLogValue.json of Kafka 3.9.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from spark_klog.broker.transactions.transaction import NO_EPOCH, Producer, State, TopicPartition, Transaction
from spark_klog.errors import DecodeError
from spark_klog.records.batch_v2 import CONTROL_BIT, TRANSACTIONAL_BIT
from spark_klog.records.control import ABORT, COMMIT, Marker, encode_marker
from spark_klog.records.own_batch import own_batch
from spark_klog.wire.primitives import Buffer, Reader, Writer

_KEY_VERSION = 0
_VALUE_VERSION, _FLEXIBLE = 0, 1
_NULL = -1


def partitions_by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Both in order."""
    topics: dict[str, list[int]] = defaultdict(list)
    for topic, partition in sorted(partitions):
        topics[topic].append(partition)
    return topics


def encode_key(transactional_id: str) -> bytes:
    writer = Writer()
    writer.int16(_KEY_VERSION)
    writer.nullable_string(transactional_id)
    return writer.to_bytes()


def decode_key(data: Buffer) -> str | None:
    """The transactional id; None for a key of another version. `DecodeError`."""
    reader = Reader(data)
    return reader.nullable_string() if reader.int16() == _KEY_VERSION else None


def encode_value(transaction: Transaction) -> bytes:
    writer = Writer()
    writer.int16(_VALUE_VERSION)
    writer.int64(transaction.producer.producer_id)
    writer.int16(transaction.producer.epoch)
    writer.int32(transaction.timeout_ms)
    writer.int8(transaction.state)
    if transaction.state is State.EMPTY:
        writer.int32(_NULL)
    else:
        topics = partitions_by_topic(transaction.partitions)
        writer.int32(len(topics))
        for topic, partitions in topics.items():
            writer.nullable_string(topic)
            writer.int32(len(partitions))
            for partition in partitions:
                writer.int32(partition)
    writer.int64(transaction.updated_ms)
    writer.int64(transaction.started_ms)
    return writer.to_bytes()


def decode_value(transactional_id: str, data: Buffer) -> Transaction:
    """`DecodeError`."""
    reader = Reader(data)
    version = reader.int16()
    if version not in (_VALUE_VERSION, _FLEXIBLE):
        raise DecodeError(f"transaction {transactional_id!r} of unknown version {version}")
    is_flexible = version == _FLEXIBLE
    producer_id, epoch, timeout_ms, number = reader.int64(), reader.int16(), reader.int32(), reader.int8()
    try:
        state = State(number)
    except ValueError:
        raise DecodeError(f"transaction {transactional_id!r} in unknown state {number}") from None
    if state in (State.DEAD, State.PREPARE_EPOCH_FENCE):
        raise DecodeError(f"transaction {transactional_id!r} in state {state.text}, which is never written")
    partitions = set(_partitions(reader, is_flexible))
    updated_ms, started_ms = reader.int64(), reader.int64()
    producer, last = Producer(producer_id, epoch), Producer(producer_id, NO_EPOCH)
    return Transaction(
        transactional_id, producer, last, timeout_ms, state, frozenset(partitions), started_ms, updated_ms
    )  # fmt: skip


def _partitions(reader: Reader, is_flexible: bool) -> list[TopicPartition]:
    found = []
    for _ in range(max(0, reader.count(is_flexible))):
        topic = reader.compact_nullable_string() if is_flexible else reader.nullable_string()
        found += [(topic or "", reader.int32()) for _ in range(max(0, reader.count(is_flexible)))]
        if is_flexible:
            reader.skip_tags()
    return found


def state_batch(transactional_id: str, transaction: Transaction | None, now_ms: int) -> bytearray:
    """A batch for __transaction_state; None makes the id forgotten."""
    value = None if transaction is None else encode_value(transaction)
    return own_batch([(encode_key(transactional_id), value)], now_ms)


def marker_batch(producer: Producer, *, commits: bool, coordinator_epoch: int, now_ms: int) -> bytearray:
    """The control batch that ends a producer's transaction in a partition."""
    row = encode_marker(Marker(COMMIT if commits else ABORT, coordinator_epoch))
    attributes = TRANSACTIONAL_BIT | CONTROL_BIT
    return own_batch([row], now_ms, attributes=attributes, producer=(producer.producer_id, producer.epoch))
