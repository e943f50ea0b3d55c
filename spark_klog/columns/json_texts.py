"""Arrow columns of any type as JSON, a text a row, made column by column: no Python object is made for a row.

struct                       an object with all fields           decimal          a number with all digits of its scale
                                                                 duration         "1.500000s", as in Protobuf's JSON
list                         a list                              date, time       "2026-11-21", "10:00:00.000000"
map                          an object                           timestamp        "2026-11-21T10:00:00.123456Z", without
bytes                        text if they are UTF-8,                              the Z if it is a local one; a number
                                                                                  beyond the years of Arrow's calendar
                             else {"base64": "..."}              NaN, infinity    "NaN", "Infinity", "-Infinity"

`texts_array` and `literal` make them of Python's objects: `pyarrow.array` and `pyarrow.scalar` import pandas, if it is
installed, and that takes longer than all else of a short command.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.records.contract import json_value

#: What JSON escapes by two characters; the backslash first.
_ESCAPES = (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"), ("\r", r"\r"), ("\t", r"\t"))
#: As Arrow writes them, and as Avro's and Protobuf's JSON do.
_NOT_FINITE = (("nan", '"NaN"'), ("-inf", '"-Infinity"'), ("inf", '"Infinity"'))


def texts_array(texts: Sequence[bytes]) -> pa.Array:
    """A column of texts, large_binary."""
    ends = array("q", accumulate(map(len, texts), initial=0))
    return pa.Array.from_buffers(
        pa.large_binary(), len(texts), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
    )


def literal(data: bytes) -> pa.Scalar:
    return texts_array([data])[0]


EMPTY, NULL = literal(b""), literal(b"null")
#: Of a second, by Arrow's unit.
UNIT_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_QUOTE = literal(b'"')


def json_texts(column: pa.Array, ascii: bool = False) -> pa.Array:
    """The JSON of each value, large_binary without nulls; `ascii` escapes all other characters, for terminals."""
    kind, types = column.type, pa.types
    if types.is_null(kind):
        return _plain(column)
    if types.is_dictionary(kind):
        return json_texts(column.dictionary_decode(), ascii)
    if types.is_struct(kind):
        return _with_nulls(_objects(column, ascii), column)
    if types.is_map(kind):
        entries = _joined([_names(column.keys, ascii), literal(b": "), json_texts(column.items, ascii)])
        return _with_nulls(_sequences(column.offsets, entries, b"{}"), column)
    if types.is_list(kind):
        return _with_nulls(_sequences(column.offsets, json_texts(column.values, ascii), b"[]"), column)
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return _plain(column.cast(pa.string()))
    if types.is_floating(kind):
        return _plain(_floats(column))
    if types.is_date32(kind) or types.is_time(kind):
        return _in_range(_in_quotes(column.cast(pa.string())))
    if types.is_duration(kind):
        return _in_quotes(_seconds(column), b"s")
    if types.is_timestamp(kind):
        text = pc.replace_substring_regex(column.cast(pa.timestamp(kind.unit)).cast(pa.string()), r"^([^< ]+) ", r"\1T")
        return _in_range(_in_quotes(text, b"" if kind.tz is None else b"Z"))
    return _texts(column, ascii)


def _joined(columns: list[pa.Array | pa.Scalar]) -> pa.Array:
    return pc.binary_join_element_wise(*columns, EMPTY)


def _with_nulls(texts: pa.Array, column: pa.Array) -> pa.Array:
    return pc.if_else(column.is_null(), NULL, texts) if column.null_count else texts


def _plain(texts: pa.Array) -> pa.Array:
    return texts.cast(pa.large_binary()).fill_null(NULL)


def _in_quotes(texts: pa.Array, end: bytes = b"") -> pa.Array:
    return _joined([_QUOTE, texts.cast(pa.large_binary()), literal(end + b'"')]).fill_null(NULL)


def _in_range(texts: pa.Array) -> pa.Array:
    """Numbers for times of which Arrow has no text, as they are beyond its calendar."""
    return pc.replace_substring_regex(texts, r'^"<value out of range: (-?\d+)>Z?"$', r"\1")


def _objects(column: pa.StructArray, ascii: bool) -> pa.Array:
    parts: list[pa.Array | pa.Scalar] = []
    before = "{"
    for field, values in zip(column.type, column.flatten(), strict=True):
        parts += [
            literal(f"{before}{json.dumps(field.name, ensure_ascii=ascii)}: ".encode()),
            json_texts(values, ascii),
        ]
        before = ", "
    if not parts:
        return pa.array([b"{}"] * len(column), pa.large_binary())
    return _joined([*parts, literal(b"}")])


def _names(column: pa.Array, ascii: bool) -> pa.Array:
    """The keys of maps, which are text in JSON."""
    texts = json_texts(column, ascii)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return texts
    return _joined([_QUOTE, texts, _QUOTE])


def _sequences(offsets: pa.Array, texts: pa.Array, ends: bytes) -> pa.Array:
    # `binary_join` knows no large_binary
    lists = pa.ListArray.from_arrays(offsets, texts.cast(pa.binary()))
    return _joined([literal(ends[:1]), pc.binary_join(lists, b", ").cast(pa.large_binary()), literal(ends[1:])])


def _floats(column: pa.Array) -> pa.Array:
    # with a point, as a number without one is a whole number elsewhere, which has no -0
    texts = pc.replace_substring_regex(column.cast(pa.string()), r"^(-?\d+)$", r"\1.0")
    if pc.all(pc.is_finite(column)).as_py() is not False:
        return texts
    for theirs, name in _NOT_FINITE:
        texts = pc.replace_substring_regex(texts, f"^{theirs}$", name)
    return texts


def _seconds(column: pa.Array) -> pa.Array:
    """Durations as seconds with all digits of their unit."""
    numbers = column.cast(pa.int64()).cast(pa.decimal128(19))
    kind = pa.decimal128(19, UNIT_DIGITS[column.type.unit])
    shifted = pa.Array.from_buffers(kind, len(numbers), numbers.buffers(), numbers.null_count, numbers.offset)
    return shifted.cast(pa.string())


def _texts(column: pa.Array, ascii: bool) -> pa.Array:
    """The JSON of text, bytes, and what has no form of its own."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        try:
            column = column.cast(pa.binary())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return _in_quotes(
                pa.array([None if cell is None else str(cell) for cell in column.to_pylist()], pa.string())
            )
    quoted = None if ascii else _quoted(column)
    if quoted is None:
        texts = (json.dumps(json_value(value), ensure_ascii=ascii) for value in column.cast(pa.binary()).to_pylist())
        quoted = pa.array([text.encode() for text in texts], pa.large_binary())
    return quoted


def _quoted(column: pa.Array) -> pa.Array | None:
    """The same for text, much faster; None if there is something in it that needs more than a backslash."""
    try:
        text = column.cast(pa.large_string())
    except pa.ArrowInvalid:  # no UTF-8
        return None
    for plain, escaped in _ESCAPES:
        text = pc.replace_substring(text, plain, escaped)
    if pc.any(pc.match_substring_regex(text, "[\\x00-\\x1f]")).as_py():
        return None
    return _in_quotes(text)
