"""A log read into columns as a consumer does it, by one kernel or all: what `fuzz_reader` compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spark_klog.errors import DecodeError
from spark_klog.records.contract import COLUMNS, Kernel, Record, RecordColumns
from spark_klog.records.reading.offset_order import OffsetOrder
from spark_klog.records.reading.reader import AbortedTransactions, BadBatch, append_visible, refuse

from .column_rows import as_records, buffers

_MANY = 1 << 62


@dataclass(frozen=True)
class Read:
    """What became of it: columns for each step that filled the builder, and those at the end."""

    is_refused: bool
    bad: list[tuple[int, bytes]]
    sizes: list[tuple[int, int]]
    """Rows and bytes of each of the columns."""
    columns: list[RecordColumns]

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.sizes)

    def records(self) -> list[Record]:
        """Of all columns."""
        return [record for columns in self.columns for record in as_records(columns)]


@dataclass(frozen=True)
class Reading:
    """What is read, and how."""

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
        builder = kernel.builder(self.columns)
        transactions = AbortedTransactions(self.aborted) if self.aborted else None
        bad: list[BadBatch] = []
        on_bad = bad.append if self.passing_over else refuse
        sizes, columns = [], []
        is_refused = False

        def finish() -> None:
            sizes.append((builder.rows, builder.size))
            columns.append(builder.finish())
            assert columns[-1].count == sizes[-1][0]
            assert builder.rows == builder.size == 0

        damaged = OffsetOrder(self.log, self.first).damaged
        steps = append_visible(
            kernel, builder, self.log, self.first, self.end, transactions, self.limit, on_bad, self.rows, _MANY, damaged
        )
        try:
            for _ in steps:
                if builder.rows >= self.rows:
                    finish()
        except DecodeError:
            is_refused = True
        finish()
        return Read(is_refused, [(batch.offset, bytes(batch.data)) for batch in bad], sizes, columns)

    def by_all(self, kernels: Sequence[Kernel]) -> Read:
        """By all kernels: the same."""
        one, *others = (self.by(kernel) for kernel in kernels)
        for other in others:
            _check_same(one, other)
        return one

    def check_range(self, kernels: Sequence[Kernel], records: Sequence[Record], first: int, end: int) -> None:
        """That each kernel reads those of the records, which are all that there are, that are in the range."""
        wanted = [record for record in records if first <= record.offset < end]
        for kernel in kernels:
            read = replace(self, first=first, end=end).by(kernel)
            assert not read.is_refused
            assert read.records() == wanted


def _check_same(one: Read, other: Read) -> None:
    """Equal columns have equal buffers; where those differ, Arrow has to read the same."""
    assert (one.is_refused, one.bad, one.sizes) == (other.is_refused, other.bad, other.sizes)
    if [buffers(columns) for columns in one.columns] != [buffers(columns) for columns in other.columns]:
        from tests.support.record_model import to_lists

        assert [to_lists(columns) for columns in one.columns] == [to_lists(columns) for columns in other.columns]
