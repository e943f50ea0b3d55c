"""Which schema wrote a record: ids in headers and before records, as Confluent's serializers write them.

    id     INT8 0, INT32 the registry's id           5 bytes
    GUID   INT8 1, 16 bytes                          17 bytes, of newer clients

A header `__key_schema_id` or `__value_schema_id` has either of them, and the record's bytes are the payload alone; the
first header of that name counts. Without one they stand before the payload. For Protobuf the numbers of nested messages
follow: in the header, or before the payload.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa

from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn, HeadersColumn
from spark_klog.schemas.rows import BadRow

HEADERS = {"key": "__key_schema_id", "value": "__value_schema_id"}
#: First byte, and bytes in all.
_ID, _GUID = 0, 1
ID_SIZE, GUID_SIZE = 5, 17
_INT32 = 1 << 31

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Bools = np.ndarray[Any, np.dtype[np.bool_]]


class SchemaKey(NamedTuple):
    """A schema as records name it: by the registry's id, or its GUID. `rest` is what follows it in a header."""

    id: int | UUID
    rest: bytes = b""

    def __str__(self) -> str:
        return f"schema {'GUID' if isinstance(self.id, UUID) else 'id'} {self.id}"


class SchemaKeys(NamedTuple):
    """The schemas of a column: the distinct ones, and by row the number of its schema and where its payload begins.

    Both are INT32. The number is -1 for a null and for a row of `bad`, which names no schema.
    """

    keys: list[SchemaKey]
    which: np.ndarray[Any, np.dtype[np.int32]]
    starts: np.ndarray[Any, np.dtype[np.int32]]
    bad: list[BadRow]


def id_prefix(schema_id: int) -> bytes:
    """What stands before a record whose schema has that id; `SchemaError` if it is no INT32 of 0 or more."""
    if not 0 <= schema_id < _INT32:
        raise SchemaError(f"{schema_id} is not the id of a schema")
    return bytes((_ID,)) + schema_id.to_bytes(4, "big")


def schema_keys(
    values: pa.Array | BinaryColumn, headers: pa.Array | HeadersColumn | None, column: Literal["key", "value"]
) -> SchemaKeys:
    """Find the schema of each row of a column of keys or values.

    `headers` are those of the records, None if there are none: a list of structs of key and value a row, as in the
    column `headers`.
    """
    data = _Bytes.of(values)
    keys = _Keys(len(data.sizes))
    rows = np.flatnonzero(data.valid)
    if headers is not None and len(rows):
        rows = keys.add_headers(_HeaderValues.of(headers), HEADERS[column].encode(), rows)
    keys.add(data, rows, rows, starts=True)
    return SchemaKeys(list(keys.numbers), keys.which, keys.starts, sorted(keys.bad))


