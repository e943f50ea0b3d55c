"""Check that the records of Arrow rows are not larger than a producer may send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.errors import RecordTooLargeToSend
from spark_klog.records.record_size import MOST_LENGTHS, OVERHEAD, VARINT_BOUNDS

_Sizes = np.ndarray[Any, np.dtype[np.int64]]


def check_sizes(rows: pa.RecordBatch, first: int, topic: str | None, limit: int, setting: str) -> None:
    """Raise `RecordTooLargeToSend` for the first row beyond `limit` bytes, its number counted from `first`.

    `rows` are as of `record_rows`; `setting` names the limit.
    """
    names = rows.schema.names
    has_headers = "headers" in names and rows.column("headers").null_count < rows.num_rows
    longest = sum(_longest(rows.column(name)) for name in ("key", "value") if name in names)
    if not has_headers and OVERHEAD + MOST_LENGTHS + longest <= limit:
        return  # nearly always: the exact sizes take longer
    sizes = _sizes(rows, has_headers)
    too_large = np.flatnonzero(sizes > limit)
    if len(too_large):
        row = int(too_large[0])
        name = rows.column("topic")[row].as_py() if topic is None else topic
        raise RecordTooLargeToSend(name, int(sizes[row]), limit, setting, first + row)


def _longest(column: pa.Array) -> int:
    return pc.max(pc.binary_length(column)).as_py() or 0


def _sizes(rows: pa.RecordBatch, has_headers: bool) -> _Sizes:
    """The size of each row's record, see `largest_size`."""
    sizes = np.full(rows.num_rows, OVERHEAD, np.int64)
    for name in ("key", "value"):
        sizes += _field_sizes(rows.column(name)) if name in rows.schema.names else 1
    if not has_headers:
        return sizes + 1
    headers = rows.column("headers")
    counts = _numbers(pc.list_value_length(headers))
    entries = pc.list_flatten(headers)
    of_entries = _field_sizes(pc.struct_field(entries, "key")) + _field_sizes(pc.struct_field(entries, "value"))
    ends = np.concatenate(([0], np.cumsum(of_entries)))[np.cumsum(counts)]
    return sizes + _varint_sizes(counts) + np.diff(ends, prepend=0)


def _field_sizes(column: pa.Array) -> _Sizes:
    lengths = _numbers(pc.binary_length(column))
    sizes: _Sizes = lengths + _varint_sizes(lengths)  # of a null: the one byte of -1
    return sizes


def _numbers(column: pa.Array) -> _Sizes:
    """The numbers, 0 for nulls."""
    numbers: _Sizes = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _varint_sizes(lengths: _Sizes) -> _Sizes:
    return 1 + np.searchsorted(VARINT_BOUNDS, lengths, side="right")
