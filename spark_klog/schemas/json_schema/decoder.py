"""JSON records → an Arrow column: blocks by Arrow's parser, and rows by Python's if a block does not parse.

Arrow's parser says neither which row is bad nor reads all that JSON Schema allows, and it has no maps. So it reads a
block of rows, and what it reads has to be what Python's parser would make of each row. If not, Python's parser reads.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from spark_klog.columns.room import JsonRoom, empty_bytes
from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn
from spark_klog.schemas.json_schema.columns import ANY, LOCAL_TIMESTAMP, TIMESTAMP, Column
from spark_klog.schemas.json_schema.row_values import (
    FIRST_DAY,
    FIRST_MS,
    LAST_DAY,
    LAST_MS,
    NestedTooDeeply,
    RowParser,
    default_of,
)
from spark_klog.schemas.json_schema.schema import JsonSchema
from spark_klog.schemas.rows import BadRow, Decoded, FieldPair
from spark_klog.wire.primitives import Buffer

if TYPE_CHECKING:
    from spark_klog.schemas.json_schema.validation import Validator

#: What Arrow parses at once.
_MOST_BYTES: Final = 64 * 1024 * 1024
#: Beyond all values: without an end pyarrow's binary_slice has too large a number to count with.
_LONGEST: Final = 1 << 31
#: From it on doubles are no longer all integers.
_EXACT_IN_DOUBLE: Final = 1 << 53
#: Rows in which the bad ones of a block are looked for.
_FEW: Final = 512
#: What Arrow takes for numbers, and Python does not. It may also stand in a text: then rows are parsed one by one.
_SUSPECTS: Final = ((b"-NaN", re.compile(b"-NaN")), (b"Inf", re.compile(rb"Inf[\s,\]}]")))
#: Digits of a second that no type has.
_BEYOND_MICROSECONDS: Final = r"(\.\d{6})\d+"
_DATE_OF_UTC: Final = r"^(\d{4}-\d\d-\d\d)Z$"
#: What stands around each value: an object of its own. Arrow would accept several values in a line, and crashes on a
#: `null` outside of an object. A string that does not end in its value ends at _BEGIN's quote, which is then an error.
_BEGIN: Final = b'{"v":'
_END: Final = b"}\n"
#: A list around each: what goes on after a value in the one is an error in the other.
_LIST_BEGIN: Final = b'{"v":['
_LIST_END: Final = b"]}\n"
#: What values that are objects, or null, have in them if they go on as members of the object around them.
_OBJECT_GOES_ON: Final = re.compile(rb"\}\s*,")
_NULL_GOES_ON: Final = re.compile(rb'\{"v":\s*null\s*,')


Whole = Callable[[pa.DataType], pa.DataType]


class _UnfitError(Exception):
    """A block has a row that Arrow's parser does not read as Python's would."""


class JsonDecoder:
    """Decodes columns of JSON records into the Arrow type of a plan: that of the reader's schema, or of a DDL text. If
    it `validates`, each record is checked in full against the schema that wrote it, by jsonschema. `whole` adds to a
    type what records of an inferred schema may have beside it, and are not strange.

    `MissingPackage` if it is to validate, and jsonschema is not installed.
    """

    def __init__(self, column: Column, *, validates: bool = False, whole: Whole | None = None) -> None:
        self._column, self._whole = column, whole
        self.type: pa.DataType = column.type
        self._rows = RowParser(column)
        elements = (below.items or below.values for below in column.tree() if below.form in ("list", "map"))
        self._room = JsonRoom(max((_room(one) for one in elements if one is not None), default=0))
        #: What Arrow reads, and properties of the record that it can't: Python's parser adds them.
        self._fast, left = _divided(column)
        self._left = RowParser(left) if left.properties else None
        self._left_type = left.type
        #: The types that Arrow reads: first the one that it did last. None if it can't. It is four times as fast if
        #: times need not be text, but does not read digits of which no type has so many.
        self._read = [] if validates else _read_types(self._fast)
        self._quoted_decimals = _quoted_decimals(self._fast)
        self._validates = validates

    def another(self) -> JsonDecoder:
        """See `codec.Decoder`: a call leaves nothing in this one."""
        return self

    def program(self, writer: JsonSchema, rest: bytes | None = None) -> Validator | None:
        """What checks rows of `writer` in full; None if nothing is to. All rows are read by the reader's schema."""
        if not self._validates:
            return None
        from spark_klog.schemas.json_schema.validation import Validator

        return Validator(writer)

    def field_pairs(self, writer: JsonSchema, rest: bytes | None, path: tuple[str, ...]) -> list[FieldPair]:
        """See `codec.Decoder`."""
        mine, theirs = self._column, writer.column
        for name in path:
            below = [next((one.column for one in each.properties if one.name == name), ANY) for each in (mine, theirs)]
            mine, theirs = below
        read, written = ({one.name: one for one in each.properties} for each in (mine, theirs))
        pairs = [FieldPair(name, name if name in read else None) for name in written]
        return pairs + [FieldPair(None, name) for name, one in read.items() if one.fills and name not in written]

    def decode(
        self,
        values: pa.Array | BinaryColumn,
        programs: Sequence[Validator | None],
        which: Buffer | None = None,
        starts: int | Buffer = 0,
        strange: list[int] | None = None,
    ) -> Decoded:
        """Decode a binary column; see `codec.Decoder`.

        `strange` gets the numbers of rows, in order, that may have what the plan has no place for: fields that it
        does not know, values of other types, and integers that a double rounds. Of a record only.
        """
        numbers = None if which is None else np.frombuffer(which, np.int32)
        rows = _payloads(values, numbers if programs else np.full(len(_array(values)), -1, np.int32), starts)
        parts: list[pa.Array] = []
        bad = [BadRow(row, why) for row, why in self._room.crowded(rows).items()]
        if bad:
            is_bad = np.isin(np.arange(len(rows)), [row for row, _ in bad])
            rows = pc.if_else(pa.array(is_bad), pa.scalar(None, pa.binary()), rows)
        for begin, end in _blocks(rows):
            column = self._read_block(rows[begin:end], begin, strange)
            if column is not None:
                parts.append(column)
                continue
            size = _FEW if self._read else end - begin
            for first in range(begin, end, size):
                few = rows[first : min(first + size, end)]
                column = self._read_block(few, first, strange) if len(few) < end - begin else None
                if column is None:
                    column = self._parse_rows(few, first, programs, numbers, bad)
                    if strange is not None:
                        strange += range(first, first + len(few))
                parts.append(column)
        column = parts[0] if len(parts) == 1 else pa.concat_arrays(parts) if parts else pa.array([], self.type)
        return Decoded(column, sorted(bad))

    def _read_block(self, rows: pa.Array, first: int = 0, strange: list[int] | None = None) -> pa.Array | None:
        """The column of rows, by Arrow; None if it can't, or not as it should. `strange` as of `decode`."""
        if not self._read or not len(rows):
            return None if len(rows) else pa.array([], self.type)
        values = rows.fill_null(b"null")
        text = json_text(values)
        if any(mark in text and suspect.search(text) for mark, suspect in _SUSPECTS):
            return None
        if self._quoted_decimals is not None and self._quoted_decimals.search(text):
            return None
        try:
            rows.cast(pa.string())  # checks UTF-8: Arrow's parser accepts other bytes in strings
        except pa.ArrowInvalid:
            return None
        for kind in self._read:
            try:
                column, is_strange = self._read_values(values, text, kind, is_watched=strange is not None)
                if column.offset:
                    column = pa.concat_arrays([column])
                made = _finished(self._fast, column, None if self._column.nullable else rows.null_count)
                made = made if self._left is None else self._with_left(made, rows, self._left)
            except (pa.ArrowException, ValueError, OverflowError, _UnfitError):
                continue
            if kind is not self._read[0]:
                self._read = self._read[::-1]  # another thread may go over the list
            if strange is not None and is_strange:
                strange += self._strange_rows(values, first, kind)
            return made
        return None

    def _read_values(
        self, values: pa.Array, text: bytes, kind: pa.DataType, *, is_watched: bool
    ) -> tuple[pa.Array, bool]:
        """What Arrow reads of a type; if it `is_watched`, also whether it may be strange. Errors as of `read_json`."""
        if is_watched and self._left is None:
            with suppress(pa.ArrowException):  # a field that nobody has seen, or a row for Python
                read = kind if self._whole is None else self._whole(kind)
                column = read_json(values, text, read, ignores=False)
                return column, _is_rounded(column)
        return read_json(values, text, kind), is_watched

    def _strange_rows(self, values: pa.Array, first: int, kind: pa.DataType) -> list[int]:
        """The numbers of the rows of a strange block that may be strange themselves, so many at a time."""
        size = len(values) if self._left is not None else _FEW
        numbers: list[int] = []
        for begin in range(0, len(values), size):
            few = values[begin : begin + size]
            is_strange = len(few) == len(values)  # that was tried
            if not is_strange:
                try:
                    is_strange = self._read_values(few, json_text(few), kind, is_watched=True)[1]
                except (pa.ArrowException, ValueError):
                    is_strange = True
            if is_strange:
                numbers += range(first + begin, first + begin + len(few))
        return numbers

    def _with_left(self, made: pa.Array, rows: pa.Array, parser: RowParser) -> pa.Array:
        """The records with the properties that Arrow does not read; ValueError if one of them is bad."""
        left = pa.array([None if row is None else parser.parse(row) for row in rows.to_pylist()], self._left_type)
        children = [
            (left if left.type.get_field_index(one.name) >= 0 else made).field(one.name)
            for one in self._column.properties
        ]
        return pa.Array.from_buffers(self.type, len(made), [made.buffers()[0]], made.null_count, children=children)

    def _parse_rows(
        self,
        rows: pa.Array,
        first: int,
        programs: Sequence[Validator | None],
        which: np.ndarray[tuple[int], np.dtype[np.int32]] | None,
        bad: list[BadRow],
    ) -> pa.Array:
        """The column of rows, by Python; those that do not parse are null, and added to `bad`."""
        parse = self._rows.parse
        made = []
        for number, row in enumerate(rows.to_pylist(), first):
            value = None
            try:
                if row is not None:
                    value = parse(row)
                    validator = programs[0 if which is None else which[number]]
                    if validator is not None:
                        validator.check(row)
            except ValueError as error:
                # Arrow's parser needs no stack, and may have read such a row in a block
                is_deep = isinstance(error, NestedTooDeeply)
                one = self._read_block(rows[number - first : number - first + 1]) if is_deep else None
                if one is None:
                    bad.append(BadRow(number, str(error)))
                value = None if one is None else one[0].as_py()
            made.append(value)
        return pa.array(made, self.type)


