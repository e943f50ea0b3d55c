"""Plans (resolution.py, writing.py) compiled for the native kernel: numbers, and constants that they point to.

opcodes.py says what the numbers are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

import pyarrow as pa

from spark_klog.columns.room import empty_bytes
from spark_klog.errors import SchemaError
from spark_klog.schemas.arrow_columns import Column, Kind
from spark_klog.schemas.avro.columns import UNITS, column_unit, unit_of
from spark_klog.schemas.avro.opcodes import TEXTS, Op, Reason, WriteOp
from spark_klog.schemas.avro.resolution import (
    IntoBranch,
    Mismatch,
    Plan,
    ReadItems,
    ReadRecord,
    ReadUnion,
    ReadValue,
    Skip,
    read_symbols,
    smallest,
)
from spark_klog.schemas.avro.schema import MAX_DEPTH, AvroSchema
from spark_klog.schemas.avro.writing import WriteBranch, WriteItems, WriteMembers, WritePlan, WriteRecord, WriteValue

#: Numbers that a program may have: unions of records in unions multiply them.
MAX_NUMBERS = 1 << 20
_LARGEST_ROOM = (1 << 31) - 1
_NO_COLUMN = Column(-1, Kind.NOTHING, pa.null())


@dataclass
class Program:
    """How one writer's schema is read into the columns of one reader's schema."""

    #: Whether records are bytes without their length; see `AvroDecoder.program`.
    is_raw: bool
    code: array[int]
    constants: bytes
    #: Where the program of a field begins, and its name, in the program's order.
    _starts: list[int]
    _paths: list[str]

    def describe(self, reason: Reason, position: int) -> str:
        """Text for a row that failed with `reason` at a position of the program."""
        path = self._paths[bisect_right(self._starts, position) - 1]
        return f"field {path}: {TEXTS[reason]}" if path and reason != Reason.LEFT_OVER else TEXTS[reason]


def item_room(plan: ReadItems, column: Column) -> int:
    """Bytes in columns of a list's or map's item without its fields, with its defaults; see columns/room.py."""
    return min(empty_bytes(column.children[0].type) + _default_bytes(plan.item), _LARGEST_ROOM)


def _default_bytes(plan: Plan) -> int:
    """Bytes of the defaults that a value without lists takes at most."""
    if isinstance(plan, ReadRecord):
        defaults = sum(len(data) for _, data, _ in plan.defaults)
        return defaults + sum(_default_bytes(step) for _, step in plan.steps)
    if isinstance(plan, ReadUnion):
        return max(map(_default_bytes, plan.branches))
    return _default_bytes(plan.plan) if isinstance(plan, IntoBranch) else 0


def compile_plan(plan: Plan, column: Column, *, is_raw: bool = False) -> Program:
    """Compile a plan for the columns of its reader's schema; `SchemaError` if the program would be too large."""
    compiler = _Compiler(is_raw=is_raw)
    compiler.read(plan, column, "", 0)
    compiler.emit(Op.END)
    return Program(is_raw, array("i", compiler.code), bytes(compiler.constants), compiler.starts, compiler.paths)


@dataclass
class _Numbers:
    """A program that is being compiled."""

    code: list[int] = field(default_factory=list)
    constants: bytearray = field(default_factory=bytearray)
    starts: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def emit(self, *numbers: int) -> int:
        """Append numbers; the position of the first one."""
        if len(self.code) > MAX_NUMBERS:
            raise SchemaError(f"the program of the schema has more than {MAX_NUMBERS} numbers: too many unions in it")
        self.code += numbers
        return len(self.code) - len(numbers)

    def constant(self, data: bytes) -> int:
        """Add a constant; its position."""
        position = self.constants.find(data)
        if position < 0:
            position = len(self.constants)
            self.constants += data
        return position

    def at(self, path: str) -> None:
        """What follows is about this field."""
        self.starts.append(len(self.code))
        self.paths.append(path)


