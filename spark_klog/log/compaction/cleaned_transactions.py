"""Decide which batches of transactions compaction discards: aborted ones, and markers without a transaction."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.records.formats.batch import Header
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.reading.control import ABORT, COMMIT, read_marker


class CleanedTransactions:
    """Tracks the transactions of record batches in offset order, including control batches."""

    def __init__(self, aborted: Iterable[AbortedTransaction] = ()) -> None:
        """`aborted` may contain duplicates and transactions outside the batches."""
        self._waiting = [(transaction.first_offset, transaction) for transaction in aborted]
        heapq.heapify(self._waiting)
        #: By producer id: the current aborted transaction, and whether a batch of it was seen.
        self._aborted: dict[int, tuple[AbortedTransaction, bool]] = {}
        self._committed: set[int] = set()
        self._kept: list[AbortedTransaction] = []

    def discards(self, header: Header, batch: memoryview) -> bool:
        """True for a batch of an aborted transaction, and for a marker whose transaction has no batches left.

        `DecodeError` if a control batch can't be read.
        """
        if not isinstance(header, BatchHeader):
            return False
        while self._waiting and self._waiting[0][0] <= header.last_offset:
            transaction = heapq.heappop(self._waiting)[1]
            if transaction.last_offset >= header.base_offset:  # else it ended before the first batch
                self._aborted.setdefault(transaction.producer_id, (transaction, False))
        if header.is_control:
            return self._ends(header, batch)
        if not header.is_transactional:
            return False
        if header.producer_id in self._aborted:
            self._aborted[header.producer_id] = self._aborted[header.producer_id][0], True
            return True
        self._committed.add(header.producer_id)
        return False

    def take_kept(self) -> list[AbortedTransaction]:
        """The aborted transactions that ended since the last call and had at least one batch."""
        kept, self._kept = self._kept, []
        return kept

    def _ends(self, header: BatchHeader, batch: memoryview) -> bool:
        marker = read_marker(header, batch)
        if marker is None:
            return True  # an earlier round has emptied it
        if marker.type == ABORT:
            transaction, was_seen = self._aborted.pop(header.producer_id, (None, False))
            if transaction is not None and was_seen:
                self._kept.append(transaction)
            return not was_seen
        if marker.type == COMMIT:
            was_seen = header.producer_id in self._committed
            self._committed.discard(header.producer_id)
            return not was_seen
        return False
