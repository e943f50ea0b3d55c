"""The statistics of a Parquet file in the form that a Delta table's add action has them (PROTOCOL.md, Per-file
Statistics): numRecords, minValues, maxValues and nullCount, as JSON.

They are taken from the file's footer. If a file has minima, but none of some column, deltalake finds no row of the file
by a filter on that column; likewise for maxima. So a bound that JSON can't have is rounded away from the values. If
nothing can stand for it, the file has no minima (or no maxima) at all, which readers take as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spark_klog.columns.schema import is_bytes, is_text
from spark_klog.tables.change_order import OWN
from spark_klog.tables.columns import NAN_COLUMNS, leaves

#: Properties of a table that say which columns have bounds: their names, or how many leading ones (-1: all).
_STATS_COLUMNS, _INDEXED = "delta.dataSkippingStatsColumns", "delta.dataSkippingNumIndexedCols"
_DEFAULT_INDEXED = 32
#: Columns that have bounds wherever they are: where a record is from.
PLACE = tuple(f"{prefix}{name}" for prefix in ("", OWN) for name in ("topic", "partition", "offset", "timestamp"))
#: Characters of a bound of strings, as Delta's writers cut them.
_PREFIX = 32
_LARGEST_CHARACTER = "\U0010ffff"
#: Bounds of strings that a footer leaves out, as they are longer than 4 KB. Nobody filters by a larger text.
_ANY_STRING = "", _LARGEST_CHARACTER * 2 * _PREFIX
#: The sides of the bounds of a column without a value, or of a type that has none.
_NOTHING = ""
_EPOCH = datetime(1970, 1, 1)


def statistics_json(metadata: pq.FileMetaData, properties: Mapping[str, str], variants: Collection[str] = ()) -> str:
    """The statistics of a file by its footer, for a table that has these properties; none of `variants`, its columns of
    VARIANT, whose bytes have no order.
    """
    indexed = -1 if _STATS_COLUMNS in properties else int(properties.get(_INDEXED, _DEFAULT_INDEXED))
    has_nan = json.loads((metadata.metadata or {}).get(NAN_COLUMNS.encode(), b"{}"))
    sides: dict[str, dict[str, Any] | None] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    for number, leaf in enumerate(leaves(metadata.schema.to_arrow_schema())):
        if leaf.path is None or leaf.path[0] in variants or (0 <= indexed <= leaf.before and leaf.path[0] not in PLACE):
            continue
        chunks = [metadata.row_group(group).column(number) for group in range(metadata.num_row_groups)]
        low, high, nulls = _texts(chunks, leaf.type)
        if pa.types.is_floating(leaf.type) and has_nan.get(str(number), True):
            high = None
        for name, text in zip(sides, (low, high, nulls), strict=True):
            values = sides[name]
            if text is None:
                sides[name] = None
            elif text and values is not None:
                _put(values, leaf.path, text)
    known = {name: values for name, values in sides.items() if values is not None}
    return _object({"numRecords": str(metadata.num_rows), **known})


def _put(target: dict[str, Any], path: tuple[str, ...], text: str) -> None:
    for name in path[:-1]:
        target = target.setdefault(name, {})
    target[path[-1]] = text


def _object(values: Mapping[str, Any]) -> str:
    """JSON of texts that are JSON: a decimal has more digits than a float of Python's."""
    texts = (f"{_quoted(name)}:{one if isinstance(one, str) else _object(one)}" for name, one in values.items())
    return f"{{{','.join(texts)}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _texts(chunks: list[Any], kind: pa.DataType) -> tuple[str | None, str | None, str | None]:
    """The least and the largest value and the number of nulls, as JSON; None for what is not known."""
    known = [chunk.statistics for chunk in chunks]
    if not all(one is not None and one.has_null_count for one in known):
        return None, None, None
    nulls = str(sum(one.null_count for one in known))
    filled = [one for one, chunk in zip(known, chunks, strict=True) if one.null_count < chunk.num_values]
    if not filled or is_bytes(kind):
        return _NOTHING, _NOTHING, nulls
    if not all(one.has_min_max for one in filled):
        return (_quoted(_ANY_STRING[0]), _quoted(_ANY_STRING[1]), nulls) if is_text(kind) else (None, None, nulls)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):  # as numbers: Python has no dates of all of them
        lows, highs = [one.min_raw for one in filled], [one.max_raw for one in filled]
    else:
        lows, highs = [one.min for one in filled], [one.max for one in filled]
    return _text(min(lows), kind, is_max=False), _text(max(highs), kind, is_max=True), nulls


def _text(value: Any, kind: pa.DataType, *, is_max: bool) -> str | None:
    """A bound as JSON; None for times and dates before the year 1 and after 9999, which no reader of statistics has."""
    if pa.types.is_floating(kind):  # "Infinity" is what Spark writes
        return repr(float(value)) if abs(value) != float("inf") else _quoted("-Infinity" if value < 0 else "Infinity")
    if pa.types.is_decimal(kind):
        return format(value, "f")
    if is_text(kind):
        return _quoted(cut(value, is_max=is_max))
    try:
        if pa.types.is_date(kind):
            return _quoted(date.fromordinal(date(1970, 1, 1).toordinal() + value).isoformat())
        if pa.types.is_timestamp(kind):
            return _quoted(_time(_EPOCH + timedelta(microseconds=value), is_max=is_max) + "Z" * (kind.tz is not None))
    except (OverflowError, ValueError):
        return None
    return json.dumps(value)


def cut(text: str, *, is_max: bool) -> str:
    """The text or one that is shorter and smaller, or larger."""
    rest = text[_PREFIX:]
    if not rest or not is_max:
        return text[:_PREFIX]
    largest = len(rest) - len(rest.lstrip(_LARGEST_CHARACTER))
    return text[:_PREFIX] + _LARGEST_CHARACTER * (largest + 1)


def _time(value: datetime, *, is_max: bool) -> str:
    """In milliseconds; rounded up, as not all readers know that writers cut the rest off."""
    if is_max and value.microsecond % 1000:
        try:
            value += timedelta(microseconds=1000 - value.microsecond % 1000)
        except OverflowError:  # in the last millisecond of the year 9999
            return value.isoformat()
    return value.isoformat(timespec="milliseconds")
