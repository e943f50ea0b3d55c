"""From fetched or stored bytes to the records that a consumer may see."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from struct import Struct

from spark_klog.errors import DecodeError
from spark_klog.records.batch import LOG_APPEND_TIME, BatchHeader, body, check_crc, iter_batches
from spark_klog.records.contract import ColumnBuilder, Record
from spark_klog.records.reference import iter_records
from spark_klog.wire.codecs import MAX_DECOMPRESSED
from spark_klog.wire.primitives import Buffer

_CONTROL_KEY = Struct(">hh")
_ABORT = 0


class AbortedTransactions:
    """Which batches a read_committed consumer skips (KIP-98).

    Made of the fetch response's list, or a segment's transaction index: (producer id, first offset) pairs. A
    producer's batches are aborted from that offset on until its abort marker has been seen.
    """

    def __init__(self, transactions: Iterable[tuple[int, int]] = ()) -> None:
        self._waiting = [(first_offset, producer_id) for producer_id, first_offset in transactions]
        heapq.heapify(self._waiting)
        self._aborted: set[int] = set()

    def skips(self, header: BatchHeader, batch: memoryview) -> bool:
        """True where the batch is not to be seen. Batches must be given in offset order, control batches too."""
        while self._waiting and self._waiting[0][0] <= header.last_offset:
            self._aborted.add(heapq.heappop(self._waiting)[1])
        if header.is_control:
            if header.producer_id in self._aborted and _control_type(header, batch) == _ABORT:
                self._aborted.discard(header.producer_id)
            return True
        return header.is_transactional and header.producer_id in self._aborted


def _control_type(header: BatchHeader, batch: memoryview) -> int:
    """Key of a control record: INT16 version, INT16 type (0 abort, 1 commit)."""
    for record in iter_records(header, batch):
        if record.key is not None and len(record.key) >= _CONTROL_KEY.size:
            kind: int = _CONTROL_KEY.unpack_from(record.key)[1]
            return kind
    raise DecodeError(f"control batch at offset {header.base_offset} holds no control record")


def visible_batches(
    data: Buffer, aborted: AbortedTransactions | None = None
) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Whole batches with a right CRC, without control batches and, given `aborted`, without aborted ones.

    `CorruptBatchError` at a wrong CRC, `DecodeError` at what is not a batch.
    """
    for header, batch in iter_batches(data):
        check_crc(header, batch)
        if aborted.skips(header, batch) if aborted else header.is_control:
            continue
        yield header, batch


def read_records(data: Buffer, aborted: AbortedTransactions | None = None) -> Iterator[Record]:
    """The visible records, one by one. For a few of them; columns are the way for many."""
    for header, batch in visible_batches(data, aborted):
        yield from iter_records(header, batch)


def append_batch(
    builder: ColumnBuilder,
    header: BatchHeader,
    batch: memoryview,
    first: int,
    end: int,
    limit: int = MAX_DECOMPRESSED,
) -> None:
    """Add a batch's records with offsets in [first, end) to a builder."""
    append_time = header.max_timestamp if header.timestamp_type == LOG_APPEND_TIME else None
    builder.append(
        body(header, batch, limit),
        header.count,
        header.base_offset,
        header.base_timestamp,
        append_time,
        first,
        end,
    )
