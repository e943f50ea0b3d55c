"""Columns of messages as the native kernel reads them: tables of INT32, see `_protobuf_decode.pxi`."""

from __future__ import annotations

import struct
from array import array
from enum import IntEnum
from typing import Any, Final

import pyarrow as pa

from spark_klog.columns.room import TOO_MANY_ABSENT
from spark_klog.schemas.arrow_columns import Column, Kind
from spark_klog.schemas.protobuf.columns import (
    BOOL,
    BYTES,
    DOUBLE,
    ENUM,
    FIXED32,
    FIXED64,
    FLOAT,
    GROUP,
    INT32,
    INT64,
    MESSAGE,
    SFIXED32,
    SFIXED64,
    SINT32,
    SINT64,
    STRING,
    TIMESTAMP,
    UINT32,
    UINT64,
    FieldColumn,
    MessageColumns,
    enum_names,
    unknown_name,
)

#: Raise it when tables, reasons or calls of the kernel change: a kernel of other sources is not used.
VERSION: Final = 4


class Op(IntEnum):
    """How a value is written; numbers come first."""

    INT32 = 0
    INT64 = 1
    SINT32 = 2
    SINT64 = 3
    BOOL = 4
    ENUM = 5
    FOUR = 6
    EIGHT = 7
    STRING = 8
    BYTES = 9
    MESSAGE = 10
    GROUP = 11
    TIMESTAMP = 12
    DURATION = 13


class Reason(IntEnum):
    """Why a row fails."""

    OK = 0
    TRUNCATED = 1
    NUMBER_TOO_LONG = 2
    BAD_TAG = 3
    BAD_GROUP = 4
    NOT_UTF8 = 5
    MISSING = 6
    TIME_TOO_LARGE = 7
    TOO_LARGE = 8
    TOO_DEEP = 9
    IS_NULL = 10
    NOT_A_VALUE = 11
    TWO_OF_ONEOF = 12
    TOO_MANY_ABSENT = 13


#: What users read, after the field's name.
TEXTS: Final = {
    Reason.TRUNCATED: "the value is cut off, or was written with another schema",
    Reason.NUMBER_TOO_LONG: "a number of more than 64 bits",
    Reason.BAD_TAG: "a field without a number or with an unknown wire type: it was written with another schema",
    Reason.BAD_GROUP: "the end of a group that did not begin: it was written with another schema",
    Reason.NOT_UTF8: "a string that is not UTF-8",
    Reason.MISSING: "is required, but missing",
    Reason.TIME_TOO_LARGE: "a time that is beyond what the column can hold",
    Reason.TOO_LARGE: "more than 2 GiB in one column of a batch",
    Reason.TOO_DEEP: "more than 100 groups in one another",
    Reason.IS_NULL: "is null, which its Protobuf type is not: make it optional, or fill the column",
    Reason.NOT_A_VALUE: "is no value of the enum",
    Reason.TWO_OF_ONEOF: "is set beside another field of its oneof: all but one have to be null",
    Reason.TOO_MANY_ABSENT: TOO_MANY_ABSENT,
}
WIRES: Final = {
    **dict.fromkeys((Op.INT32, Op.INT64, Op.SINT32, Op.SINT64, Op.BOOL, Op.ENUM), 0),
    Op.EIGHT: 1,
    **dict.fromkeys((Op.STRING, Op.BYTES, Op.MESSAGE, Op.TIMESTAMP, Op.DURATION), 2),
    Op.GROUP: 3,
    Op.FOUR: 5,
}
_OPS: Final = {
    **dict.fromkeys((INT32, UINT32), Op.INT32),
    **dict.fromkeys((INT64, UINT64), Op.INT64),
    SINT32: Op.SINT32,
    SINT64: Op.SINT64,
    BOOL: Op.BOOL,
    ENUM: Op.ENUM,
    **dict.fromkeys((FIXED32, SFIXED32, FLOAT), Op.FOUR),
    **dict.fromkeys((FIXED64, SFIXED64, DOUBLE), Op.EIGHT),
    STRING: Op.STRING,
    BYTES: Op.BYTES,
    MESSAGE: Op.MESSAGE,
    GROUP: Op.GROUP,
}
SHAPES: Final = {"single": 0, "list": 1, "map": 2}
_WIDTHS: Final = {Op.INT32: 4, Op.SINT32: 4, Op.FOUR: 4, Op.INT64: 8, Op.SINT64: 8, Op.EIGHT: 8}
#: Fields of smaller numbers are found by a table.
_MOST_NUMBERS: Final = 1024


def op_of(field: Any, is_time: bool) -> Op:
    if is_time:
        return Op.TIMESTAMP if field.message_type.full_name == TIMESTAMP else Op.DURATION
    return _OPS[field.type]


