"""Which schema wrote a record: ids in headers and before records, as Confluent's serializers write them.

    id     INT8 0, INT32 the registry's id           5 bytes
    GUID   INT8 1, 16 bytes                          17 bytes, of newer clients

A header `__key_schema_id` or `__value_schema_id` has either of them, and the record's bytes are the payload alone. The
last header of that name counts, as in Java: Kafka Streams forwards those of its input before its own. Without one, or
if its value is null, they stand before the payload. For Protobuf the indexes of the record's message follow
(protobuf/message_indexes.py): in the header, or before the payload. The id comes first: bytes that are no indexes may
be a record of another format, which its schema tells.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa

from spark_klog.columns.schema import FULL
from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn, HeadersColumn
from spark_klog.schemas.protobuf.message_indexes import LONGEST, read_indexes, write_indexes
from spark_klog.schemas.rows import BadRow

HEADERS = {"key": "__key_schema_id", "value": "__value_schema_id"}
_HEADERS = FULL.field("headers").type
#: First byte, and bytes in all.
_ID, _GUID = 0, 1
ID_SIZE, GUID_SIZE = 5, 17
_INT32 = 1 << 31
#: Schemas, or message indexes, of a batch up to which they are sought one after the other, and not by sorting all ids.
_FEW = 16
#: The message indexes of a file's first message.
_FIRST_MESSAGE = write_indexes((0,))
#: In place of no bytes, which after an id in a header are the schema's own message.
_CUT_OFF = b"\x80"

_Array = np.ndarray[Any, np.dtype[Any]]


class SchemaKey(NamedTuple):
    """A schema as records name it: by the registry's id, or its GUID. `rest` is what follows it: message indexes, or
    bytes in their place that are none, as `read_indexes` tells.
    """

    id: int | UUID
    rest: bytes = b""

    def __str__(self) -> str:
        if self == BARE:
            return "without a schema id, by the latest version of its subject"
        return f"schema {'GUID' if isinstance(self.id, UUID) else 'id'} {self.id}"


#: Of records that name no schema.
BARE = SchemaKey(-(1 << 40))


class SchemaKeys(NamedTuple):
    """The schemas of a column: the distinct ones, and by row the number of its schema and where its payload begins.

    Both are INT32. The number is -1 for a null and for a row of `bad`, which names no schema.
    """

    keys: list[SchemaKey]
    which: _Array
    starts: _Array
    bad: list[BadRow]


def id_prefix(schema_id: int) -> bytes:
    """What stands before a record whose schema has that id; `SchemaError` if it is no INT32 of 0 or more."""
    if not 0 <= schema_id < _INT32:
        raise SchemaError(f"{schema_id} is not the id of a schema")
    return bytes((_ID,)) + schema_id.to_bytes(4, "big")


def without_ids(headers: pa.Array | pa.ChunkedArray, column: Literal["key", "value"]) -> pa.Array | pa.ChunkedArray:
    """A column `headers` without those that name a schema of another column, whose records are encoded anew: readers
    would take it for theirs. What is no such column is left as it is.
    """
    if isinstance(headers, pa.ChunkedArray):
        chunks = [without_ids(chunk, column) for chunk in headers.chunks]
        return pa.chunked_array(chunks) if chunks else headers
    try:
        lists = headers.cast(_HEADERS)
    except pa.ArrowException:
        return headers
    parts = _HeaderValues.of(lists)
    named = parts.named(HEADERS[column].encode())
    if not len(named):
        return lists
    entries = lists.values
    kept = np.ones(len(entries), np.bool_)
    kept[: parts.ends[0]] = kept[parts.ends[-1] :] = kept[named] = False
    ends = np.concatenate(([0], np.cumsum(kept)))[parts.ends].astype(np.int32)
    mask = pa.Array.from_buffers(pa.bool_(), len(kept), [None, pa.py_buffer(np.packbits(kept, bitorder="little"))])
    valid = lists.is_valid().buffers()[1] if lists.null_count else None
    buffers = [valid, pa.py_buffer(ends)]
    return pa.Array.from_buffers(_HEADERS, len(lists), buffers, lists.null_count, children=[entries.filter(mask)])


def schema_keys(
    values: pa.Array | BinaryColumn,
    headers: pa.Array | HeadersColumn | None,
    column: Literal["key", "value"],
    *,
    has_indexes: bool = False,
    has_bare: bool = False,
) -> SchemaKeys:
    """Find the schema of each row of a column of keys or values; if it `has_bare`, `BARE` is that of rows without one.

    `headers` are those of the records, None if there are none: a list of structs of key and value a row, as in the
    column `headers`. `has_indexes` if message indexes follow an id before the payload.
    """
    data = _Bytes.of(values)
    keys = _Keys(len(data.sizes), column, has_indexes, has_bare)
    rows = None if data.valid is None else np.flatnonzero(data.valid)
    if headers is not None and len(data.sizes):
        rows = keys.add_headers(_HeaderValues.of(headers), HEADERS[column].encode(), rows)
    keys.add(data, rows, rows, in_values=True)
    return SchemaKeys(list(keys.numbers), keys.which, keys.starts, sorted(keys.bad))


class _Bytes(NamedTuple):
    """A binary column as arrays: where values begin, their sizes, which are not null (None: all), all bytes."""

    begins: _Array
    sizes: _Array
    valid: _Array | None
    data: _Array

    @classmethod
    def of(cls, values: pa.Array | BinaryColumn) -> _Bytes:
        valid: _Array | None = None
        if isinstance(values, BinaryColumn):
            ends = np.frombuffer(values.offsets, np.int32)
            if values.validity is not None:
                bits = np.frombuffer(values.validity, np.uint8)
                valid = np.unpackbits(bits, count=len(ends) - 1, bitorder="little") != 0
            return cls(ends[:-1], np.diff(ends), valid, np.frombuffer(values.data, np.uint8))
        if not (pa.types.is_binary(values.type) or pa.types.is_string(values.type)):
            values = values.cast(pa.binary())
        _, offsets, data = values.buffers()
        ends = np.frombuffer(offsets or b"", np.int32)[values.offset : values.offset + len(values) + 1]
        if values.null_count:
            valid = values.is_valid().to_numpy(zero_copy_only=False)
        return cls(ends[:-1], np.diff(ends), valid, np.frombuffer(data or b"", np.uint8))

    def items(self, rows: _Array | None, skipped: int, kind: str) -> _Array:
        """An item of the type after `skipped` bytes of each of these values (None: of all), which must have them."""
        begins = self.begins if rows is None else self.begins[rows]
        width = np.dtype(kind).itemsize
        # an item at each byte, whether aligned or not
        every: _Array = np.ndarray((max(len(self.data) - width + 1, 0),), kind, self.data.data, strides=(1,))
        return every[begins + skipped] if skipped else every[begins]

    def value(self, row: int) -> bytes:
        begin = self.begins[row]
        return bytes(self.data[begin : begin + self.sizes[row]])


class _HeaderValues(NamedTuple):
    """Headers as arrays: the end of each row's list, their names, their values."""

    ends: _Array
    names: _Bytes
    values: _Bytes

    @classmethod
    def of(cls, headers: pa.Array | HeadersColumn) -> _HeaderValues:
        if isinstance(headers, HeadersColumn):
            ends = np.frombuffer(headers.offsets, np.int32)
            return cls(ends, _Bytes.of(headers.keys), _Bytes.of(headers.values))
        entries = headers.values
        names, values = entries.field(0), entries.field(1)
        ends = np.frombuffer(headers.offsets.buffers()[1] or b"", np.int32)  # `to_numpy` would import pandas
        return cls(ends[headers.offset : headers.offset + len(headers) + 1], _Bytes.of(names), _Bytes.of(values))

    def named(self, name: bytes) -> _Array:
        """The places of the headers of that name, which may be none of these rows' if the column is a slice."""
        alike = np.flatnonzero(self.names.sizes == len(name))
        if len(self.ends):
            alike = alike[(alike >= self.ends[0]) & (alike < self.ends[-1])]
        is_it: _Array = self.names.items(alike, 0, f"S{len(name)}") == name
        return alike[is_it]