@dataclass
class _Compiler(_Numbers):
    is_raw: bool = False

    def read(self, plan: Plan, column: Column, path: str, depth: int) -> None:
        """Emit the program of a plan. `depth` counts the lists and defaults around it."""
        if depth > MAX_DEPTH:
            raise SchemaError(f"field {path}: more than {MAX_DEPTH} arrays and maps in each other")
        self.at(path)
        if isinstance(plan, ReadValue):
            self._value(plan, column)
        elif isinstance(plan, ReadRecord):
            self._record(plan, column, path, depth)
        elif isinstance(plan, ReadItems):
            self._items(plan, column, path, depth)
        elif isinstance(plan, IntoBranch):
            self._into_branch(plan, column, path, depth)
        elif isinstance(plan, ReadUnion):
            self._union(plan.branches, column, path, depth)
        elif isinstance(plan, Mismatch):
            self.emit(Op.MISMATCH)
        else:
            self._skip(plan.writer, path, depth)

    def _record(self, plan: ReadRecord, column: Column, path: str, depth: int) -> None:
        if column.nullable:
            self.emit(Op.PRESENT, column.slot)
        for (index, step), written in zip(plan.steps, plan.writer.fields, strict=True):
            name = plan.reader.fields[index].name if index >= 0 else written.name
            child = column.children[index] if index >= 0 else _NO_COLUMN
            self.read(step, child, f"{path}.{name}" if path else name, depth)
        for index, data, step in plan.defaults:
            name = plan.reader.fields[index].name
            self.emit(Op.DEFAULT, self.constant(data), len(data))
            self.read(step, column.children[index], f"{path}.{name}" if path else name, depth + 1)
            self.emit(Op.DEFAULT_END)
        self.at(path)

    def _items(self, plan: ReadItems, column: Column, path: str, depth: int) -> None:
        assert plan.writer.items is not None
        is_map = plan.writer.kind == "map"
        start = self.emit(Op.LIST, 0)
        below = column.children[0]
        if is_map:
            key, below = below.children
            self.emit(Op.STRING, key.slot)
        self.read(plan.item, below, path + ("{}" if is_map else "[]"), depth + 1)
        self.at(path)
        smallest_item = smallest(plan.writer.items) + is_map
        self.code[start + 1] = self.emit(Op.NEXT, column.slot, smallest_item, start + 2, item_room(plan, column))

    def _into_branch(self, plan: IntoBranch, column: Column, path: str, depth: int) -> None:
        if plan.reader.branches[plan.branch].kind == "null":
            self.emit(Op.EMPTY, column.slot)
        elif column.members is None:
            self.read(plan.plan, column, path, depth)
        else:
            chosen = column.members[plan.branch]
            if column.nullable:
                self.emit(Op.PRESENT, column.slot)
            for number, child in enumerate(column.children):
                if number == chosen:
                    self.read(plan.plan, child, path, depth)
                else:
                    self.emit(Op.EMPTY, child.slot)

    def _union(self, branches: tuple[Plan, ...], column: Column, path: str, depth: int) -> None:
        start = self.emit(Op.UNION, len(branches), *[0] * len(branches))
        jumps = []
        for number, branch in enumerate(branches):
            self.code[start + 2 + number] = len(self.code)
            self.read(branch, column, path, depth)
            if number < len(branches) - 1:
                jumps.append(self.emit(Op.JUMP, 0))
        for jump in jumps:
            self.code[jump + 1] = len(self.code)

    def _value(self, plan: ReadValue, column: Column) -> None:
        writer, reader, slot = plan.writer, plan.reader, column.slot
        kind = writer.kind
        if kind == "null":
            self.emit(Op.EMPTY, slot)
        elif kind == "boolean":
            self.emit(Op.BOOLEAN, slot)
        elif kind in ("int", "long"):
            self._number(plan, column)
        elif kind == "float":
            # the column of a union of float and double is one of doubles
            self.emit(Op.FOUR if column.width == 4 else Op.FLOAT_DOUBLE, slot)
        elif kind == "double":
            self.emit(Op.EIGHT, slot)
        elif reader.logical == "decimal":
            limit = self.constant((10**reader.precision).to_bytes(column.width, "little"))
            self.emit(Op.DECIMAL, slot, writer.size if kind == "fixed" else -1, column.width, limit)
        elif self.is_raw:
            self.emit(Op.REST, slot, reader.kind == "string")
        elif kind in ("bytes", "string"):
            self.emit(Op.STRING if reader.kind == "string" else Op.BYTES, slot)
        elif kind == "fixed":
            if column.width and reader.logical == "duration":
                self.emit(Op.DURATION, slot)
            else:
                self.emit(Op.FIXED if pa.types.is_fixed_size_binary(column.type) else Op.FIXED_BYTES, slot, writer.size)
        else:
            self._enum(writer, reader, column)

    def _number(self, plan: ReadValue, column: Column) -> None:
        is_int = plan.writer.kind == "int"
        unit = column_unit(plan.reader, column.type) if plan.unit else 0
        if plan.reader.kind in ("float", "double"):
            self.emit(Op.NUMBER_FLOAT if column.width == 4 else Op.NUMBER_DOUBLE, column.slot, is_int)
        elif unit and pa.types.is_time(column.type):
            self.emit(Op.TIME, column.slot, is_int, max(unit // plan.unit, 1), max(plan.unit // unit, 1), unit)
        elif unit != plan.unit:
            self.emit(Op.SCALED, column.slot, is_int, max(unit // plan.unit, 1), max(plan.unit // unit, 1))
        elif column.width == 4:
            self.emit(Op.INT, column.slot)
        else:
            self.emit(Op.INT_LONG if is_int else Op.LONG, column.slot)

    def _enum(self, writer: AvroSchema, reader: AvroSchema, column: Column) -> None:
        symbols = read_symbols(writer, reader)
        if column.kind == Kind.VARIABLE:
            table: list[int] = []
            for symbol in symbols:
                data = b"" if symbol is None else reader.symbols[symbol].encode()
                table += (self.constant(data), -1 if symbol is None else len(data))
            self.emit(Op.ENUM, column.slot, len(symbols), *table)
        else:
            self.emit(
                Op.ENUM_INDEX, column.slot, len(symbols), *(-1 if symbol is None else symbol for symbol in symbols)
            )

    def _skip(self, writer: AvroSchema, path: str, depth: int) -> None:
        kind = writer.kind
        if kind in ("int", "long"):
            self.emit(Op.SKIP_NUMBER, kind == "int")
        elif kind in ("float", "double", "fixed"):
            self.emit(Op.SKIP_FIXED, {"float": 4, "double": 8}.get(kind, writer.size))
        elif kind in ("bytes", "string"):
            self.emit(Op.SKIP_BYTES)
        elif kind == "boolean":
            self.emit(Op.SKIP_BOOLEAN)
        elif kind == "enum":
            self.emit(Op.SKIP_ENUM, len(writer.symbols))
        elif kind == "record":
            for entry in writer.fields:
                self._skip(entry.schema, path, depth)
        elif kind == "union":
            self._union(tuple(map(Skip, writer.branches)), _NO_COLUMN, path, depth)
        elif kind != "null":
            self._skip_items(writer, path, depth)

    def _skip_items(self, writer: AvroSchema, path: str, depth: int) -> None:
        assert writer.items is not None
        is_map = writer.kind == "map"
        start = self.emit(Op.LIST, 0)
        if is_map:
            self.emit(Op.SKIP_BYTES)
        self.read(Skip(writer.items), _NO_COLUMN, path, depth + 1)
        self.code[start + 1] = self.emit(Op.NEXT, -1, smallest(writer.items) + is_map, start + 2, 0)


@dataclass
class WriteProgram:
    """How an Arrow type is written by a schema."""

    plan: WritePlan
    code: array[int]
    constants: bytes
    #: For each slot the slot it is in and its number there; the first is the root's, (-1, 0).
    slots: list[tuple[int, int]]
    _starts: list[int]
    _paths: list[str]

    def describe(self, reason: Reason, position: int) -> str:
        """Text for a row that failed with `reason` at a position of the program."""
        path = self._paths[bisect_right(self._starts, position) - 1]
        return f"field {path or 'of the root'}: {TEXTS[reason]}"


def compile_writing(plan: WritePlan) -> WriteProgram:
    """Compile a plan; `SchemaError` if the program would be too large."""
    compiler = _WriteCompiler()
    compiler.slots.append((-1, 0))
    compiler.write(plan, 0, "", 0)
    compiler.emit(WriteOp.END)
    code = array("i", compiler.code)
    return WriteProgram(plan, code, bytes(compiler.constants), compiler.slots, compiler.starts, compiler.paths)


@dataclass
class _WriteCompiler(_Numbers):
    slots: list[tuple[int, int]] = field(default_factory=list)

    def child(self, slot: int, number: int) -> int:
        """The slot of an array in another one: a struct's field, a list's items (0), a map's keys (0) and items (1)."""
        self.slots.append((slot, number))
        return len(self.slots) - 1

    def write(self, plan: WritePlan, slot: int, path: str, depth: int, is_present: bool = False) -> None:
        """Emit the program of a plan; `is_present` if the value is known not to be null."""
        if depth > MAX_DEPTH:
            raise SchemaError(f"field {path}: more than {MAX_DEPTH} arrays and maps in each other")
        self.at(path)
        if isinstance(plan, WriteBranch):
            self._branch(plan, slot, path, depth)
            return
        if isinstance(plan, WriteMembers):
            self._members(plan, slot, path, depth)
            return
        if not is_present and plan.schema.kind != "null":
            self.emit(WriteOp.REQUIRED, slot)
        if isinstance(plan, WriteRecord):
            for entry, (index, step) in zip(plan.schema.fields, plan.steps, strict=True):
                if isinstance(step, bytes):
                    self.emit(WriteOp.LITERAL, self.constant(step), len(step))
                else:
                    below = f"{path}.{entry.name}" if path else entry.name
                    self.write(step, self.child(slot, index), below, depth)
        elif isinstance(plan, WriteItems):
            self._items(plan, slot, path, depth)
        else:
            self._value(plan, slot)

    def _branch(self, plan: WriteBranch, slot: int, path: str, depth: int) -> None:
        if plan.null == plan.branch:
            self.emit(WriteOp.LITERAL, self.constant(bytes([2 * plan.null])), 1)
        elif plan.null < 0:
            self.emit(WriteOp.REQUIRED, slot)
            self.emit(WriteOp.LITERAL, self.constant(bytes([2 * plan.branch])), 1)
            self.write(plan.plan, slot, path, depth, is_present=True)
        else:
            start = self.emit(WriteOp.BRANCH, slot, 2 * plan.null, 2 * plan.branch, 0)
            self.write(plan.plan, slot, path, depth, is_present=True)
            self.code[start + 4] = len(self.code)

    def _members(self, plan: WriteMembers, slot: int, path: str, depth: int) -> None:
        # a null struct has no members that are not null, as Arrow may have anything under it
        start = -1
        if plan.null >= 0:
            start = self.emit(WriteOp.BRANCH, slot, 2 * plan.null, -1, 0)
        else:
            self.emit(WriteOp.REQUIRED, slot)
        children = [self.child(slot, index) for index in range(len(plan.members))]
        table = [
            number
            for child, (branch, _) in zip(children, plan.members, strict=True)
            for number in (child, 2 * branch, 0)
        ]
        members = self.emit(WriteOp.MEMBERS, 2 * plan.null if plan.null >= 0 else -1, len(children), 0, *table)
        jumps = []
        for index, (child, (_, step)) in enumerate(zip(children, plan.members, strict=True)):
            self.code[members + 6 + 3 * index] = len(self.code)
            name = f"member{index}"
            self.write(step, child, f"{path}.{name}" if path else name, depth, is_present=True)
            jumps.append(self.emit(WriteOp.JUMP, 0))
        self.at(path)
        end = len(self.code)
        for jump in jumps:
            self.code[jump + 1] = end
        self.code[members + 3] = end
        if start >= 0:
            self.code[start + 4] = end

    def _items(self, plan: WriteItems, slot: int, path: str, depth: int) -> None:
        start = self.emit(WriteOp.LIST, slot, 0)
        is_map = plan.schema.kind == "map"
        if is_map:
            self.emit(WriteOp.BYTES, self.child(slot, 0))
        self.write(plan.item, self.child(slot, int(is_map)), path + ("{}" if is_map else "[]"), depth + 1)
        self.at(path)
        self.code[start + 2] = self.emit(WriteOp.NEXT, start + 3)

    def _value(self, plan: WriteValue, slot: int) -> None:
        schema, kind = plan.schema, plan.type
        if schema.kind == "boolean":
            self.emit(WriteOp.BOOLEAN, slot)
        elif schema.kind in ("int", "long"):
            is_32 = kind.bit_width == 32
            unit = UNITS[unit_of(schema.logical or "")] if plan.unit else 0
            if unit != plan.unit:
                self.emit(WriteOp.SCALED, slot, is_32, max(unit // plan.unit, 1), max(plan.unit // unit, 1))
            else:
                self.emit(WriteOp.INT if is_32 else WriteOp.LONG, slot)
        elif schema.kind in ("float", "double"):
            self.emit(WriteOp.FOUR if schema.kind == "float" else WriteOp.EIGHT, slot)
        elif schema.kind == "enum":
            table: list[int] = []
            for symbol in schema.symbols:
                data = symbol.encode()
                table += (self.constant(data), len(data))
            self.emit(WriteOp.ENUM, slot, len(schema.symbols), *table)
        elif schema.logical == "decimal":
            size = schema.size if schema.kind == "fixed" else -1
            self.emit(WriteOp.DECIMAL, slot, kind.bit_width // 8, size)
        elif pa.types.is_fixed_size_binary(kind):
            self.emit(WriteOp.FIXED if schema.kind == "fixed" else WriteOp.SIZED, slot, kind.byte_width)
        elif kind == pa.month_day_nano_interval():
            self.emit(WriteOp.DURATION, slot)
        elif schema.kind == "fixed":
            self.emit(WriteOp.EXACT, slot, schema.size)
        elif schema.kind != "null":
            self.emit(WriteOp.BYTES, slot)
