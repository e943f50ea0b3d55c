"""Records decoded row by row by google.protobuf: what the native kernel is compared with."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from spark_klog.columns.room import BASE_ROOM, ROOM_OF_A_BYTE, TOO_MANY_ABSENT
from spark_klog.schemas.arrow_columns import binary_parts
from spark_klog.schemas.protobuf.columns import (
    ENUM,
    FIXED32,
    FIXED64,
    STRING,
    UINT32,
    UINT64,
    FieldColumn,
    MessageColumns,
    columns_of,
    enum_names,
    unknown_name,
)
from spark_klog.schemas.protobuf.decoder import ProtobufDecoder
from spark_klog.schemas.protobuf.schema import ProtobufSchema
from spark_klog.schemas.rows import BadRow, Decoded
from spark_klog.wire.primitives import Buffer

#: Bytes that are no message: there is no field 0.
_NO_MESSAGE = b"\0"
#: Largest INT64, and what a number of more than 32 bits begins at.
_END_64 = 1 << 63
_BITS = {UINT32: 32, FIXED32: 32, UINT64: 64, FIXED64: 64}
_MICROSECONDS = 1_000_000
DAMAGED = "the value is cut off or damaged, or was written with another schema"

_Convert = Callable[[Any], Any]


class GoogleDecoder(ProtobufDecoder):
    """As `ProtobufDecoder`."""

    def decode(
        self,
        values: Any,
        programs: Sequence[ProtobufSchema],
        which: Buffer | None = None,
        starts: int | Buffer = 0,
    ) -> Decoded:
        offsets, data, validity, first, count = binary_parts(values, "Protobuf")
        if not programs:
            which = memoryview(array("i", [-1]) * count)
        by_row = None if isinstance(starts, int) else starts
        start = starts if isinstance(starts, int) else 0
        rows = GoogleRows(columns_of(self.reader.message))
        return rows.decode(_records(offsets, data, validity, first, count, which, by_row, start))


def _records(
    offsets: Buffer,
    data: Buffer,
    validity: Buffer | None,
    first: int,
    count: int,
    which: Buffer | None,
    starts: Buffer | None,
    start: int,
) -> Iterator[bytes | None]:
    """The records of rows, None for those that are to be null."""
    ends = np.frombuffer(offsets, np.int32, count + 1, 4 * first).tolist()
    content = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    valid = np.ones(count, np.bool_)
    if validity is not None:
        bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
        valid = bits[first : first + count] != 0
    if which is not None:
        valid = valid & (np.frombuffer(which, np.int32, count) >= 0)
    begins = [start] * count if starts is None else np.frombuffer(starts, np.int32, count).tolist()
    for row, is_valid in enumerate(valid.tolist()):
        begin = ends[row] + begins[row]
        record = bytes(content[begin : ends[row + 1]]) if begin <= ends[row + 1] else _NO_MESSAGE
        yield record if is_valid else None


class GoogleRows:
    """Decodes rows of a message."""

    def __init__(self, columns: MessageColumns) -> None:
        from google.protobuf.message import DecodeError
        from google.protobuf.message_factory import GetMessageClass

        self._class = GetMessageClass(columns.message)
        self._type = columns.type
        self._damaged = DecodeError
        self._room = _Room()
        self._convert = _message(columns, self._room)

    def decode(self, values: Iterable[bytes | None]) -> Decoded:
        """Decode rows; a row that does not decode is null, and in the result's `bad`."""
        rows: list[Any] = []
        bad = []
        for number, value in enumerate(values):
            row = None
            if value is not None:
                try:
                    message = self._class.FromString(value)
                    # FindInitializationErrors, which would name it, has crashed in protobuf 7.36
                    if message.IsInitialized():
                        self._room.left = BASE_ROOM + ROOM_OF_A_BYTE * len(value)
                        row = self._convert(message)
                    else:
                        bad.append(BadRow(number, "a required field is missing"))
                except self._damaged:
                    bad.append(BadRow(number, DAMAGED))
                except UnicodeDecodeError:
                    bad.append(BadRow(number, "a string that is not UTF-8"))
                except (OverflowError, _CrowdedError) as error:
                    bad.append(BadRow(number, str(error)))
            rows.append(row)
        return Decoded(pa.array(rows, self._type), bad)


class _CrowdedError(Exception):
    """Elements leave too many fields out."""


class _Room:
    """Bytes of columns that a row's elements may take yet, see columns/room.py."""

    left = 0

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise _CrowdedError(TOO_MANY_ABSENT)


def _message(columns: MessageColumns, room: _Room) -> _Convert:
    steps = [_step(column, room) for column in columns.fields]
    return lambda message: {name: step(message) for name, step in steps}


def _step(column: FieldColumn, room: _Room) -> tuple[str, _Convert]:
    field, name = column.field, column.field.name
    size = 0 if column.message is None else column.message.empty_bytes
    if column.shape == "map":
        key, value = (_value(one, room) for one in column.message.fields)  # type: ignore[union-attr]

        def entries(message: Any) -> list[tuple[Any, Any]]:
            room.take(size * len(getattr(message, name)))
            return [(key(one), value(each)) for one, each in getattr(message, name).items()]

        return name, entries
    convert = _value(column, room)
    if column.shape == "list":

        def items(message: Any) -> list[Any]:
            room.take(size * len(getattr(message, name)))
            made = list(map(convert, getattr(message, name)))
            if field.type == ENUM:
                room.take(sum(map(len, made)))
            return made

        return name, items
    if not column.nullable:  # also one with a default of its own
        return name, lambda message: convert(getattr(message, name))
    return name, lambda message: convert(getattr(message, name)) if message.HasField(field.name) else None


def _value(column: FieldColumn, room: _Room) -> _Convert:
    field = column.field
    if column.message is not None:
        return _message(column.message, room)
    if field.message_type is not None:
        return lambda message: _microseconds(message, column.path)
    if field.type == ENUM:
        enum, names = field.enum_type, enum_names(field.enum_type)
        return lambda number: names.get(number) or unknown_name(enum, number)
    if field.type == STRING:
        return _text
    if field.type in _BITS:
        half = 1 << (_BITS[field.type] - 1)
        return lambda number: number if number < half else number - 2 * half
    return lambda value: value


def _text(value: str | bytes) -> str:
    """google.protobuf has bytes for a string of proto2 that is not UTF-8, or an error."""
    return value if isinstance(value, str) else value.decode()


def _microseconds(message: Any, path: str) -> int:
    """The microseconds of a Timestamp or Duration, rounded down; OverflowError if they are no INT64."""
    result = int(message.seconds) * _MICROSECONDS + int(message.nanos) // 1000
    if not -_END_64 <= result < _END_64:
        raise OverflowError(f"field {path}: a time that is beyond what the column can hold")
    return result
