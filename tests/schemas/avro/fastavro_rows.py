"""Rows decoded one by one by fastavro: the same columns as the native kernel's, which is compared with it.

fastavro reads with the writer's schema alone, in a form that has the same bytes but loses nothing: a union's branches
are records, so that a value tells its branch; a map is an array of entries, which may repeat a key; enums, booleans
and strings are their bytes. What resolution does with the values is done here by the plan, as the native kernel does.

Bytes that no writer makes may pass here, and not there: a negative number of a union's branch, and a number of more
than 64 bits.
"""

from __future__ import annotations

import io
import struct
from array import array
from collections.abc import Sequence
from itertools import count
from typing import Any

import fastavro
import pyarrow as pa

from spark_klog.columns.room import BASE_ROOM, ROOM_OF_A_BYTE
from spark_klog.schemas.arrow_columns import Column, Kind
from spark_klog.schemas.avro.columns import column_unit
from spark_klog.schemas.avro.opcodes import MAX_EMPTY_ITEMS, Reason
from spark_klog.schemas.avro.program import Program, compile_plan, item_room
from spark_klog.schemas.avro.resolution import (
    IntoBranch,
    Mismatch,
    Plan,
    ReadItems,
    ReadRecord,
    ReadUnion,
    ReadValue,
    read_symbols,
    smallest,
)
from spark_klog.schemas.avro.schema import AvroSchema
from spark_klog.wire.primitives import Buffer, append_varlong

_INT32, _INT64 = 1 << 31, 1 << 63
_DURATION = struct.Struct("<III")
_INTERVAL = struct.Struct("<iiq")


