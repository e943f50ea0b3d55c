"""Records of __transaction_state, and transaction markers. Byte layout: `protocol.tables.transactions`.

A null value removes the transactional id. Both versions are read. As in Kafka, version 0 is written where the cluster's
transaction.version is 0, and version 1 from 1 on: its tagged fields say how the epoch goes on.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

from spark_klog.base.names import TopicPartition
from spark_klog.broker.coordinator import Rows, stored_rows
from spark_klog.broker.transactions.transaction import NO_EPOCH, NO_ID, ProducerIdAndEpoch, State, Transaction
from spark_klog.errors import DecodeError
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.codec import decode_versioned, encode_versioned
from spark_klog.protocol.tables.transactions import TRANSACTION_LOG_KEY, TRANSACTION_LOG_VALUE
from spark_klog.records.building.assignment import own_batch
from spark_klog.records.formats.batch_v2 import CONTROL_BIT, TRANSACTIONAL_BIT
from spark_klog.records.reading.reader import ABORT, COMMIT, EndTransactionMarker, encode_marker
from spark_klog.wire.primitives import Buffer, Reader

_log = logging.getLogger(__name__)
_KEY_VERSION = 0


def partitions_by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Partition numbers by topic, both sorted."""
    topics: dict[str, list[int]] = defaultdict(list)
    for topic, partition in sorted(partitions):
        topics[topic].append(partition)
    return topics


def encode_key(transactional_id: str) -> bytes:
    return encode_versioned(TRANSACTION_LOG_KEY, _KEY_VERSION, {"transactional_id": transactional_id})


def decode_key(data: Buffer) -> str | None:
    """Decode a transactional id; None for a key of another version. Raises `DecodeError`."""
    if Reader(data).int16() not in TRANSACTION_LOG_KEY.versions:
        return None
    transactional_id: str = decode_versioned(TRANSACTION_LOG_KEY, data)["transactional_id"]
    return transactional_id


def encode_value(transaction: Transaction, transaction_version: int) -> bytes:
    """The state of a transactional id in a cluster of this transaction.version.

    Version 1 also for a transaction that has ended by version 2 in a cluster that was set to 0 since.
    """
    topics = partitions_by_topic(transaction.partitions)
    rows = [{"topic": topic, "partition_ids": partitions} for topic, partitions in topics.items()]
    message = {
        "producer_id": transaction.producer.producer_id,
        "previous_producer_id": transaction.last.producer_id,
        "next_producer_id": transaction.next_id,
        "producer_epoch": transaction.producer.epoch,
        "transaction_timeout_ms": transaction.timeout_ms,
        "transaction_status": transaction.state,
        "transaction_partitions": None if transaction.state is State.EMPTY else rows,
        "transaction_last_update_timestamp_ms": transaction.updated_ms,
        "transaction_start_timestamp_ms": transaction.started_ms,
        "client_transaction_version": transaction.version,
    }
    version = min(1, max(transaction_version, transaction.version))
    return encode_versioned(TRANSACTION_LOG_VALUE, version, message)


def decode_value(transactional_id: str, data: Buffer) -> Transaction:
    """Decode the state of a transactional id. Raises `DecodeError`."""
    message = decode_versioned(TRANSACTION_LOG_VALUE, data)
    try:
        state = State(message["transaction_status"])
    except ValueError:
        number = message["transaction_status"]
        raise DecodeError(f"transaction {transactional_id!r} in unknown state {number}") from None
    if state in (State.DEAD, State.PREPARE_EPOCH_FENCE):
        raise DecodeError(f"transaction {transactional_id!r} in state {state.text}, which is never written")
    producer_id, previous_id = message["producer_id"], message["previous_producer_id"]
    return Transaction(
        transactional_id,
        ProducerIdAndEpoch(producer_id, message["producer_epoch"]),
        ProducerIdAndEpoch(producer_id if previous_id == NO_ID else previous_id, NO_EPOCH),
        message["transaction_timeout_ms"],
        state,
        frozenset(
            (row["topic"], partition)
            for row in message["transaction_partitions"] or ()
            for partition in row["partition_ids"]
        ),
        message["transaction_start_timestamp_ms"],
        message["transaction_last_update_timestamp_ms"],
        message["client_transaction_version"],
        message["next_producer_id"],
    )


def marker_batch(producer: ProducerIdAndEpoch, *, commits: bool, coordinator_epoch: int, now_ms: int) -> bytearray:
    """Make the control batch that ends a producer's transaction in a partition."""
    row = encode_marker(EndTransactionMarker(COMMIT if commits else ABORT, coordinator_epoch))
    attributes = TRANSACTIONAL_BIT | CONTROL_BIT
    return own_batch([row], now_ms, attributes=attributes, producer=(producer.producer_id, producer.epoch))


def read_transactions(log: PartitionLog) -> tuple[dict[str, Transaction], set[str]]:
    """Read a partition of __transaction_state; later records win. Returns (transactions by id, ids not to serve).

    A record that does not decode is logged, and its transactional id is not served: an older state of the id could
    give its producer a fenced epoch. Raises `KlogError` if batches are damaged, OSError.
    """
    transactions: dict[str, Transaction] = {}
    unread: set[str] = set()
    for entry in stored_rows(log):
        for key, value, _ in entry.rows if isinstance(entry, Rows) else ():
            _read_row(transactions, unread, key, value, log.directory.name)
    _log.info("loaded %d transactions from %s", len(transactions), log.directory.name)
    return transactions, unread


def _read_row(
    transactions: dict[str, Transaction], unread: set[str], key: bytes | None, value: bytes | None, where: str
) -> None:
    try:
        transactional_id = decode_key(key) if key else None
    except DecodeError as error:
        _log.error("%s: the key %r of a record can't be read, the record is left out: %s", where, key, error)
        return
    if transactional_id is None:
        return
    transactions.pop(transactional_id, None)
    unread.discard(transactional_id)
    if value is None:
        return
    try:
        transactions[transactional_id] = decode_value(transactional_id, value)
    except DecodeError as error:
        _log.error("%s: transactional id %r can't be read, and is not served: %s", where, transactional_id, error)
        unread.add(transactional_id)