def _array(values: pa.Array | BinaryColumn) -> pa.Array:
    """The binary array."""
    if isinstance(values, BinaryColumn):
        count = max(memoryview(values.offsets).nbytes // 4 - 1, 0)
        validity = None if values.validity is None else pa.py_buffer(values.validity)
        buffers = [validity, pa.py_buffer(values.offsets or bytes(4)), pa.py_buffer(values.data)]
        return pa.Array.from_buffers(pa.binary(), count, buffers)
    if pa.types.is_binary(values.type):
        return values
    try:
        return values.cast(pa.binary())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SchemaError(f"JSON records are a binary column, not {values.type}: cast it") from None


def _payloads(
    values: pa.Array | BinaryColumn,
    which: np.ndarray[tuple[int], np.dtype[np.int32]] | None,
    starts: int | Buffer,
) -> pa.Array:
    """The JSON of each row, null for a row that is to be null."""
    rows = _array(values)
    if which is not None and (which < 0).any():
        rows = pc.if_else(pa.array(which >= 0), rows, pa.scalar(None, pa.binary()))
    if not isinstance(starts, int):
        each = np.frombuffer(starts, np.int32)
        live = each if which is None else each[which >= 0]
        if len(live) and (live != live[0]).any():
            cut = [None if row is None else row[start:] for row, start in zip(rows.to_pylist(), each, strict=True)]
            return pa.array(cut, pa.binary())
        starts = int(live[0]) if len(live) else 0
    return pc.binary_slice(rows, starts, _LONGEST) if starts else rows


def _room(element: Column) -> int:
    """Bytes in columns of an element of a list or map without its fields, with all defaults of its own."""
    defaults = [one.default for below in element.tree() for one in below.properties if one.fills]
    return empty_bytes(element.type) + sum(len(json.dumps(default)) for default in defaults)


def _blocks(rows: pa.Array) -> list[tuple[int, int]]:
    """Ranges of rows with so many bytes that Arrow can parse them at once."""
    if not len(rows):
        return []
    ends = np.frombuffer(rows.buffers()[1], np.int32)[rows.offset : rows.offset + len(rows) + 1].astype(np.int64)
    blocks, begin = [], 0
    while begin < len(rows):
        end = int(np.searchsorted(ends, ends[begin] + _MOST_BYTES, "right")) - 1
        end = max(end, begin + 1)
        blocks.append((begin, end))
        begin = end
    return blocks


def _divided(column: Column) -> tuple[Column, Column]:
    """A record with the properties that Arrow reads, and one with the others."""
    read = [bool(_read_types(one.column)) for one in column.properties]
    if column.form != "struct" or not any(read):
        return column, Column("object")
    fast, left = (
        replace(column, properties=tuple(compress(column.properties, chosen)), arrow=None)
        for chosen in (read, [not one for one in read])
    )
    return fast, left


def _read_types(column: Column) -> list[pa.DataType]:
    """The types as which Arrow's parser reads a column: with times as such, then as text; none if it can't."""
    kinds = [_read_type(column, times) for times in (TIMESTAMP, pa.string())]
    return [kind for number, kind in enumerate(kinds) if kind is not None and kind not in kinds[:number]]


def _read_type(column: Column, times: pa.DataType) -> pa.DataType | None:
    form = column.form
    if form in ("json", "map", "time", "duration"):
        return None
    if form == "struct":
        kinds = [(one.name, _read_type(one.column, times)) for one in column.properties]
        return None if any(kind is None for _, kind in kinds) else pa.struct(kinds)
    if form == "list":
        assert column.items is not None
        # decimals as base64 stand where no name tells them
        is_read = column.items.form != "decimal" or column.items.dialect.digits_in_strings
        items = _read_type(column.items, times) if is_read else None
        return None if items is None else pa.list_(items)
    if form in ("date", "timestamp", "local-timestamp", "binary"):
        if column.type not in (pa.date32(), TIMESTAMP, LOCAL_TIMESTAMP, pa.binary()):
            return None  # of another unit, or size
        return times if form == "timestamp" else pa.string()
    return {"days": pa.int32(), "milliseconds": pa.int64()}.get(form, column.type)


def _quoted_decimals(column: Column) -> re.Pattern[bytes] | None:
    """What finds decimals that are text: base64, which Arrow might take for digits."""
    names = {
        re.escape(json.dumps(one.name, ensure_ascii=False).encode())
        for below in column.tree()
        for one in below.properties
        if one.column.form == "decimal" and not one.column.dialect.digits_in_strings
    }
    # a name with an escape may be one of them
    return re.compile(b"(?:" + b"|".join(sorted(names)) + rb'|\\.[^"\\]*")\s*:\s*"') if names else None


def _finished(column: Column, array: pa.Array, nulls: int | None) -> pa.Array:
    """The array in the column's own type, of what Arrow has read. `nulls` of it may be null, None: any number.

    `_UnfitError`, or an error of Arrow, if a value is not one of the column.
    """
    if nulls is not None and array.null_count > nulls:
        raise _UnfitError
    form = column.form
    if form == "struct":
        children = []
        for one in column.properties:
            child = array.field(one.name)
            if one.fills and child.null_count > array.null_count:
                if one.column.form in ("struct", "list"):  # Arrow does not fill these
                    raise _UnfitError
                child = _finished(one.column, child, None)
                children.append(child.fill_null(pa.scalar(default_of(one), child.type)))
            else:
                children.append(_finished(one.column, child, None if one.nullable else array.null_count))
        return pa.Array.from_buffers(column.type, len(array), [array.buffers()[0]], array.null_count, children=children)
    if form == "list":
        assert column.items is not None
        items = _finished(column.items, array.values, None if column.items.nullable else 0)
        return pa.Array.from_buffers(column.type, len(array), array.buffers()[:2], array.null_count, children=[items])
    if form == "binary":
        decoded = [None if text is None else base64.b64decode(text, validate=True) for text in array.to_pylist()]
        return pa.array(decoded, pa.binary())
    if form == "timestamp" or form == "local-timestamp":
        return _times(array, has_zone=form == "timestamp")
    if form == "date":
        if column.dialect.utc_dates:
            array = pc.replace_substring_regex(array, _DATE_OF_UTC, r"\1")
        return _within(array.cast(pa.date32()), pa.int32(), FIRST_DAY, LAST_DAY)
    if form == "days":
        return _within(array.cast(pa.date32()), pa.int32(), FIRST_DAY, LAST_DAY)
    if form == "milliseconds":
        return _within(array, pa.int64(), FIRST_MS, LAST_MS).cast(pa.timestamp("ms", "UTC")).cast(TIMESTAMP)
    if form == "number" and pc.all(pc.is_finite(array)).as_py() is False:
        raise _UnfitError
    return array


def _times(array: pa.Array, *, has_zone: bool) -> pa.Array:
    """The times of strings; in a zone they are UTC if they have none."""
    if pa.types.is_timestamp(array.type):
        return _within(array, pa.int64(), 1000 * FIRST_MS, 1000 * LAST_MS + 999)
    for kind in (TIMESTAMP, LOCAL_TIMESTAMP) if has_zone else (LOCAL_TIMESTAMP,):
        for beyond in (None, _BEYOND_MICROSECONDS):
            try:
                text = array if beyond is None else pc.replace_substring_regex(array, beyond, r"\1")
                times = text.cast(kind).cast(pa.int64())
            except pa.ArrowInvalid:
                continue
            times = _within(times, pa.int64(), 1000 * FIRST_MS, 1000 * LAST_MS + 999)
            return times.cast(TIMESTAMP if has_zone else LOCAL_TIMESTAMP)
    raise _UnfitError


def _within(array: pa.Array, kind: pa.DataType, first: int, last: int) -> pa.Array:
    """The array; `_UnfitError` if it has a number beyond these."""
    limits = pc.min_max(array.cast(kind)).as_py()
    if limits["min"] is not None and not first <= limits["min"] <= limits["max"] <= last:
        raise _UnfitError
    return array


def _is_rounded(column: pa.Array) -> bool:
    """Whether a column has doubles so large that Arrow may have rounded an integer."""
    if pa.types.is_struct(column.type):
        return any(map(_is_rounded, column.flatten()))
    if pa.types.is_list(column.type):
        return _is_rounded(column.values)
    if not pa.types.is_float64(column.type):
        return False
    least, most = pc.min_max(column).as_py().values()
    return most is not None and bool(max(-least, most) >= _EXACT_IN_DOUBLE)


def read_json(rows: pa.Array, text: bytes, kind: pa.DataType, *, ignores: bool = True) -> pa.Array:
    """Read JSON values of a type in UTF-8, of a binary column without nulls; `text` is `json_text` of it. Properties
    that a struct has not are ignored, unless they are to be errors; missing ones and a JSON `null` are null.

    `pa.ArrowException` or ValueError says why Arrow can't; it does not say of which value. Arrow takes NaN and
    Infinity for numbers.
    """
    table = None if ignores else _read(text, "v", kind, ignores=False)
    # {"id": 1}, "w": 5 would be read as {"id": 1}
    may_go_on = not pa.types.is_struct(kind) or _OBJECT_GOES_ON.search(text) or _NULL_GOES_ON.search(text)
    if may_go_on and ignores:
        try:
            table = _read(text, "v", kind, ignores=False)  # "w" is an error here, as any other property
        except pa.ArrowInvalid:
            _read(json_text(rows, _LIST_BEGIN, _LIST_END), "nothing", pa.null())
    if table is None:
        table = _read(text, "v", kind)
    if len(table) != len(rows):
        raise ValueError("more than one value")
    column = table["v"].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # before pyarrow 23
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], kind)
    if "decimal" in str(kind):
        column.validate(full=True)  # Arrow's parser looks at a number's own digits, before it adds zeros for the scale
    return column


def json_text(rows: pa.Array, begin: bytes = _BEGIN, end: bytes = _END) -> bytes:
    """The values of a binary column without nulls as lines, each in an object of its own."""
    joined = pc.binary_join_element_wise(begin, rows, end, b"")
    _, offsets, data = joined.buffers()
    ends = memoryview(offsets).cast("i")
    first, last = ends[joined.offset], ends[joined.offset + len(joined)]
    return bytes(memoryview(data)[first:last])


def _read(text: bytes, name: str, kind: pa.DataType, *, ignores: bool = True) -> pa.Table:
    return arrow_json.read_json(
        pa.BufferReader(text),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=pa.schema([pa.field(name, kind)]),
            unexpected_field_behavior="ignore" if ignores else "error",
        ),
    )