class _Refused(Exception):
    """A row that does not decode."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason


class FastavroBuilders:
    """As `_avro.ColumnBuilders`."""

    def __init__(self, column: Column, *_: Any) -> None:
        self._root = column
        self._columns = list(column.tree())
        self._readers: dict[int, tuple[Program, Any]] = {}
        self._start()

    def _start(self) -> None:
        self._data = [bytearray() for _ in self._columns]
        self._ends = [array("i", [0]) for _ in self._columns]
        self._valid = [bytearray() for _ in self._columns]

    def decode(
        self,
        programs: Sequence[Program],
        which: Buffer | None,
        data: Buffer,
        offsets: Buffer,
        validity: Buffer | None,
        first: int,
        count: int,
        starts: Buffer | None,
        start: int,
    ) -> list[tuple[int, int, int, int]]:
        """See `_avro.ColumnBuilders.decode`."""
        failures = []
        content = memoryview(data).cast("B")
        ends = memoryview(offsets).cast("B").cast("i")
        valid = None if validity is None else memoryview(validity).cast("B")
        chosen = None if which is None else memoryview(which).cast("B").cast("i")
        begins = None if starts is None else memoryview(starts).cast("B").cast("i")
        for row in range(count):
            at = first + row
            number = 0 if chosen is None else chosen[row]
            value = None
            if 0 <= number < len(programs) and (valid is None or valid[at >> 3] >> (at & 7) & 1):
                begin = ends[at] + (start if begins is None else begins[row])
                try:
                    if not 0 <= begin <= ends[at + 1]:
                        raise _Refused(Reason.TRUNCATED)
                    value = self._row(programs[number], content[begin : ends[at + 1]])
                except _Refused as refused:
                    failures.append((row, number, int(refused.reason), 0))
            self._append(self._root, value)
        return failures

    def finish(self) -> list[tuple[bytes | None, int, Buffer, Buffer]]:
        """See `_avro.ColumnBuilders.finish`."""
        buffers: list[tuple[bytes | None, int, Buffer, Buffer]] = []
        for column, data, ends, valid in zip(self._columns, self._data, self._ends, self._valid, strict=True):
            nulls = valid.count(0)
            content = _packed(data) if column.kind == Kind.BOOLEAN else bytes(data)
            buffers.append((_packed(valid) if nulls else None, nulls, ends.tobytes(), content))
        self._start()
        return buffers

    def _row(self, program: Program, data: memoryview) -> Any:
        if id(program) not in self._readers:
            schema = fastavro.parse_schema(same_bytes(_writer(program.plan), count()))
            self._readers[id(program)] = (program, schema)
        size = len(data)
        if program.is_raw:
            length = bytearray()
            append_varlong(length, size)
            data = memoryview(bytes(length) + data)
        stream = io.BytesIO(data)
        try:
            given = fastavro.schemaless_reader(stream, self._readers[id(program)][1], None, return_record_name=True)
        except (EOFError, IndexError, ValueError, OverflowError, struct.error):
            raise _Refused(Reason.TRUNCATED) from None
        value = _Row(size).value(program.plan, self._root, given)
        if stream.tell() != len(data):
            raise _Refused(Reason.LEFT_OVER)
        return value

    def _append(self, column: Column, value: Any) -> None:
        """Append a value to a column and those in it; None is null, or zero or empty if the column has no nulls."""
        slot = column.slot
        if column.nullable and column.kind != Kind.NOTHING:
            self._valid[slot].append(value is not None)
        if column.kind == Kind.STRUCT:
            for number, child in enumerate(column.children):
                self._append(child, None if value is None else value[number])
        elif column.kind == Kind.LIST:
            for item in value or ():
                self._append(column.children[0], item)
            self._ends[slot].append(self._ends[slot][-1] + len(value or ()))
        elif column.kind == Kind.VARIABLE:
            self._data[slot] += value or b""
            self._ends[slot].append(len(self._data[slot]))
        elif column.kind != Kind.NOTHING:
            self._data[slot] += bytes(column.width) if value is None else value


def _packed(flags: bytearray) -> bytes:
    bits = bytearray((len(flags) + 7) // 8)
    for index, flag in enumerate(flags):
        bits[index >> 3] |= flag << (index & 7)
    return bytes(bits)


def compile_with_plan(plan: Plan, column: Column, *, is_raw: bool = False) -> Program:
    """As of `program.py`; the program knows its plan, by which the reference reads."""
    program = compile_plan(plan, column, is_raw=is_raw)
    program.plan = plan  # type: ignore[attr-defined]
    return program


def _writer(plan: Plan) -> AvroSchema:
    return _writer(plan.plan) if isinstance(plan, IntoBranch) else plan.writer  # type: ignore[union-attr]


def same_bytes(schema: AvroSchema, names: count[int]) -> Any:
    """A schema with the same bytes for fastavro; see the module. `names` number its named types."""
    kind = schema.kind
    if kind in ("boolean", "fixed"):
        return {"type": "fixed", "name": f"t{next(names)}", "size": schema.size or int(kind == "boolean")}
    if kind in ("string", "enum"):
        return "bytes" if kind == "string" else "long"
    if kind == "record":
        fields = [same_bytes(field.schema, names) for field in schema.fields]
        return _record(f"t{next(names)}", fields)
    if kind == "union":
        name = f"t{next(names)}"
        return [_record(f"{name}_{i}", [same_bytes(part, names)]) for i, part in enumerate(schema.branches)]
    if schema.items is not None:
        item = same_bytes(schema.items, names)
        return {"type": "array", "items": item if kind == "array" else _record(f"t{next(names)}", ["bytes", item])}
    return kind


def _record(name: str, kinds: list[Any]) -> Any:
    fields = [{"name": f"f{index}", "type": kind} for index, kind in enumerate(kinds)]
    return {"type": "record", "name": name, "fields": fields}


class _Row:
    """What a plan makes of one row of fastavro's values: bytes of columns, None for null, lists, tuples of fields."""

    def __init__(self, size: int) -> None:
        self._empty_items = MAX_EMPTY_ITEMS
        self._room = BASE_ROOM + ROOM_OF_A_BYTE * size

    def value(self, plan: Plan, column: Column, given: Any) -> Any:
        if isinstance(plan, ReadValue):
            leaf = _leaf(plan, column, given)
            if plan.writer.kind == "enum" and column.kind == Kind.VARIABLE:
                self._crowd(len(leaf or b""))
            return leaf
        if isinstance(plan, ReadRecord):
            return self._of_record(plan, column, given)
        if isinstance(plan, ReadItems):
            return self._items(plan, column, given)
        if isinstance(plan, ReadUnion):
            branch = int(given[0].rpartition("_")[2])
            return self.value(plan.branches[branch], column, given[1]["f0"])
        if isinstance(plan, IntoBranch):
            if plan.reader.branches[plan.branch].kind == "null":
                return None
            if column.members is None:
                return self.value(plan.plan, column, given)
            chosen = column.members[plan.branch]
            value = self.value(plan.plan, column.children[chosen], given)
            return tuple(value if number == chosen else None for number in range(len(column.children)))
        if isinstance(plan, Mismatch):
            raise _Refused(Reason.BRANCH_MISMATCH)
        self._skip(plan.writer, given)
        return None

    def _of_record(self, plan: ReadRecord, column: Column, given: Any) -> tuple[Any, ...]:
        values: list[Any] = [None] * len(column.children)
        for number, (index, step) in enumerate(plan.steps):
            written = given[f"f{number}"]
            if index < 0:
                self._skip(plan.writer.fields[number].schema, written)
            else:
                values[index] = self.value(step, column.children[index], written)
        for index, data, step in plan.defaults:
            schema = fastavro.parse_schema(same_bytes(plan.reader.fields[index].schema, count()))
            read = fastavro.schemaless_reader(io.BytesIO(data), schema, None, return_record_name=True)
            values[index] = self.value(step, column.children[index], read)
        return tuple(values)

    def _items(self, plan: ReadItems, column: Column, given: list[Any]) -> list[Any]:
        self._count(plan.writer, given)
        self._crowd(len(given) * item_room(plan, column))
        if plan.writer.kind == "array":
            return [self.value(plan.item, column.children[0], item) for item in given]
        _, values = column.children[0].children
        return [(_text(entry["f0"]), self.value(plan.item, values, entry["f1"])) for entry in given]

    def _crowd(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise _Refused(Reason.TOO_MANY_ABSENT)

    def _count(self, writer: AvroSchema, given: list[Any]) -> None:
        assert writer.items is not None
        if writer.kind == "array" and not smallest(writer.items):
            self._empty_items -= len(given)
            if self._empty_items < 0:
                raise _Refused(Reason.TOO_MANY_EMPTY_ITEMS)

    def _skip(self, writer: AvroSchema, given: Any) -> None:
        """Check a value that the reader has no place for."""
        kind = writer.kind
        if kind == "int":
            _int(given)
        elif kind == "boolean":
            _boolean(given)
        elif kind == "enum":
            _symbol(given, len(writer.symbols))
        elif kind == "record":
            for number, field in enumerate(writer.fields):
                self._skip(field.schema, given[f"f{number}"])
        elif kind == "union":
            self._skip(writer.branches[int(given[0].rpartition("_")[2])], given[1]["f0"])
        elif writer.items is not None:
            self._count(writer, given)
            for item in given:
                self._skip(writer.items, item if kind == "array" else item["f1"])


def _leaf(plan: ReadValue, column: Column, given: Any) -> bytes | None:
    kind, reader = plan.writer.kind, plan.reader
    if kind == "null":
        return None
    if kind == "boolean":
        return _boolean(given)
    if kind in ("int", "long"):
        return _number(plan, column, _int(given) if kind == "int" else given)
    if kind in ("float", "double"):
        return struct.pack("<f" if column.width == 4 else "<d", given)
    if kind == "enum":
        symbol = read_symbols(plan.writer, reader)[_symbol(given, len(plan.writer.symbols))]
        if symbol is None:
            raise _Refused(Reason.SYMBOL_UNKNOWN)
        return reader.symbols[symbol].encode() if column.kind == Kind.VARIABLE else struct.pack("<i", symbol)
    if reader.logical == "decimal":
        number = int.from_bytes(given, "big", signed=True)
        if not given or abs(number) >= 10**reader.precision:
            raise _Refused(Reason.DECIMAL_TOO_LARGE)
        return number.to_bytes(column.width, "little", signed=True)
    if kind == "fixed":
        if not column.width or reader.logical != "duration":
            return bytes(given)
        months, days, milliseconds = _DURATION.unpack(given)
        if max(months, days) >= _INT32:
            raise _Refused(Reason.TIME_TOO_LARGE)
        return _INTERVAL.pack(months, days, milliseconds * 1_000_000)
    return _text(given) if reader.kind == "string" else bytes(given)


def _number(plan: ReadValue, column: Column, given: int) -> bytes:
    if plan.reader.kind in ("float", "double"):
        return struct.pack("<f" if column.width == 4 else "<d", given)
    if plan.unit:
        unit = column_unit(plan.reader, column.type)
        given = given * max(unit // plan.unit, 1)
        if not -_INT64 <= given < _INT64:
            raise _Refused(Reason.TIME_TOO_LARGE)
        given //= max(plan.unit // unit, 1)
        if pa.types.is_time(column.type) and not 0 <= given < 86_400 * unit:
            raise _Refused(Reason.TIME_TOO_LARGE)
    return struct.pack("<i" if column.width == 4 else "<q", given)


def _int(given: int) -> int:
    if not -_INT32 <= given < _INT32:
        raise _Refused(Reason.INT_TOO_LARGE)
    return given


def _boolean(given: bytes) -> bytes:
    if given[0] > 1:
        raise _Refused(Reason.NOT_BOOLEAN)
    return bytes(given)


def _symbol(given: int, symbols: int) -> int:
    if not 0 <= given < symbols:
        raise _Refused(Reason.NO_SUCH_SYMBOL)
    return given


def _text(given: bytes) -> bytes:
    try:
        given.decode()
    except UnicodeDecodeError:
        raise _Refused(Reason.NOT_UTF8) from None
    return bytes(given)
