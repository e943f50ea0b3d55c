"""Convert a kernel's columns back to records without Arrow, fast enough for each input of a fuzzer."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

from spark_klog.records.contract import BinaryColumn, HeadersColumn, Record, RecordColumns


def buffers(part: Any) -> Any:
    """Convert a `RecordColumns`, or a part of one, to lists of bytes, which can be compared."""
    if part is None or isinstance(part, int):
        return part
    if hasattr(part, "__dataclass_fields__"):
        return [buffers(getattr(part, name)) for name in part.__dataclass_fields__]
    return bytes(part)


def as_records(columns: RecordColumns) -> list[Record]:
    """The records that the columns hold."""
    assert columns.key is not None
    assert columns.value is not None
    assert columns.headers is not None
    count = columns.count
    offsets, timestamps, types = (
        struct.unpack(f"<{count}{code}", bytes(part or b""))
        for code, part in (("q", columns.offset), ("q", columns.timestamp), ("i", columns.timestamp_type))
    )
    keys, values = (_values(column, count) for column in (columns.key, columns.value))
    headers = _header_rows(columns.headers, count)
    return [Record(*fields) for fields in zip(offsets, timestamps, types, keys, values, headers, strict=True)]


def _values(column: BinaryColumn, count: int) -> list[bytes | None]:
    ends = struct.unpack(f"<{count + 1}i", bytes(column.offsets))
    data, valid = bytes(column.data), _valid(column, count)
    return [data[ends[row] : ends[row + 1]] if valid[row] else None for row in range(count)]


def _valid(column: BinaryColumn | HeadersColumn, count: int) -> list[bool]:
    if column.validity is None:
        return [True] * count
    bits = bytes(column.validity)
    return [bool(bits[row >> 3] >> (row & 7) & 1) for row in range(count)]


def _header_rows(column: HeadersColumn, count: int) -> list[tuple[tuple[str, bytes | None], ...]]:
    ends = struct.unpack(f"<{count + 1}i", bytes(column.offsets))
    keys, values = _values(column.keys, column.total), _values(column.values, column.total)
    pairs = [((key or b"").decode(), value) for key, value in zip(keys, values, strict=True)]
    rows = [tuple(pairs[start:stop]) for start, stop in pairwise(ends)]
    assert _valid(column, count) == [bool(row) for row in rows]
    return rows
