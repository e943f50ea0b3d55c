"""The statistics of a Parquet file in the form that a Delta table's add action has them (PROTOCOL.md, Per-file
Statistics): numRecords, minValues, maxValues and nullCount, as JSON.

They are taken from the file's footer. A bound that is not certain is left out, as readers skip files by it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

#: Leading leaves of a table that have bounds; Delta's default of delta.dataSkippingNumIndexedCols.
_INDEXED = 32
#: Columns that have bounds wherever they are: where a record is from.
PLACE = ("topic", "partition", "offset", "timestamp", "_topic", "_partition", "_offset", "_timestamp")
#: Characters of a bound of strings, as Delta's writers cut them.
_PREFIX = 32
_LARGEST_CHARACTER = "\U0010ffff"
_EPOCH = datetime(1970, 1, 1)
_UNITS = {"s": 1_000_000, "ms": 1000, "us": 1, "ns": 1}


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the file's schema: its path and type; None for a leaf of lists and maps, which have no statistics."""

    path: tuple[str, ...] | None
    type: pa.DataType


def statistics_json(metadata: pq.FileMetaData) -> str:
    """The statistics of a file by its footer."""
    minimum: dict[str, Any] = {}
    maximum: dict[str, Any] = {}
    nulls: dict[str, Any] = {}
    for number, leaf in enumerate(_leaves(metadata.schema.to_arrow_schema())):
        if leaf.path is None or (number >= _INDEXED and leaf.path[0] not in PLACE):
            continue
        low, high, count = _bounds(metadata, number, leaf.type)
        for target, value in ((minimum, low), (maximum, high), (nulls, count)):
            if value is not None:
                _put(target, leaf.path, value)
    whole = {"numRecords": metadata.num_rows, "minValues": minimum, "maxValues": maximum, "nullCount": nulls}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def _leaves(schema: pa.Schema) -> Iterator[_Leaf]:
    """The leaves in the order of a file's columns."""
    for field in schema:
        yield from _leaves_of((field.name,), field.type)


def _leaves_of(path: tuple[str, ...] | None, kind: pa.DataType) -> Iterator[_Leaf]:
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves_of(None if path is None else (*path, field.name), field.type)
    elif pa.types.is_map(kind):
        yield from _leaves_of(None, kind.key_type)
        yield from _leaves_of(None, kind.item_type)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from _leaves_of(None, kind.value_type)
    else:
        yield _Leaf(path, kind)


def _put(target: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        target = target.setdefault(name, {})
    target[path[-1]] = value


def _bounds(metadata: pq.FileMetaData, column: int, kind: pa.DataType) -> tuple[Any, Any, int | None]:
    """The least and the largest value as JSON has them, and the nulls; None for what is not known."""
    lows, highs = [], []
    nulls: int | None = 0
    is_known = True
    for group in range(metadata.num_row_groups):
        chunk = metadata.row_group(group).column(column)
        found = chunk.statistics
        count = found.null_count if found is not None and found.has_null_count else None
        nulls = None if nulls is None or count is None else nulls + count
        if count == chunk.num_values:
            continue
        if found is None or not found.has_min_max:
            is_known = False
            continue
        try:
            lows.append(_value(found, kind, is_max=False))
            highs.append(_value(found, kind, is_max=True))
        except (OverflowError, ValueError):  # a time that has no date
            is_known = False
    if not lows or not is_known:
        return None, None, nulls
    return _json(min(lows), kind, is_max=False), _json(max(highs), kind, is_max=True), nulls


def _value(found: pq.Statistics, kind: pa.DataType, *, is_max: bool) -> Any:
    if pa.types.is_timestamp(kind):
        # in whole microseconds: a bound of nanoseconds is rounded away from the values
        raw = (found.max_raw if is_max else found.min_raw) * _UNITS[kind.unit]
        return -(-raw // 1000) if kind.unit == "ns" and is_max else raw // 1000 if kind.unit == "ns" else raw
    return found.max if is_max else found.min


def _json(value: Any, kind: pa.DataType, *, is_max: bool) -> Any:
    """A bound as Delta's JSON has it; None for types without bounds, and for bounds that could be wrong."""
    if pa.types.is_boolean(kind):
        return None
    if pa.types.is_integer(kind):
        return int(value)
    if pa.types.is_floating(kind):
        # A footer leaves out NaN, which is larger than all others in Delta.
        return None if is_max or value != value or abs(value) == float("inf") else float(value)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return value if len(value) <= _PREFIX else value[:_PREFIX] + _LARGEST_CHARACTER * is_max
    if pa.types.is_date(kind):
        return str(value.isoformat())
    if pa.types.is_timestamp(kind):
        # of milliseconds; rounded up, as not all readers know that writers cut the rest off
        value = -(-value // 1000) if is_max else value // 1000
        try:
            text = (_EPOCH + timedelta(milliseconds=value)).isoformat(timespec="milliseconds")
        except OverflowError:
            return None
        return text + "Z" * (kind.tz is not None)
    if pa.types.is_decimal(kind):
        number = float(value)
        return number if number == value else None
    return None
