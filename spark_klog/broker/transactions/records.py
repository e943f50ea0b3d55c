"""Records of __transaction_state, and the markers that end transactions. Their bytes: `protocol.tables.stored`.

A null value removes the transactional id. Version 0 is written, which every Kafka reads; both are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from spark_klog.broker.transactions.transaction import NO_EPOCH, Producer, State, TopicPartition, Transaction
from spark_klog.errors import DecodeError
from spark_klog.protocol.codec import decode_versioned, encode_versioned
from spark_klog.protocol.tables.stored import TRANSACTION_LOG_KEY, TRANSACTION_LOG_VALUE
from spark_klog.records.batch_v2 import CONTROL_BIT, TRANSACTIONAL_BIT
from spark_klog.records.control import ABORT, COMMIT, EndTransactionMarker, encode_marker
from spark_klog.records.own_batch import own_batch
from spark_klog.wire.primitives import Buffer, Reader

_VERSION = 0


def partitions_by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Both in order."""
    topics: dict[str, list[int]] = defaultdict(list)
    for topic, partition in sorted(partitions):
        topics[topic].append(partition)
    return topics


def encode_key(transactional_id: str) -> bytes:
    return encode_versioned(TRANSACTION_LOG_KEY, _VERSION, {"transactional_id": transactional_id})


def decode_key(data: Buffer) -> str | None:
    """The transactional id; None for a key of another version. `DecodeError`."""
    if Reader(data).int16() not in TRANSACTION_LOG_KEY.versions:
        return None
    transactional_id: str = decode_versioned(TRANSACTION_LOG_KEY, data)["transactional_id"]
    return transactional_id


def encode_value(transaction: Transaction) -> bytes:
    topics = partitions_by_topic(transaction.partitions)
    rows = [{"topic": topic, "partition_ids": partitions} for topic, partitions in topics.items()]
    message = {
        "producer_id": transaction.producer.producer_id,
        "producer_epoch": transaction.producer.epoch,
        "transaction_timeout_ms": transaction.timeout_ms,
        "transaction_status": transaction.state,
        "transaction_partitions": None if transaction.state is State.EMPTY else rows,
        "transaction_last_update_timestamp_ms": transaction.updated_ms,
        "transaction_start_timestamp_ms": transaction.started_ms,
    }
    return encode_versioned(TRANSACTION_LOG_VALUE, _VERSION, message)


def decode_value(transactional_id: str, data: Buffer) -> Transaction:
    """`DecodeError`."""
    message = decode_versioned(TRANSACTION_LOG_VALUE, data)
    try:
        state = State(message["transaction_status"])
    except ValueError:
        number = message["transaction_status"]
        raise DecodeError(f"transaction {transactional_id!r} in unknown state {number}") from None
    if state in (State.DEAD, State.PREPARE_EPOCH_FENCE):
        raise DecodeError(f"transaction {transactional_id!r} in state {state.text}, which is never written")
    producer_id = message["producer_id"]
    return Transaction(
        transactional_id,
        Producer(producer_id, message["producer_epoch"]),
        Producer(producer_id, NO_EPOCH),
        message["transaction_timeout_ms"],
        state,
        frozenset(
            (row["topic"], partition)
            for row in message["transaction_partitions"] or ()
            for partition in row["partition_ids"]
        ),
        message["transaction_start_timestamp_ms"],
        message["transaction_last_update_timestamp_ms"],
    )


def state_batch(transactional_id: str, transaction: Transaction | None, now_ms: int) -> bytearray:
    """A batch for __transaction_state; None makes the id forgotten."""
    value = None if transaction is None else encode_value(transaction)
    return own_batch([(encode_key(transactional_id), value)], now_ms)


def marker_batch(producer: Producer, *, commits: bool, coordinator_epoch: int, now_ms: int) -> bytearray:
    """The control batch that ends a producer's transaction in a partition."""
    row = encode_marker(EndTransactionMarker(COMMIT if commits else ABORT, coordinator_epoch))
    attributes = TRANSACTIONAL_BIT | CONTROL_BIT
    return own_batch([row], now_ms, attributes=attributes, producer=(producer.producer_id, producer.epoch))
