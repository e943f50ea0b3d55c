"""Read a log into columns as a consumer does, with one kernel or all of them; used by `fuzz_reader`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spark_klog.errors import DecodeError
from spark_klog.records.contract import COLUMNS, Kernel, Record, RecordColumns
from spark_klog.records.reading.offset_order import OffsetOrder
from spark_klog.records.reading.reader import AbortedTransactions, BadBatch, RecordReader

from .column_rows import as_records, buffers

_MANY = 1 << 62


@dataclass(frozen=True)
class Read:
    """The result of reading: columns for each time that the builder was full, and the last ones."""

    is_refused: bool
    bad: list[tuple[int, bytes]]
    columns: list[RecordColumns]

    @property
    def rows(self) -> int:
        return sum(columns.count for columns in self.columns)

    def records(self) -> list[Record]:
        """The records of all columns."""
        return [record for columns in self.columns for record in as_records(columns)]


@dataclass(frozen=True)
class Reading:
    """A log, and how to read it."""

    log: bytes
    first: int
    end: int
    limit: int
    columns: frozenset[str] = frozenset(COLUMNS)
    aborted: Sequence[tuple[int, int]] = ()
    rows: int = _MANY
    """Columns end with the batch with which they reach so many rows."""
    passing_over: bool = False
    """Corrupt batches are passed over."""

    def by(self, kernel: Kernel) -> Read:
        reader = RecordReader(
            self.columns, rows=self.rows, limit=self.limit, yields_bad=self.passing_over, kernel=kernel
        )
        transactions = AbortedTransactions(self.aborted) if self.aborted else None
        bad: list[tuple[int, bytes]] = []
        columns: list[RecordColumns] = []
        is_refused = False
        damaged = OffsetOrder(self.log, self.first).damaged
        try:
            for part in reader.read(self.log, self.first, self.end, transactions, damaged):
                if isinstance(part, BadBatch):
                    bad.append((part.offset, bytes(part.data)))
                else:
                    assert part.count >= self.rows
                    assert reader.rows == 0
                    columns.append(part)
        except DecodeError:
            is_refused = True
        rows = reader.rows
        columns.append(reader.finish())
        assert columns[-1].count == rows < self.rows
        return Read(is_refused, bad, columns)

    def by_all(self, kernels: Sequence[Kernel]) -> Read:
        """Read with all kernels and check that the results are the same."""
        one, *others = (self.by(kernel) for kernel in kernels)
        for other in others:
            _check_same(one, other)
        return one

    def check_range(self, kernels: Sequence[Kernel], records: Sequence[Record], first: int, end: int) -> None:
        """Check that each kernel reads exactly those of `records`, which are all records, that are in the range."""
        wanted = [record for record in records if first <= record.offset < end]
        for kernel in kernels:
            read = replace(self, first=first, end=end).by(kernel)
            assert not read.is_refused
            assert read.records() == wanted


def _check_same(one: Read, other: Read) -> None:
    """Compare buffers; if they differ, the columns must still be equal for Arrow."""
    assert (one.is_refused, one.bad) == (other.is_refused, other.bad)
    if [buffers(columns) for columns in one.columns] != [buffers(columns) for columns in other.columns]:
        from tests.support.checker.record_model import to_lists

        assert [to_lists(columns) for columns in one.columns] == [to_lists(columns) for columns in other.columns]
