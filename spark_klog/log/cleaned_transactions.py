"""Which batches of transactions compaction may discard: aborted ones, and markers whose transaction is gone."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from spark_klog.log.transaction_index import AbortedTransaction
from spark_klog.records.batch import Header
from spark_klog.records.batch_v2 import BatchHeader
from spark_klog.records.control import ABORT, COMMIT, read_marker


class CleanedTransactions:
    """Follows the transactions of batches that are given in offset order, control batches too."""

    def __init__(self, aborted: Iterable[AbortedTransaction] = ()) -> None:
        """`aborted` may name more transactions than those of the batches, and one twice."""
        self._waiting = [(transaction.first_offset, transaction) for transaction in aborted]
        heapq.heapify(self._waiting)
        #: By producer id: the aborted transaction that goes on, and whether a batch of it was seen.
        self._aborted: dict[int, tuple[AbortedTransaction, bool]] = {}
        self._committed: set[int] = set()
        self._kept: list[AbortedTransaction] = []

    def discards(self, header: Header, batch: memoryview) -> bool:
        """True for a batch of an aborted transaction, and for a marker whose transaction has no batches any more.

        `DecodeError` where a control batch can't be read.
        """
        if not isinstance(header, BatchHeader):
            return False
        while self._waiting and self._waiting[0][0] <= header.last_offset:
            transaction = heapq.heappop(self._waiting)[1]
            if transaction.last_offset >= header.base_offset:  # else it ended before the first batch that was given
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
        """The aborted transactions whose marker was given since the last call, and of which a batch was."""
        kept, self._kept = self._kept, []
        return kept

    def _ends(self, header: BatchHeader, batch: memoryview) -> bool:
        marker = read_marker(header, batch)
        if marker is None:
            return True  # an earlier cleaning took it out
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
