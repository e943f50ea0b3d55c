"""A model of records in plain Python: an encoder written from KIP-98 and KIP-82, and columns read by Arrow.

It shares no code with the package's kernels, so that tests can compare them with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from spark_klog.records.contract import BinaryColumn, HeadersColumn, RecordColumns

HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])


class Row(NamedTuple):
    """A record: offset and timestamp (ms) are absolute."""

    offset: int
    timestamp: int
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def varint(value: int) -> bytes:
    """Encode an integer: zig-zag, base 128."""
    number = 2 * value if value >= 0 else -2 * value - 1
    groups = [number % 128]
    while number := number // 128:
        groups.append(number % 128)
    return bytes([*(group + 128 for group in groups[:-1]), groups[-1]])


def _field(value: bytes | None) -> bytes:
    return varint(-1) if value is None else varint(len(value)) + value


def encode_row(row: Row, base_offset: int, base_timestamp: int) -> bytes:
    """Encode one record."""
    content = b"\x00" + varint(row.timestamp - base_timestamp) + varint(row.offset - base_offset)
    content += _field(row.key) + _field(row.value) + varint(len(row.headers))
    for name, value in row.headers:
        content += _field(name.encode()) + _field(value)
    return varint(len(content)) + content


def encode_rows(rows: Iterable[Row], base_offset: int, base_timestamp: int) -> bytes:
    """Encode the body of a batch."""
    return b"".join(encode_row(row, base_offset, base_timestamp) for row in rows)


def _buffer(data: Any) -> pa.Buffer | None:
    return None if data is None else pa.py_buffer(data)


def _binary(column: BinaryColumn, count: int, kind: pa.DataType | None = None) -> pa.Array:
    buffers = [_buffer(column.validity), _buffer(column.offsets), _buffer(column.data)]
    array = pa.Array.from_buffers(kind or pa.binary(), count, buffers)
    array.validate(full=True)
    assert array.null_count == column.null_count
    assert pa.py_buffer(column.offsets).size == 4 * (count + 1)
    return array


def _headers(column: HeadersColumn, count: int) -> list[Any]:
    names = _binary(column.keys, column.total, pa.string())
    values = _binary(column.values, column.total)
    entries = pa.StructArray.from_arrays([names, values], fields=list(HEADER))
    array = pa.Array.from_buffers(
        pa.list_(HEADER), count, [_buffer(column.validity), _buffer(column.offsets)], children=[entries]
    )
    array.validate(full=True)
    assert array.null_count == column.null_count
    return [
        None if row is None else tuple((entry["key"], entry["value"]) for entry in row) for row in array.to_pylist()
    ]


def to_lists(columns: RecordColumns) -> dict[str, list[Any]]:
    """Read the buffers of those columns that are present, with Arrow."""
    count = columns.count
    result: dict[str, list[Any]] = {}
    for name, column in (("key", columns.key), ("value", columns.value)):
        if column is not None:
            result[name] = _binary(column, count).to_pylist()
    numbers = (
        ("offset", columns.offset, pa.int64()),
        ("timestamp", columns.timestamp, pa.int64()),
        ("timestampType", columns.timestamp_type, pa.int32()),
    )
    for name, buffer, kind in numbers:
        if buffer is not None:
            assert pa.py_buffer(buffer).size == count * kind.bit_width // 8
            result[name] = pa.Array.from_buffers(kind, count, [None, _buffer(buffer)]).to_pylist()
    if columns.headers is not None:
        result["headers"] = _headers(columns.headers, count)
    return result


def expected_lists(rows: Sequence[Row], append_time: int | None = None) -> dict[str, list[Any]]:
    """The expected result of `to_lists` for all columns of these rows."""
    return {
        "key": [row.key for row in rows],
        "value": [row.value for row in rows],
        "offset": [row.offset for row in rows],
        "timestamp": [row.timestamp if append_time is None else append_time for row in rows],
        "timestampType": [0 if append_time is None else 1 for _ in rows],
        "headers": [row.headers or None for row in rows],
    }


def binary_column(values: Sequence[bytes | str | None], kind: pa.DataType | None = None) -> BinaryColumn:
    """The values as Arrow buffers."""
    array = pa.array(values, kind or pa.binary())
    validity, offsets, data = array.buffers()
    return BinaryColumn(
        memoryview(offsets),
        memoryview(data or b""),
        None if validity is None else memoryview(validity),
        array.null_count,
    )


def record_columns(rows: Sequence[Row]) -> RecordColumns:
    """The rows as Arrow buffers: the input of a kernel's encoder."""
    lists = pa.array(
        [[name for name, _ in row.headers] if row.headers else None for row in rows], pa.list_(pa.string())
    )
    validity, offsets = lists.buffers()[:2]
    headers = HeadersColumn(
        memoryview(offsets),
        None if validity is None else memoryview(validity),
        lists.null_count,
        binary_column([name for row in rows for name, _ in row.headers], pa.string()),
        binary_column([value for row in rows for _, value in row.headers]),
        sum(len(row.headers) for row in rows),
    )
    return RecordColumns(
        len(rows),
        key=binary_column([row.key for row in rows]),
        value=binary_column([row.value for row in rows]),
        timestamp=memoryview(pa.array([row.timestamp for row in rows], pa.int64()).buffers()[1]),
        headers=headers,
    )
