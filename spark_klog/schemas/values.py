"""Python values of records ↔ Arrow: a record is a dict, as `pyarrow` has structs; maps are dicts, too."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pyarrow as pa

from spark_klog.columns.decode import binary_array, headers_array
from spark_klog.errors import EncodeError
from spark_klog.records.contract import BinaryColumn, HeadersColumn
from spark_klog.schemas.column_format import ColumnDecoder
from spark_klog.schemas.rows import BadRow
from spark_klog.schemas.value_types import below, preparing


class FetchedValues:
    """Values of a column of `count` fetched records, decoded in parts: an error of one leaves those before it."""

    def __init__(self, decoder: ColumnDecoder, source: BinaryColumn, headers: HeadersColumn | None, count: int) -> None:
        self._decode = decoder.decode
        self._source = binary_array(source, count, pa.binary())
        self._headers = None if headers is None or not headers.total else headers_array(headers, count)

    def part(self, first: int, count: int) -> tuple[list[Any], list[BadRow]]:
        """The values of some records, None for null, and those that do not decode, numbered from `first`.

        Of a key that a map has twice the last value counts.
        """
        headers = None if self._headers is None else self._headers.slice(first, count)
        decoded, bad = self._decode(self._source.slice(first, count), headers)
        try:
            return to_values(decoded), bad
        except (OverflowError, ValueError):
            values: list[Any] = []
            bad = list(bad)
            for row in range(count):
                try:
                    values += to_values(decoded.slice(row, 1))
                except (OverflowError, ValueError) as error:
                    values.append(None)
                    bad.append(BadRow(row, f"a time that Python's types do not have ({error}): poll_arrow returns it"))
            return values, bad


def to_values(rows: pa.Array) -> list[Any]:
    """The values of a column, None for null. Of a key that a map has twice the last value counts.

    pyarrow does the same with `maps_as_pydicts`, but a value at a time: ten times slower.
    """
    kind = rows.type
    if not _has_map(kind):
        plain: list[Any] = rows.to_pylist()
        return plain
    values: list[Any]
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        columns = [to_values(rows.field(number)) for number in range(len(names))]
        values = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    else:
        ends = rows.offsets.to_pylist()
        if pa.types.is_map(kind):
            pairs = list(zip(rows.keys.to_pylist(), to_values(rows.items), strict=True))
            values = [dict(pairs[start:end]) for start, end in pairwise(ends)]
        else:
            items = to_values(rows.values)
            values = [items[start:end] for start, end in pairwise(ends)]
    if not rows.null_count:
        return values
    return [value if is_valid else None for value, is_valid in zip(values, rows.is_valid().to_pylist(), strict=True)]


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_map(field.type) for field in kind)
    return bool(pa.types.is_map(kind) or (pa.types.is_list(kind) and _has_map(kind.value_type)))


class ValueColumn:
    """Makes columns of an Arrow type, `type`, of Python values; for formats that have no `Codec.value_writer`."""

    def __init__(self, kind: pa.DataType) -> None:
        self.type = kind
        self._prepare = preparing(kind, "")

    def of(self, value: Any) -> pa.Array:
        """A column of one value. `EncodeError` names the field that does not fit, or that there is none of that name.

        The column's type lacks the fields that the value leaves out, so that a format can say what stands for them: the
        default, or nothing. In lists and maps they are null, unless all items leave them out.
        """
        try:
            prepared = value if value is None or self._prepare is None else self._prepare(value)
            return pa.array([prepared], _present(self.type, [] if value is None else [value]))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, EncodeError):
                raise
            where, why = _misfit(value, self.type, "", error)
            raise EncodeError(f"{where and f'field {where}: '}{why}") from None


def _present(kind: pa.DataType, values: list[Any]) -> pa.DataType:
    """The type without the fields of structs that all of the values leave out."""
    if pa.types.is_struct(kind):
        rows = [value for value in values if isinstance(value, Mapping)]
        fields = [field for field in kind if not rows or any(field.name in row for row in rows)]
        types = [_present(one.type, [row[one.name] for row in rows if row.get(one.name) is not None]) for one in fields]
        if len(fields) == kind.num_fields and types == [field.type for field in kind]:
            return kind
        return pa.struct([field.with_type(one) for field, one in zip(fields, types, strict=True)])
    if pa.types.is_map(kind) and pa.types.is_nested(kind.item_type):
        item = _present(kind.item_type, [one for value in values for one in value.values() if one is not None])
        return kind if item == kind.item_type else pa.map_(kind.key_type, kind.item_field.with_type(item))
    if pa.types.is_list(kind) and pa.types.is_nested(kind.value_type):
        item = _present(kind.value_type, [one for value in values for one in value if one is not None])
        return kind if item == kind.value_type else pa.list_(kind.value_field.with_type(item))
    return kind


def _misfit(value: Any, kind: pa.DataType, path: str, error: Exception) -> tuple[str, str]:
    """The path of the field that does not fit a type, and why."""
    if pa.types.is_struct(kind):
        for field in kind:
            if field.name not in value:
                continue
            prepare = preparing(field.type, "")
            part = value[field.name]
            try:
                pa.array([part if prepare is None or part is None else prepare(part)], field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as inner:
                return _misfit(part, field.type, below(path, field.name), inner)
    return path, str(error)
