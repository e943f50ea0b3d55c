"""Parse values of JSON to a column of a schema, in bulk; values that do not parse are named."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pyarrow as pa

#: What is parsed at once.
_MOST_BYTES = 64 * 1024 * 1024
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
        waiting = [(0, len(rows))]
        while waiting:
            first, last = waiting.pop()
            if first == last:
                continue
            part = rows[first:last]
            found: pa.Array | str = "too many bytes"
            if last - first == 1 or sum(map(len, part)) <= _MOST_BYTES:
                found = self._parse(part)
            if not isinstance(found, str):
                columns.append(found)
            elif last - first == 1:
                bad.append((first, found))
            else:
                middle = (first + last) // 2
                waiting += [(middle, last), (first, middle)]
        return Parsed(pa.concat_arrays(columns) if columns else pa.array([], self._kind), bad)

    def _parse(self, rows: list[bytes]) -> pa.Array | str:
        """The rows' column, or why it is none.

        Each row is the member of an object of its own: Arrow accepts several values in a line, and dies of a `null`
        that is none's member.
        """
        from pyarrow import json

        data = b"\n".join([_BEGIN + row + _END for row in rows])
        try:
            data.decode()  # Arrow accepts other bytes in strings
            table = json.read_json(
                io.BytesIO(data),
                read_options=json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=json.ParseOptions(explicit_schema=self._schema, unexpected_field_behavior="ignore"),
            )
            if len(table) != len(rows):
                return "more than one value"
            column = table["v"].combine_chunks()
            if isinstance(column, pa.ChunkedArray):  # before pyarrow 23
                column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], self._read)
            return column.cast(self._kind)
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
