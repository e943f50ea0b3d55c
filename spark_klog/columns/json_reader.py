"""Arrow's parser of JSON over the values of records, many at once."""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json

#: What stands around each value: an object of its own. Arrow would accept several values in a line, and crashes on a
#: `null` outside of an object. A string that does not end in its value ends at BEGIN's quote, which is then an error.
BEGIN: Final = b'{"v":'
_END: Final = b"}\n"
#: A list around each: what goes on after a value in the one is an error in the other.
_LIST_BEGIN: Final = b'{"v":['
_LIST_END: Final = b"]}\n"
#: What values that are objects, or null, have in them if they go on as members of the object around them.
_OBJECT_GOES_ON: Final = re.compile(rb"\}\s*,")
_NULL_GOES_ON: Final = re.compile(rb'\{"v":\s*null\s*,')


def read_json(rows: pa.Array, text: bytes, kind: pa.DataType) -> pa.Array:
    """Read JSON values of a type in UTF-8, of a binary column without nulls; `text` is `json_text` of it. Properties
    that a struct has not are ignored, missing ones and a JSON `null` are null.

    `pa.ArrowException` or ValueError says why Arrow can't; it does not say of which value. Arrow takes NaN and
    Infinity for numbers.
    """
    table = None
    # {"id": 1}, "w": 5 would be read as {"id": 1}
    may_go_on = not pa.types.is_struct(kind) or _OBJECT_GOES_ON.search(text) or _NULL_GOES_ON.search(text)
    if may_go_on:
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


def json_text(rows: pa.Array, begin: bytes = BEGIN, end: bytes = _END) -> bytes:
    """The values of a binary column without nulls as lines, each in an object of its own."""
    joined = pc.binary_join_element_wise(begin, rows, end, b"")
    _, offsets, data = joined.buffers()
    ends = memoryview(offsets).cast("i")
    first, last = ends[joined.offset], ends[joined.offset + len(joined)]
    return bytes(memoryview(data)[first:last])


def _read(text: bytes, name: str, kind: pa.DataType, *, ignores: bool = True) -> pa.Table:
    return json.read_json(
        pa.BufferReader(text),
        read_options=json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=json.ParseOptions(
            explicit_schema=pa.schema([pa.field(name, kind)]),
            unexpected_field_behavior="ignore" if ignores else "error",
        ),
    )
