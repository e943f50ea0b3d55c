"""Check the epochs and sequences of idempotent producers before an append (KIP-98, KIP-360).

A producer numbers its records per partition from 0 on; 2^31 - 1 is followed by 0. Rules for its record batches:

    a batch equal to one of its last five    is a duplicate: not appended, the answer is that of the first append
    an epoch below the known one             INVALID_PRODUCER_EPOCH: another instance has taken over
    an epoch above the known one             must start at sequence 0
    the known epoch                          must continue after the last batch
    an unknown producer id                   may start anywhere, as its records may have been deleted (Kafka 2.5), but
                                             not after a batch that was refused for its transaction (Kafka 3.6)

Otherwise the error is OUT_OF_ORDER_SEQUENCE_NUMBER. A batch without transaction while one is open is INVALID_TXN_STATE.
Batches that brokers write (markers, offsets within a transaction) have no sequences: only the epoch is checked, and for
markers the coordinator's epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spark_klog.errors import DecodeError, ErrorCode, KlogError
from spark_klog.log.producer_state import ProducerEntry, ProducerState, advanced
from spark_klog.records.formats.batch_v2 import BatchHeader, read_batch_header
from spark_klog.records.reading.control import EndTransactionMarker, read_marker

_NEW = ProducerEntry()


class ProducerRefused(KlogError):
    """A producer's batch was refused; `code` is the response's error code."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Duplicate(NamedTuple):
    """The first append of duplicate batches: first and last offset, largest timestamp (ms) of the last batch."""

    base_offset: int
    last_offset: int
    timestamp: int


class _Known(NamedTuple):
    """The state that the next batch of a producer must follow; epoch -1 for an unknown producer."""

    epoch: int
    last_sequence: int
    is_in_transaction: bool


def headers_at(data: memoryview, positions: Sequence[int]) -> list[BatchHeader]:
    """The headers of the record batches at these positions, all with producer ids."""
    return [read_batch_header(data, position) for position in positions]


def check_batches(
    state: ProducerState,
    data: memoryview,
    positions: Sequence[int],
    headers: Sequence[BatchHeader],
    *,
    of_client: bool,
) -> Duplicate | None:
    """Check the batches of one append; results and errors as in `check_clients`."""
    if not headers:
        return None
    if of_client:
        return check_clients(state, headers)
    for position, header in zip(positions, headers, strict=True):
        batch = data[position : position + header.size]
        check_brokers(state, header, read_marker(header, batch) if header.is_control else None)
    return None


def check_clients(state: ProducerState, headers: Sequence[BatchHeader]) -> Duplicate | None:
    """Check the batches of one append by a client; all have producer ids.

    Returns `Duplicate` if all were appended before, None if they may be appended. `ProducerRefused`; `DecodeError` for
    a negative epoch or sequence.
    """
    duplicate = _duplicate(state, headers)
    if duplicate is not None:
        return duplicate
    known: dict[int, _Known] = {}
    for header in headers:
        before = known.get(header.producer_id) or _known(state.producers.get(header.producer_id, _NEW))
        _check(header, before, state.refused_sequence(header))
        last = advanced(header.base_sequence, header.last_offset_delta)
        known[header.producer_id] = _Known(header.producer_epoch, last, before.is_in_transaction)
    return None


def check_brokers(state: ProducerState, header: BatchHeader, marker: EndTransactionMarker | None) -> None:
    """Check a batch of a broker; `marker` is set for a control batch. `ProducerRefused`."""
    known = state.producers.get(header.producer_id, _NEW)
    _check_epoch(header, known.epoch)
    if marker is not None and marker.coordinator_epoch < known.coordinator_epoch:
        raise ProducerRefused(
            ErrorCode.TRANSACTION_COORDINATOR_FENCED,
            f"marker of coordinator epoch {marker.coordinator_epoch}, but epoch {known.coordinator_epoch} has written",
        )


def _known(producer: ProducerEntry) -> _Known:
    last = producer.batches[-1].last_sequence if producer.batches else -1
    return _Known(producer.epoch, last, producer.is_in_transaction)


def _duplicate(state: ProducerState, headers: Sequence[BatchHeader]) -> Duplicate | None:
    first = last = None
    for header in headers:
        producer = state.producers.get(header.producer_id)
        if producer is None or producer.epoch != header.producer_epoch:
            return None
        last_sequence = advanced(header.base_sequence, header.last_offset_delta)
        for batch in producer.batches:
            if batch.last_sequence == last_sequence and batch.offset_delta == header.last_offset_delta:
                last = batch
                break
        else:
            return None
        first = first or last
    assert first is not None
    assert last is not None
    return Duplicate(first.last_offset - first.offset_delta, last.last_offset, last.timestamp)


def _check(header: BatchHeader, known: _Known, refused: int | None) -> None:
    if header.producer_epoch < 0 or header.base_sequence < 0:
        raise DecodeError(
            f"batch of producer {header.producer_id} with a negative epoch or sequence: epoch "
            f"{header.producer_epoch}, base sequence {header.base_sequence}"
        )
    _check_epoch(header, known.epoch)
    if known.epoch < 0:
        if refused is not None and header.base_sequence > refused:
            raise ProducerRefused(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id} of epoch {header.producer_epoch} sends sequence "
                f"{header.base_sequence}, but the refused sequence {refused} must come first",
            )
        return
    is_new_epoch = header.producer_epoch != known.epoch
    expected = 0 if is_new_epoch else advanced(known.last_sequence, 1) if known.last_sequence >= 0 else 0
    if header.base_sequence != expected:
        raise ProducerRefused(
            ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
            f"producer {header.producer_id} of epoch {header.producer_epoch} sends sequence {header.base_sequence}, "
            f"expected {expected}",
        )
    if known.is_in_transaction and not header.is_transactional:
        raise ProducerRefused(
            ErrorCode.INVALID_TXN_STATE,
            f"producer {header.producer_id} has an open transaction, but sends a batch without one",
        )


def _check_epoch(header: BatchHeader, known: int) -> None:
    if header.producer_epoch < known:
        raise ProducerRefused(
            ErrorCode.INVALID_PRODUCER_EPOCH,
            f"producer {header.producer_id} has epoch {header.producer_epoch}, the log knows epoch {known}",
        )