class _Bytes(NamedTuple):
    """A binary column as arrays: where values begin, their sizes, which are not null, all bytes."""

    begins: _Ints
    sizes: _Ints
    valid: _Bools
    data: np.ndarray[Any, np.dtype[np.uint8]]

    @classmethod
    def of(cls, values: pa.Array | BinaryColumn) -> _Bytes:
        if isinstance(values, BinaryColumn):
            ends = np.frombuffer(values.offsets, np.int32)
            count = max(len(ends) - 1, 0)
            valid = np.ones(count, np.bool_)
            if values.validity is not None:
                valid = np.unpackbits(np.frombuffer(values.validity, np.uint8), count=count, bitorder="little") != 0
            return cls(ends[:count].astype(np.int64), np.diff(ends), valid, np.frombuffer(values.data, np.uint8))
        if not (pa.types.is_binary(values.type) or pa.types.is_string(values.type)):
            values = values.cast(pa.binary())
        count = len(values)
        if not count:
            return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_), np.empty(0, np.uint8))
        _, offsets, data = values.buffers()
        ends = np.frombuffer(offsets, np.int32)[values.offset : values.offset + count + 1]
        valid = np.ones(count, np.bool_)
        if values.null_count:
            valid = values.is_valid().to_numpy(zero_copy_only=False)
        content = np.frombuffer(data or b"", np.uint8)
        return cls(ends[:-1].astype(np.int64), np.diff(ends), valid, content)

    def of_size(self, rows: _Ints, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The first `size` bytes of these values, which have as many: one a line."""
        lines: np.ndarray[Any, np.dtype[np.uint8]] = self.data[self.begins[rows][:, None] + np.arange(size)]
        return lines

    def value(self, row: int) -> bytes:
        begin = self.begins[row]
        return self.data[begin : begin + self.sizes[row]].tobytes()


class _HeaderValues(NamedTuple):
    """Headers as arrays: the end of each row's list, their names, their values."""

    ends: _Ints
    names: _Bytes
    values: _Bytes

    @classmethod
    def of(cls, headers: pa.Array | HeadersColumn) -> _HeaderValues:
        if isinstance(headers, HeadersColumn):
            ends = np.frombuffer(headers.offsets, np.int32).astype(np.int64)
            return cls(ends, _Bytes.of(headers.keys), _Bytes.of(headers.values))
        entries = headers.values
        names, values = entries.field(0), entries.field(1)
        return cls(headers.offsets.to_numpy().astype(np.int64), _Bytes.of(names), _Bytes.of(values))


class _Keys:
    """Collects the schemas of rows."""

    def __init__(self, count: int) -> None:
        self.numbers: dict[SchemaKey, int] = {}
        self.which = np.full(count, -1, np.int32)
        self.starts = np.zeros(count, np.int32)
        self.bad: list[BadRow] = []

    def add_headers(self, headers: _HeaderValues, name: bytes, rows: _Ints) -> _Ints:
        """Add the rows that have a header of that name; return the others."""
        alike = np.flatnonzero(headers.names.sizes == len(name))
        alike = alike[(alike >= headers.ends[0]) & (alike < headers.ends[-1])]  # of these rows: they may be a slice
        if not len(alike):
            return rows
        wanted = np.frombuffer(name, np.uint8)
        alike = alike[(headers.names.of_size(alike, len(name)) == wanted).all(axis=1)]
        # the row of a header is that of the first list that ends after it
        of_rows, first = np.unique(np.searchsorted(headers.ends[1:], alike, side="right"), return_index=True)
        is_wanted = np.isin(of_rows, rows)
        self.add(headers.values, alike[first][is_wanted], of_rows[is_wanted], starts=False)
        return np.setdiff1d(rows, of_rows, assume_unique=True)

    def add(self, data: _Bytes, places: _Ints, rows: _Ints, *, starts: bool) -> None:
        """Add rows whose ids begin the values at `places`; `starts` if the payload follows in the same value."""
        if not len(rows):
            return
        sizes = np.where(data.valid[places], data.sizes[places], 0)
        first = np.full(len(rows), -1, np.int64)
        filled = sizes > 0
        first[filled] = data.data[data.begins[places[filled]]]
        with_id = (first == _ID) & (sizes >= ID_SIZE)
        with_guid = (first == _GUID) & (sizes >= GUID_SIZE)
        for chosen, size in ((with_id, ID_SIZE), (with_guid, GUID_SIZE)):
            if not chosen.any():
                continue
            there, of_rows = places[chosen], rows[chosen]
            if starts:
                self.starts[of_rows] = size
                self._add_fixed(data.of_size(there, size)[:, 1:], of_rows)
            elif (sizes[chosen] == size).all():
                self._add_fixed(data.of_size(there, size)[:, 1:], of_rows)
            else:  # numbers of messages follow
                for place, row in zip(there.tolist(), of_rows.tolist(), strict=True):
                    value = data.value(place)
                    self.which[row] = self._number(SchemaKey(_id(value[1:size]), value[size:]))
        for index in np.flatnonzero(~(with_id | with_guid)).tolist():
            self.bad.append(BadRow(int(rows[index]), _reason(int(sizes[index]), int(first[index]), starts)))

    def _add_fixed(self, ids: np.ndarray[Any, np.dtype[np.uint8]], rows: _Ints) -> None:
        """Add rows with the bytes of ids or GUIDs, one a line."""
        size = ids.shape[1]
        if (ids == ids[0]).all():  # by far the most frequent case
            self.which[rows] = self._number(SchemaKey(_id(ids[0].tobytes())))
            return
        lines = np.ascontiguousarray(ids).view(f"V{size}").ravel()
        distinct, inverse = np.unique(lines, return_inverse=True)
        numbers = [self._number(SchemaKey(_id(line.tobytes()))) for line in distinct]
        self.which[rows] = np.array(numbers, np.int32)[inverse]

    def _number(self, key: SchemaKey) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


def _id(data: bytes) -> int | UUID:
    return UUID(bytes=data) if len(data) == GUID_SIZE - 1 else int.from_bytes(data, "big", signed=True)


def _reason(size: int, first: int, in_value: bool) -> str:
    where = "the value" if in_value else "the header with the schema id"
    if first in (-1, _ID, _GUID):
        return f"{where} has {size} bytes: too few for a schema id"
    return f"{where} begins with the byte {first:#04x}, not with a schema id"