class _Keys:
    """Collects the schemas of rows."""

    def __init__(self, count: int, column: str, has_indexes: bool, has_bare: bool) -> None:
        self._column = column
        self._has_indexes, self._has_bare = has_indexes, has_bare
        self.numbers: dict[SchemaKey, int] = {}
        self.which = np.full(count, -1, np.int32)
        self.starts = np.zeros(count, np.int32)
        self.bad: list[BadRow] = []

    def add_headers(self, headers: _HeaderValues, name: bytes, rows: _Array | None) -> _Array | None:
        """Add the rows that have a header of that name; return the others. None stands for all rows."""
        alike = headers.named(name)
        if not len(alike):
            return rows
        row_of_header = np.repeat(np.arange(len(self.which)), np.diff(headers.ends))
        of_rows = row_of_header[alike - headers.ends[0]]
        counts = np.ones(len(alike), np.bool_)
        counts[:-1] = of_rows[1:] != of_rows[:-1]  # the last of a row
        if headers.values.valid is not None:
            counts &= headers.values.valid[alike]
        of_rows, places = of_rows[counts], alike[counts]
        left = np.ones(len(self.which), np.bool_)
        if rows is not None:
            left[:] = False
            left[rows] = True
            wanted = left[of_rows]
            of_rows, places = of_rows[wanted], places[wanted]
        left[of_rows] = False
        self.add(headers.values, places, of_rows, in_values=False)
        return np.flatnonzero(left)

    def add(self, data: _Bytes, places: _Array | None, rows: _Array | None, *, in_values: bool) -> None:
        """Add rows (None: all) whose ids begin the values at `places`; `in_values` if the payload follows there."""
        sizes = data.sizes if places is None else data.sizes[places]
        if not len(sizes):
            return
        if int(sizes.min()) >= ID_SIZE and not data.items(places, 0, "u1").any():
            # by far the most frequent case: ids only, as _ID is 0
            self._add_kind(data, places, rows, sizes, ID_SIZE, in_values)
            return
        every = np.arange(len(sizes))
        places, rows = every if places is None else places, every if rows is None else rows
        first = np.full(len(sizes), -1, np.int64)
        filled = sizes > 0
        first[filled] = data.items(places[filled], 0, "u1")
        left = np.ones(len(sizes), np.bool_)
        for kind, size in ((_ID, ID_SIZE), (_GUID, GUID_SIZE)):
            chosen = (first == kind) & (sizes >= size)
            if chosen.any():
                self._add_kind(data, places[chosen], rows[chosen], sizes[chosen], size, in_values)
                left &= ~chosen
        if in_values and self._has_bare and left.any():
            self.which[rows[left]] = self._number(BARE)
            return
        for index in np.flatnonzero(left).tolist():
            where = f"the {self._column}" if in_values else "the header with the schema id"
            self.bad.append(BadRow(int(rows[index]), _reason(where, int(sizes[index]), int(first[index]))))

    def _add_kind(
        self, data: _Bytes, places: _Array | None, rows: _Array | None, sizes: _Array, size: int, in_values: bool
    ) -> None:
        """Add rows with ids (or GUIDs) of `size` bytes."""
        target = slice(None) if rows is None else rows
        if in_values and self._has_indexes:
            self._add_indexes(data, places, rows, sizes, size)
            return
        if in_values:
            self.starts[target] = size
        elif self._has_indexes and (sizes != size).any():  # numbers of messages follow
            assert places is not None
            assert rows is not None
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                value = data.value(place)
                self.which[row] = self._number(SchemaKey(_id(value[1:size]), value[size:]))
            return
        self.which[target] = self._numbers(_ids(data, places, size))

    def _add_indexes(self, data: _Bytes, places: _Array | None, rows: _Array | None, sizes: _Array, size: int) -> None:
        """Add rows with ids (or GUIDs) of `size` bytes before message indexes."""
        if int(sizes.min()) > size and not data.items(places, size, "u1").any():
            # by far the most frequent case: the first message, which is one byte
            target = slice(None) if rows is None else rows
            self.which[target] = self._numbers(_ids(data, places, size), _FIRST_MESSAGE)
            self.starts[target] = size + len(_FIRST_MESSAGE)
            return
        every = np.arange(len(sizes))
        places, rows = every if places is None else places, every if rows is None else rows
        for _ in range(_FEW):
            if not len(rows):
                return
            value = data.value(places[0])
            try:
                _, end = read_indexes(value, size)
            except SchemaError:
                self.which[rows[0]] = self._number(_without_indexes(value, size))
                places, rows, sizes = places[1:], rows[1:], sizes[1:]
                continue
            alike = np.flatnonzero(sizes >= end)
            for at in range(size, end):
                alike = alike[data.items(places[alike], at, "u1") == value[at]]
            self.which[rows[alike]] = self._numbers(_ids(data, places[alike], size), value[size:end])
            self.starts[rows[alike]] = end
            left = np.ones(len(rows), np.bool_)
            left[alike] = False
            places, rows, sizes = places[left], rows[left], sizes[left]
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            value = data.value(place)
            try:
                _, end = read_indexes(value, size)
            except SchemaError:
                self.which[row] = self._number(_without_indexes(value, size))
            else:
                self.which[row] = self._number(SchemaKey(_id(value[1:size]), value[size:end]))
                self.starts[row] = end

    def _numbers(self, ids: _Array, rest: bytes = b"") -> _Array | int:
        """The number of each id's schema: ids are INT32, or two INT64 each, of the bytes as they stand."""
        result = np.empty(len(ids), np.int32)
        left: _Array | None = None
        for _ in range(_FEW):
            if left is not None and not len(left):
                return result
            some = ids if left is None else ids[left]
            same = some == some[0]
            if same.ndim > 1:
                same = same.all(axis=1)
            number = self._number(SchemaKey(_id(some[0].tobytes()), rest))
            if left is None and same.all():
                return number
            places = np.flatnonzero(same) if left is None else left[same]
            result[places] = number
            left = np.flatnonzero(~same) if left is None else left[~same]
        distinct, inverse = np.unique(ids[left], axis=0, return_inverse=True)
        numbers = [self._number(SchemaKey(_id(some.tobytes()), rest)) for some in distinct]
        result[left] = np.array(numbers, np.int32)[inverse.ravel()]
        return result

    def _number(self, key: SchemaKey) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


def _ids(data: _Bytes, places: _Array | None, size: int) -> _Array:
    """The ids as `_Keys._numbers` has them; a GUID is two halves."""
    return data.items(places, 1, "<u4") if size == ID_SIZE else data.items(places, 1, "V16").view("<u8").reshape(-1, 2)


def _id(data: bytes) -> int | UUID:
    return UUID(bytes=data) if len(data) == GUID_SIZE - 1 else int.from_bytes(data, "big", signed=True)


def _without_indexes(value: bytes, size: int) -> SchemaKey:
    """The schema of a record that has no message indexes after its id of `size` bytes."""
    return SchemaKey(_id(value[1:size]), value[size : size + LONGEST] or _CUT_OFF)


def _reason(where: str, size: int, first: int) -> str:
    if first in (-1, _ID, _GUID):
        return f"{where} has {size} bytes: too few for a schema id"
    return f"{where} begins with the byte {first:#04x}, not with a schema id"
