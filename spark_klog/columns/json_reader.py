"""Arrow's parser of JSON over the values of records, many at once."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import json

#: What stands around each value: an object of its own. Arrow would accept several values in a line, and crashes on a
#: `null` outside of an object. A string that does not end in its value ends at BEGIN's quote, which is then an error.
BEGIN, END = b'{"v":', b"}\n"


def read_json(data: pa.Buffer | bytes, count: int, kind: pa.DataType) -> pa.Array:
    """Read `count` values of a type, each between `BEGIN` and `END`, in UTF-8. Properties that a struct has not are
    ignored, missing ones and a JSON `null` are null.

    `pa.ArrowException` or ValueError says why Arrow can't; it does not say of which value. Arrow takes NaN and
    Infinity for numbers.
    """
    table = json.read_json(
        pa.BufferReader(data),
        read_options=json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=json.ParseOptions(
            explicit_schema=pa.schema([pa.field("v", kind)]), unexpected_field_behavior="ignore"
        ),
    )
    if len(table) != count:
        raise ValueError("more than one value")
    column = table["v"].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # before pyarrow 23
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], kind)
    if "decimal" in str(kind):
        column.validate(full=True)  # Arrow's parser looks at a number's own digits, before it adds zeros for the scale
    return column