class MessageTables:
    """The tables of a message's columns, and `column`, the columns as the kernel's builders have them."""

    def __init__(self, columns: MessageColumns) -> None:
        self.messages = array("i")
        self.fields = array("i")
        self.numbers = array("i")
        self.enums = array("i")
        self.constants = bytearray()
        self.oneof_count = 0
        #: By the number of a field, for errors.
        self.paths: list[str] = []
        self._message_rows: list[list[int]] = []
        self._field_rows: list[list[int]] = []
        self._enum_places: dict[str, tuple[int, int]] = {}
        self._next_slot = 0
        self.column = self._message(columns, nullable=True)[0]
        for row in self._message_rows:
            self.messages.extend(row)
        for row in self._field_rows:
            self.fields.extend(row)

    def describe(self, reason: Reason, position: int) -> str:
        where = f"field {self.paths[position]}: " if position >= 0 else ""
        return f"{where}{TEXTS[reason]}"

    def _message(self, columns: MessageColumns, *, nullable: bool) -> tuple[Column, int]:
        """The column of a message, and the number of its table."""
        number = len(self._message_rows)
        self._message_rows.append([])
        column = Column(self._slot(), Kind.STRUCT, columns.type, nullable=nullable)
        first_field = len(self._field_rows)
        self._field_rows.extend([] for _ in columns.fields)
        self.paths.extend(field.path for field in columns.fields)
        oneofs: dict[str, int] = {}
        first_oneof = self.oneof_count
        for source in columns.fields:
            oneof = source.field.containing_oneof
            if oneof is not None and oneof.name not in oneofs:
                oneofs[oneof.name] = self.oneof_count
                self.oneof_count += 1
        for index, source in enumerate(columns.fields):
            oneof = source.field.containing_oneof
            made = self._field(source, first_field + index, -1 if oneof is None else oneofs[oneof.name])
            column.children.append(made)
        column.end = self._next_slot
        numbered = {source.field.number: first_field + index for index, source in enumerate(columns.fields)}
        for field in columns.message.fields:
            oneof = field.containing_oneof
            if field.number not in numbered and oneof is not None and oneof.name in oneofs:
                # a message without fields has no column, but the oneof has no other value then
                numbered[field.number] = -2 - 2 * oneofs[oneof.name] - (field.type == GROUP)
        by_number = sorted(numbered.items())
        small = [pair for pair in by_number if pair[0] < _MOST_NUMBERS]
        first_number, number_count = len(self.numbers), small[-1][0] + 1 if small else 0
        self.numbers.extend([-1] * number_count)
        for at, index in small:
            self.numbers[first_number + at] = index
        first_large = len(self.numbers)
        for pair in by_number[len(small) :]:
            self.numbers.extend(pair)
        self._message_rows[number] = [
            *(first_field, len(columns.fields)),
            *(first_number, number_count, first_large, len(by_number) - len(small)),
            *(first_oneof, len(oneofs), column.slot, columns.empty_bytes),
        ]
        return column, number

    def _field(self, part: FieldColumn, index: int, oneof: int) -> Column:
        field, op = part.field, op_of(part.field, part.is_time)
        slot, message = self._next_slot, -1
        if part.shape == "single":
            column, message = self._value(part, op, part.type, part.nullable)
        else:
            column = Column(self._slot(), Kind.LIST, part.type, nullable=part.nullable)
            item = part.type.value_type if part.shape == "list" else None
            child, message = self._value(part, op, item, False)
            column.children.append(child)
            column.end = self._next_slot
        enum = (0, 0)
        is_closed = False
        text = (0, 0)
        low = high = 0
        if op == Op.ENUM:
            enum = self._enum(field.enum_type)
            is_closed = field.enum_type.is_closed
            text = self._constant(unknown_name(field.enum_type, 0)[:-1].encode())
        if part.shape == "single" and part.message is None and not part.is_time:
            default = field.default_value
            if op in (Op.STRING, Op.BYTES):
                text = self._constant(default.encode() if op == Op.STRING else default)
            else:
                low, high = struct.unpack("<ii", _bits(field.type, op, default))
        self._field_rows[index] = [
            *(field.number, op, WIRES[op], SHAPES[part.shape], slot, part.nullable, field.is_required, oneof, message),
            *(*enum, is_closed, *text, low, high),
        ]
        return column

    def _value(self, source: FieldColumn, op: Op, kind: pa.DataType, nullable: bool) -> tuple[Column, int]:
        """The column of a value, and the table of its message."""
        if source.message is not None:
            return self._message(source.message, nullable=nullable)
        width = _WIDTHS.get(op, 8 if source.is_time else 0)
        if op == Op.BOOL:
            made = Column(self._slot(), Kind.BOOLEAN, kind, 1, nullable)
        else:
            made = Column(self._slot(), Kind.FIXED if width else Kind.VARIABLE, kind, width, nullable)
        made.end = self._next_slot
        return made, -1

    def _enum(self, enum: Any) -> tuple[int, int]:
        """Where an enum's values begin, and how many there are."""
        place = self._enum_places.get(enum.full_name)
        if place is None:
            names = sorted(enum_names(enum).items())
            place = self._enum_places[enum.full_name] = len(self.enums) // 3, len(names)
            for number, name in names:
                self.enums.extend((number, *self._constant(name.encode())))
        return place

    def _constant(self, data: bytes) -> tuple[int, int]:
        place = len(self.constants), len(data)
        self.constants += data
        return place

    def _slot(self) -> int:
        self._next_slot += 1
        return self._next_slot - 1


def _bits(kind: int, op: Op, value: Any) -> bytes:
    """A number as the kernel has it once it is read, in eight bytes."""
    if kind == FLOAT:
        return struct.pack("<fxxxx", value)
    if kind == DOUBLE:
        return struct.pack("<d", value)
    number = int(value)
    if op in (Op.SINT32, Op.SINT64):
        number = number << 1 if number >= 0 else ~number << 1 | 1
    return (number & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
