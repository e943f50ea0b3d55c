"""Parse values of JSON to a column of a schema, in bulk; values that do not parse are named.

Find values that can't be of a schema by Python's own parser of JSON, much faster than by Arrow's errors.

It is the stricter one in nothing: what it finds is bad for Arrow, too. Some of what is bad is not found here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.load.values.event_time import FIRST_US, LAST_US

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_NUMBER = re.compile(r"[-+.0-9]")
#: Longer integers are of no type; Python is slow to read them.
_MOST_DIGITS = 400
_NAMES: dict[type, str] = {str: "a string", dict: "an object", list: "an array", bool: "a boolean"}


def _integer(text: str) -> float:
    return int(text) if len(text) <= _MOST_DIGITS else math.inf


def why_bad(row: bytes, kind: pa.DataType) -> str:
    """Explain why a value is not JSON of a type; "" if that is not certain."""
    try:
        value = json.loads(str(row, "utf-8"), strict=False, parse_int=_integer)
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        if b"Inf" in row or b"NaN" in row:  # Arrow reads Inf and -NaN, too
            return ""
        return f"no JSON: {error.msg} at character {error.pos}"
    except RecursionError:
        return ""
    return _why(value, kind, "")


def _why(value: Any, kind: pa.DataType, path: str) -> str:
    if value is None:
        return ""
    wanted = _wanted(value, kind)
    if wanted:
        where = f"field {path[1:]}" if path else "the value"
        return f"{where} must be {wanted}, not {_NAMES.get(type(value), 'a number')}"
    if pa.types.is_struct(kind):
        for field in kind:
            if found := _why(value.get(field.name), field.type, f"{path}.{field.name}"):
                return found
    elif pa.types.is_list(kind):
        for item in value:
            if found := _why(item, kind.value_type, path):
                return found
    return ""


def _wanted(value: Any, kind: pa.DataType) -> str:
    """Name what a type requires in place of a value; "" if the value may be of the type."""
    is_text = isinstance(value, str)
    if pa.types.is_struct(kind):
        return "" if isinstance(value, dict) else "an object"
    if pa.types.is_list(kind):
        return "" if isinstance(value, list) else "an array"
    if pa.types.is_boolean(kind):
        return "" if isinstance(value, bool) else "a boolean"
    if pa.types.is_integer(kind):
        is_one = isinstance(value, int) and not isinstance(value, bool)
        bits = kind.bit_width - 1
        return "" if is_one and -(1 << bits) <= value < 1 << bits else f"an integer of {bits + 1} bits"
    if pa.types.is_floating(kind):
        return "" if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
    if pa.types.is_string(kind):
        return "" if is_text else "a string"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return f"a {'date' if pa.types.is_date(kind) else 'timestamp'}" if is_text and not _DATE.match(value) else ""
    return "a decimal" if is_text and not _NUMBER.match(value) else ""


#: What is parsed at once.
_MOST_BYTES = 64 * 1024 * 1024
#: Values that do not all parse are looked at one by one when they are so many; more are halved.
_SIFTED = 1024
_BEGIN, _END = b'{"v":', b"}"


@dataclass(frozen=True)
class Parsed:
    """A column of values, and (row, reason) of the rows that are not in it."""

    column: pa.Array
    bad: list[tuple[int, str]]


class JsonParser:
    """Parses JSON objects by a struct type. Fields that it has not are ignored, missing ones are null.

    A value that is null, or the JSON `null`, is null.
    """

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        # Arrow parses dates from numbers only.
        self._read = _without_dates(kind)
        self._schema = pa.schema([pa.field("v", self._read)])

    def parse(self, values: pa.Array) -> Parsed:
        """Parse a binary column. A value parses as a whole or is bad."""
        rows = [b"null" if value is None else value for value in values.to_pylist()]
        columns: list[pa.Array] = []
        bad: list[tuple[int, str]] = []
        waiting: list[tuple[Sequence[int], bool]] = [(range(len(rows)), False)]
        while waiting:
            numbers, is_sifted = waiting.pop()
            if not numbers:
                continue
            part = [rows[number] for number in numbers]
            found: pa.Array | str = "too many bytes"
            if len(numbers) == 1 or sum(map(len, part)) <= _MOST_BYTES:
                found = self._parse(part)
            if not isinstance(found, str):
                columns.append(found)
            elif len(numbers) == 1:
                bad.append((numbers[0], found))
            elif not is_sifted and len(numbers) <= _SIFTED:
                reasons = [(number, why_bad(row, self._kind)) for number, row in zip(numbers, part, strict=True)]
                bad += [item for item in reasons if item[1]]
                waiting.append(([number for number, reason in reasons if not reason], True))
            else:
                middle = len(numbers) // 2
                waiting += [(numbers[middle:], is_sifted), (numbers[:middle], is_sifted)]
        return Parsed(pa.concat_arrays(columns) if columns else pa.array([], self._kind), sorted(bad))

    def _parse(self, rows: list[bytes]) -> pa.Array | str:
        """Parse rows into a column, or return why Arrow can't.

        Each row is wrapped in an object of its own: Arrow would accept several values in a line, and crashes on a
        `null` outside of an object.
        """
        from pyarrow import json

        data = b"\n".join([_BEGIN + row + _END for row in rows])
        try:
            data.decode()  # Arrow accepts other bytes in strings
            table = json.read_json(
                pa.BufferReader(data),
                read_options=json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=json.ParseOptions(explicit_schema=self._schema, unexpected_field_behavior="ignore"),
            )
            if len(table) != len(rows):
                return "more than one value"
            column = table["v"].combine_chunks()
            if isinstance(column, pa.ChunkedArray):  # before pyarrow 23
                column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], self._read)
            found = column.cast(self._kind)
            return found if _is_dated(found) else "a time before the year 1 or after 9999"
        except UnicodeDecodeError as error:
            return f"not UTF-8 ({error.reason} at byte {error.start - len(_BEGIN)})"
        except (pa.ArrowException, ValueError) as error:
            return str(error).partition(" in row ")[0].replace("Column(/v", "Column(")


def _without_dates(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _without_dates(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    return pa.string() if pa.types.is_date(kind) else kind


def _is_dated(column: pa.Array) -> bool:
    """Whether Python, and so a reader of the files, has all times of a column."""
    kind = column.type
    if pa.types.is_struct(kind):
        return all(_is_dated(field) for field in column.flatten())
    if pa.types.is_list(kind):
        return _is_dated(column.flatten())
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return True
    times = pc.min_max(column.cast(pa.timestamp("us")).cast(pa.int64())).as_py()
    return times["min"] is None or FIRST_US <= times["min"] <= times["max"] <= LAST_US
